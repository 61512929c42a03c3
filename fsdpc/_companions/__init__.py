"""What several companions share, and steps of torch's optimizers that gain from it."""

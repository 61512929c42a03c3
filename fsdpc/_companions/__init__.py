"""Code that several companions share, and code that makes steps of torch's optimizers faster."""

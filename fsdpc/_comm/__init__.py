"""Groups of ranks: which communicator, how its ranks find each other, what they send."""

"""Groups of ranks: the choice of a communicator, the rendezvous of ranks, and their messages."""

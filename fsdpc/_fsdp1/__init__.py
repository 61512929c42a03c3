"""``FullyShardedDataParallel``: the class, its arguments, wrapping and summoning."""

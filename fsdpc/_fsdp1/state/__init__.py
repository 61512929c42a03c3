"""State dicts of ``FullyShardedDataParallel``: FULL, SHARDED and LOCAL."""

"""The implementation behind the class ``FullyShardedDataParallel`` (``fsdpc/fsdp.py``)."""

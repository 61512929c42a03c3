"""The implementation of ``fully_shard``, torch's FSDP2 interface, over the engine."""

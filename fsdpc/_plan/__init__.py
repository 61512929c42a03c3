"""What a training step needs in memory, before it runs. Nothing here is imported by ``fsdpc``."""

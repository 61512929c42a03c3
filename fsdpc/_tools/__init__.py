"""Tools beside training: reports, checks, diagnosis. Nothing here is imported by ``fsdpc``."""

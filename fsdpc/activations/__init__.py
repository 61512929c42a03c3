"""Functions that save memory for activations: checkpointing of some blocks, compression and
offloading of saved tensors.

See docs/activations.md.
"""

from fsdpc.activations.checkpointing import checkpoint
from fsdpc.activations.compression import compress
from fsdpc.activations.offloading import offload

__all__ = ["checkpoint", "compress", "offload"]

"""torch's module name, for scripts that import from it: re-exports ``fsdpc.fsdp`` and
``fsdpc.api``.
"""

from torch.distributed.fsdp import api as _torchs

from fsdpc.api import *
from fsdpc.fsdp import FSDP, FullyShardedDataParallel

__all__ = [
    "FSDP",
    "FlatParameter",
    "FullyShardedDataParallel",
    "OptimStateKeyType",
    *_torchs.__all__,
]

"""The names of ``fsdpc.fsdp`` and ``fsdpc.api``, in a module with the name that torch's module has,
for scripts that import from ``fully_sharded_data_parallel``.
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

"""A module with the name of torch's module, for scripts that import from
``fully_sharded_data_parallel``. It exports the names of ``fsdpc.fsdp`` and ``fsdpc.api``.
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

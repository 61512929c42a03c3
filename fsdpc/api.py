"""Enums and configuration classes of the front end: torch's own objects under fsdpc's name.

The objects are re-exported and never redefined. So equality, ``isinstance`` and pickles work
between a script's imports from ``torch.distributed.fsdp`` and its imports from ``fsdpc``.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp.api import *
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

from fsdpc._torch import FlatParameter, TrainingState

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
]

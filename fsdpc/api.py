"""Enums and configuration classes of the front end: torch's own objects under fsdpc's name.

Re-exported and never redefined, so that equality, ``isinstance`` and pickles hold between a
script's ``torch.distributed.fsdp`` imports and its ``fsdpc`` imports. No logic lives here.
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

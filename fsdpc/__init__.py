"""fsdpc: PyTorch's Fully Sharded Data Parallel with its internals in C.

A training script changes one import: ``from fsdpc import FullyShardedDataParallel as FSDP``. The
names, argument order and defaults are those of ``torch.distributed.fsdp``; enums, configuration
classes and policies are torch's.

Importing the package prints and loads nothing: each public name is imported on first use, because
importing ``torch.distributed.fsdp`` takes half a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXCEPTIONS = (
    "CommError",
    "CommTimeout",
    "MismatchError",
    "OutOfMemoryError",
    "PeerError",
    "StateError",
)
_API = (
    "BackwardPrefetch",
    "CPUOffload",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
)
_HOME = {
    **dict.fromkeys(_EXCEPTIONS, "fsdpc._C"),
    **dict.fromkeys(_API, "fsdpc.api"),
    "FSDP": "fsdpc.fsdp",
    "FullyShardedDataParallel": "fsdpc.fsdp",
    "install": "fsdpc._fsdp1.install",
    "mark_data_dependent": "fsdpc._fsdp1.marks",
    "memory_report": "fsdpc._tools.report",
    "memory_stats": "fsdpc._fsdp1.root",
    "set_collectives": "fsdpc._comm.bootstrap",
    "uninstall": "fsdpc._fsdp1.install",
}
_SUBMODULES = ("api", "fsdp", "fully_sharded_data_parallel", "state_dict", "wrap")

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CommError",
    "CommTimeout",
    "FSDP",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MismatchError",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OutOfMemoryError",
    "PeerError",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StateError",
    "__version__",
    "install",
    "mark_data_dependent",
    "memory_report",
    "memory_stats",
    "set_collectives",
    "uninstall",
]

if TYPE_CHECKING:
    from fsdpc._C import (
        CommError,
        CommTimeout,
        MismatchError,
        OutOfMemoryError,
        PeerError,
        StateError,
    )
    from fsdpc._comm.bootstrap import set_collectives
    from fsdpc._fsdp1.install import install, uninstall
    from fsdpc._fsdp1.marks import mark_data_dependent
    from fsdpc._fsdp1.root import memory_stats
    from fsdpc._tools.report import memory_report
    from fsdpc.api import (
        BackwardPrefetch,
        CPUOffload,
        FlatParameter,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        OptimStateDictConfig,
        OptimStateKeyType,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from fsdpc.fsdp import FSDP, FullyShardedDataParallel


def __getattr__(name: str) -> Any:
    """Import a public name on first use and cache it in the module's namespace."""
    if name in _SUBMODULES:
        return import_module(f"fsdpc.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fsdpc' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})

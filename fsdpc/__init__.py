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
_FSDP2 = (
    "FSDPModule",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
# The module that defines each public name. Names that are missing here are defined in fsdpc.api.
_HOME = {
    **dict.fromkeys(_EXCEPTIONS, "fsdpc._C"),
    **dict.fromkeys(_FSDP2, "fsdpc._fsdp2.module"),
    "FSDP": "fsdpc.fsdp",
    "FullyShardedDataParallel": "fsdpc.fsdp",
    "barrier": "fsdpc._engine.root",
    "install": "fsdpc._install",
    "mark_data_dependent": "fsdpc._engine.marks",
    "mark_replicated": "fsdpc._engine.marks",
    "memory_report": "fsdpc.plan.report",
    "memory_stats": "fsdpc._engine.root",
    "profile_memory": "fsdpc.plan.profile",
    "QuantizedPolicy": "fsdpc._fsdp2.quantized",
    "set_collectives": "fsdpc._comm.bootstrap",
    "uninstall": "fsdpc._install",
}
# A companion is a part of the package that an installation may lack. It registers functions by
# name. For each name, this table has the module that registers the function. The module is imported
# when the function is first asked for.
_REGISTERED_BY = {
    "explain": "fsdpc.plan.noticed",
    "steps": "fsdpc._companions.stepping",
    "known": "fsdpc._companions.foreign",
    "instead": "fsdpc._companions.foreign",
    "name on dtensors": "fsdpc._companions.foreign",
    "watch": "fsdpc.plan.noticed",
}
_SUBMODULES = (
    "activations",
    "api",
    "checkpoint",
    "fsdp",
    "fully_sharded_data_parallel",
    "lowbit",
    "optim",
    "sharded_grad_scaler",
    "state_dict",
    "wrap",
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CommError",
    "CommTimeout",
    "FSDP",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MismatchError",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OutOfMemoryError",
    "PeerError",
    "QuantizedPolicy",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StateError",
    "UnshardHandle",
    "__version__",
    "barrier",
    "fully_shard",
    "install",
    "mark_data_dependent",
    "mark_replicated",
    "memory_report",
    "memory_stats",
    "profile_memory",
    "register_fsdp_forward_method",
    "set_collectives",
    "share_comm_ctx",
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
    from fsdpc._engine.marks import mark_data_dependent, mark_replicated
    from fsdpc._engine.root import barrier, memory_stats
    from fsdpc._fsdp2.module import (
        FSDPModule,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from fsdpc._fsdp2.quantized import QuantizedPolicy
    from fsdpc._install import install, uninstall
    from fsdpc.api import *
    from fsdpc.fsdp import FSDP, FullyShardedDataParallel
    from fsdpc.plan.profile import profile_memory
    from fsdpc.plan.report import memory_report


def __getattr__(name: str) -> Any:
    """Import a public name on first use and cache it in the module's namespace."""
    if name in _SUBMODULES:
        return import_module(f"fsdpc.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'fsdpc' has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, "fsdpc.api")), name)
    globals()[name] = value
    return value


def _import_companion(what: str) -> None:
    """Import the companion module that registers the function ``what`` (see
    ``_engine/companions.py``). Do nothing if the companion's folder is missing from this
    installation.
    """
    name = _REGISTERED_BY[what]
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})

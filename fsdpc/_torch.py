"""torch's private names that fsdpc uses. No other file of the package uses one.

A torch release may rename private names. All of them are resolved when this file is imported, in
microseconds; a missing name raises an ``ImportError`` that names it, before any model is changed.
If only some supported versions of torch have a name, its alias here is ``None`` in the others.

Attributes of torch's objects cannot be imported. ``ATTRIBUTES`` lists by class those that fsdpc
and its C extension read; they are checked too. ``MARKS`` lists attributes that torch or the user
sets on single objects and that no class has.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import nn

OLDEST, NEWEST = "2.11", "2.15"  # the versions of torch on which the tests have run


def _missing(name: str) -> ImportError:
    return ImportError(
        f"torch {torch.__version__} has no {name}, which fsdpc uses. This fsdpc supports torch "
        f"{OLDEST} and newer (tested up to {NEWEST}): install a supported torch, or an fsdpc that "
        f"supports torch {torch.__version__}",
        name=name,
    )


def _find(module: str, name: str) -> Any:
    """``name`` (with dots: an attribute of an attribute) in ``module``."""
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _missing(f"{module}.{name}") from error
    return found


def _maybe(module: str, name: str) -> Any:
    """As ``_find``, but ``None`` if this version of torch has no such name."""
    try:
        return _find(module, name)
    except ImportError:
        return None


# --- classes -------------------------------------------------------------------------------------

# The state base class and phase enum of torch's FSDP.
FSDPState = _find("torch.distributed.fsdp._common_utils", "_FSDPState")
TrainingState = _find("torch.distributed.fsdp._common_utils", "TrainingState")
FlatParameter = _find("torch.distributed.fsdp._flat_param", "FlatParameter")
# torch's description of a parameter's range in a flat parameter's shard.
ShardParamInfo = _find("torch.distributed.fsdp._flat_param", "_ShardParamInfo")
# In torch 2.15 and newer, finalize_backward(async_op=True) returns this class. Where torch has the
# class, torch's reset_iter_state drops all gradients.
GradientReductionHandle = _maybe("torch.distributed.fsdp", "GradientReductionHandle")
# Wrap policies: the base class of the policy objects, and the disjunction of two policies.
_Policy = _find("torch.distributed.fsdp.wrap", "_Policy")
_or_policy = _find("torch.distributed.fsdp.wrap", "_or_policy")
# Sharded values in torch's state dicts.
Shard = _find("torch.distributed._shard.sharded_tensor", "Shard")
ShardedTensor = _find("torch.distributed._shard.sharded_tensor", "ShardedTensor")
ShardedTensorMetadata = _find("torch.distributed._shard.sharded_tensor", "ShardedTensorMetadata")
TensorProperties = _find("torch.distributed._shard.sharded_tensor", "TensorProperties")
ShardMetadata = _find("torch.distributed._shard.sharding_spec", "ShardMetadata")
EnumerableShardingSpec = _find("torch.distributed._shard.sharding_spec", "EnumerableShardingSpec")

# What a DTensor is made of; the placement of rows that tensor parallelism has cut as well; results
# of collectives that may be in flight.
DTensorSpec = _find("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
TensorMeta = _find("torch.distributed.tensor._dtensor_spec", "TensorMeta")
StridedShard = _find("torch.distributed.tensor.placement_types", "_StridedShard")
AsyncCollectiveTensor = _find("torch.distributed._functional_collectives", "AsyncCollectiveTensor")

# Compares types, dtypes, devices, shapes and strides of many tensors with those of an earlier time.
# None if torch has no such class: a save then keeps nothing of what it has read.
TensorGuards = _maybe("torch._C._dynamo.guards", "TensorGuards")

# Modes: one sees every operation that torch runs, one every call of a function of torch.
TorchDispatchMode = _find("torch.utils._python_dispatch", "TorchDispatchMode")
TorchFunctionMode = _find("torch.overrides", "TorchFunctionMode")


def fake_tensors() -> Any:
    """The module of ``FakeTensorMode``, imported on demand: the import takes long."""
    _find("torch._subclasses.fake_tensor", "FakeTensorMode")
    _find("torch._subclasses.fake_tensor", "unset_fake_temporarily")
    return sys.modules["torch._subclasses.fake_tensor"]


@functools.cache
def dcp_index_classes() -> dict[tuple[str, str], Any]:
    """What a DCP folder's pickled index consists of, by module and name; imported on demand."""
    home = "torch.distributed.checkpoint"
    names = [(f"{home}.metadata", name) for name in (
        "Metadata", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "MetadataIndex", "_MEM_FORMAT_ENCODING",
    )]  # fmt: skip
    names += [(f"{home}.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")]
    names += [("torch", "Size"), ("collections", "OrderedDict")]
    paths = [
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "PurePosixPath"),
    ]
    return {name: _find(*name) for name in names} | {name: PurePosixPath for name in paths}


# --- functions -----------------------------------------------------------------------------------


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many users a storage has: tensors, and its object in Python if there is one."""
    return int(_storage_use_count(storage._cdata))


def group_timeouts() -> list[float]:
    """Seconds after which collectives of the default group fail, for its backends that say so."""
    group = torch.distributed.group.WORLD
    found = []
    for device in group._device_types if group is not None else ():
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            found.append(timeout.total_seconds())
    return found


# The communication hooks that torch ships.
default_hooks = _find("torch.distributed.algorithms._comm_hooks", "default_hooks")
# Pytrees; not all supported versions have a public module for them.
tree_flatten = _find("torch.utils._pytree", "tree_flatten")
tree_leaves = _find("torch.utils._pytree", "tree_leaves")
tree_map = _find("torch.utils._pytree", "tree_map")
tree_map_only = _find("torch.utils._pytree", "tree_map_only")
make_wrapper_subclass = _find("torch", "Tensor._make_wrapper_subclass")
pytree_nodes = _find("torch.utils._pytree", "SUPPORTED_NODES")  # the registered nodes by type
flatten_mesh = _find("torch.distributed.device_mesh", "DeviceMesh._flatten")
# The default process group, and the store of a process group.
default_group = _find("torch.distributed.distributed_c10d", "_get_default_group")
process_group_store = _maybe("torch.distributed.distributed_c10d", "_get_process_group_store")
# Backward hooks of all modules.
global_backward_hooks = _find("torch.nn.modules.module", "_global_backward_hooks")
# Whether autocast is enabled for any device type, by the cheapest call.
is_any_autocast_enabled = _find("torch._C", "_is_any_autocast_enabled")
# Id of the backward that runs on this thread (-1: none), whether its graph stays for another
# backward, whether it runs a node, and its end-of-backward callbacks.
current_graph_task_id = _find("torch._C", "_current_graph_task_id")
keeps_graph = _find("torch._C", "_autograd._get_current_graph_task_keep_graph")
will_execute = _find("torch._C", "_will_engine_execute_node")
# torch.func: whether a transform runs, which tensors it has wrapped, and what they wrap. Asking for
# the level would make a state of torch.func in the thread, which each node of autograd copies.
transforms_active = _find("torch._C", "_are_functorch_transforms_active")
without_transforms = _find("torch._C", "_DisableFuncTorch")
is_wrapped = _find("torch._C", "_functorch.is_functorch_wrapped_tensor")
unwrapped = _find("torch._C", "_functorch.get_unwrapped")
is_batched = _find("torch._C", "_functorch.is_batchedtensor")
queue_callback = _find("torch.autograd", "Variable._execution_engine.queue_callback")
# A dictionary in which PROFILES is True while one of torch's profilers runs.
profiler_flags = vars(torch.autograd.profiler)
PROFILES = "_is_profiler_enabled"
_find("torch.autograd.profiler", PROFILES)
# Autograd's check of saved tensors compares version counters.
set_version_counters = _find("torch._C", "_autograd._unsafe_set_version_counter")
increment_version_counters = _find("torch._C", "_increment_version")
preserved_versions = _find("torch.autograd.grad_mode", "_unsafe_preserve_version_counter")
_storage_use_count = _find("torch._C", "_storage_Use_Count")
# Norms and averages of many tensors by one call.
foreach_norm = _find("torch", "_foreach_norm")
foreach_lerp = _find("torch", "_foreach_lerp_")
# torch's current CUDA stream; only CUDA builds have this function.
current_raw_stream = _maybe("torch._C", "_cuda_getCurrentRawStream")
if torch.backends.cuda.is_built() and current_raw_stream is None:
    raise _missing("torch._C._cuda_getCurrentRawStream")
# Sets the compiler's strategy for frames of a code object. SKIP_FRAME skips the frame itself, not
# its callees, SKIP_CALLEES both.
set_code_exec_strategy = _find("torch._C", "_dynamo.eval_frame.set_code_exec_strategy")
_Strategy = _find("torch._C", "_dynamo.eval_frame._FrameExecStrategy")
_Action = _find("torch._C", "_dynamo.eval_frame._FrameAction")
SKIP_FRAME = _Strategy(_Action.SKIP, _Action.DEFAULT)
SKIP_CALLEES = _Strategy(_Action.SKIP, _Action.SKIP)
# The hooks called before the steps of every optimizer; below, those of a single optimizer.
global_step_pre_hooks = _find("torch.optim.optimizer", "_global_optimizer_pre_hooks")


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """The step pre-hooks of this optimizer alone."""
    return optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined, no-any-return]


def first_step_post_hook(optimizer: torch.optim.Optimizer) -> int | None:
    """The id of the hook that is called first behind the optimizer's steps. Local."""
    return next(iter(optimizer._optimizer_step_post_hooks), None)  # type: ignore[attr-defined]


def calls_hooks(optimizer: object) -> bool:
    """Whether a step of this object calls its hooks; a wrapper around an optimizer does not."""
    return hasattr(optimizer, "_optimizer_step_post_hooks")


# --- functions that fsdpc replaces ---------------------------------------------------------------

# Both clip_grad_norm_ and get_total_norm call this function.
TOTAL_NORM = "_get_total_norm"
total_norm = _find("torch.nn.utils.clip_grad", TOTAL_NORM)
# The function by which clip_grad_norm_ and clip_grads_with_norm_ scale gradients.
CLIP_BY_NORM = "_clip_grads_with_norm_"
_find("torch.nn.utils.clip_grad", CLIP_BY_NORM)
# Collects a group's parameters, gradients and states at the start of a step; a method of each
# class of torch.optim.
INIT_GROUP = "_init_group"
_find("torch.optim", f"Adam.{INIT_GROUP}")
# DTensor's random operations use the tracker in this module, if there is one.
RNG_TRACKER = "_rng_tracker"
dtensor_random = _find("torch.distributed.tensor", "_random")
_find("torch.distributed.tensor._random", "_RNGStateTracker._distribute_region")
# The function that every backward goes through, under its name in torch.autograd; the method that
# puts hooks around the step of a class of optimizers.
RUN_BACKWARD = "_engine_run_backward"
_find("torch.autograd", RUN_BACKWARD)
PROFILE_STEP = "profile_hook_step"
_find("torch.optim", f"Optimizer.{PROFILE_STEP}")
# The function for a parameter's names in torch.distributed.checkpoint.state_dict (on demand).
GET_FQNS = "_get_fqns"
# The module with torch's wrapper for checkpointed modules (imported on demand).
CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"

# Where torch's fully_shard.state finds what was made of a module.
STATE_KEY = _find("torch.distributed._composable.contract", "STATE_KEY")
# Where torch's replicate and fully_shard find, by name, which of them a module has.
REGISTRY_KEY = _find("torch.distributed._composable.contract", "REGISTRY_KEY")
# The older path to fully_shard, which frameworks import.
COMPOSABLE = (
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)

# --- the compiler, which this package never loads ------------------------------------------------

COMPILER = "torch._dynamo"


def compiled_class() -> type[nn.Module] | None:
    """The class of modules that ``torch.compile`` returns; ``None`` without a loaded compiler."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return None if frames is None else frames.OptimizedModule


def compiled_from(module: nn.Module) -> nn.Module:
    """The module that ``torch.compile`` was given for ``module``."""
    original: nn.Module = module._modules["_orig_mod"]  # type: ignore[assignment]
    return original


# --- attributes ----------------------------------------------------------------------------------

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "torch.Tensor": (
        "_backward_hooks",
        "_base",
        "_is_view",
        "_make_subclass",
        "_make_wrapper_subclass",
        "_post_accumulate_grad_hooks",
        "_version",
    ),
    "torch._C._FunctionBase": ("_register_hook_dict", "_sequence_nr"),  # a node of the graph
    "torch.distributed.ProcessGroup": ("_device_types", "_get_backend"),
    "torch.nn.Module": (
        "_apply",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_forward_pre_hooks",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
    ),
    "torch.distributed.tensor.DTensor": ("_local_tensor", "_spec"),
    "torch.distributed.device_mesh.DeviceMesh": ("_concatenate",),
    "torch.amp.GradScaler": ("_unscale_grads_",),
    "torch.distributed.fsdp.ShardingStrategy": ("_HYBRID_SHARD_ZERO2",),
    "torch.distributed.fsdp.MixedPrecision": ("_module_classes_to_ignore",),
    "torch.distributed.fsdp.ShardedStateDictConfig": ("_use_dtensor",),
    "torch.distributed.fsdp.ShardedOptimStateDictConfig": ("_use_dtensor",),
    "torch.distributed.fsdp.wrap._Policy": ("_run_policy",),
    "torch.distributed._shard.sharded_tensor.ShardedTensor": (
        "_init_from_local_shards_and_global_metadata",
    ),
}

MARKS = frozenset(
    {
        "_flat_param",  # FSDP's name of a flat parameter in its module
        "_fqns",  # on a flat parameter: the names of the original parameters
        "_fsdp_flattened",  # on a parameter that FSDP manages
        "_fsdp_wrapped_module",  # FSDP's name of the wrapped module
        "_checkpoint_wrapped_module",  # activation checkpointing's name of the wrapped module
        "_in_backward_optimizers",  # on a parameter: optimizers that step in backward
        "_is_flat_param",  # makes isinstance(p, FlatParameter) true
        "_is_profiler_enabled",  # in torch.autograd.profiler: a profiler runs
        "_metadata",  # on a state dict: versions of its modules
        "_wrap_overrides",  # on a module: arguments of its unit that replace the common ones
    }
)


def _check_attributes() -> None:
    for path, names in ATTRIBUTES.items():
        home, _, name = path.rpartition(".")
        owner = _find(home, name)
        for attribute in names:
            # A module's tables are set in its constructor.
            if not hasattr(nn.Module() if owner is nn.Module else owner, attribute):
                raise _missing(f"{path}.{attribute}")


_check_attributes()

"""The private names of torch that fsdpc uses. No other file of the package uses one.

A torch release may rename private names. All of them are resolved when this file is imported, which
takes microseconds. A missing name raises an ``ImportError`` with this name, before any model is
changed. If only some of the supported versions of torch have a name, its alias here is ``None``
under the other versions.

Attributes of torch's objects cannot be imported. ``ATTRIBUTES`` lists, by class, the attributes
that fsdpc and its C extension read. The import checks these attributes too. ``MARKS`` lists
attributes that torch or the user sets on single objects and that no class has.
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
    """Return the object ``name`` of ``module``. A dot in ``name`` leads to an attribute of an
    attribute.
    """
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _missing(f"{module}.{name}") from error
    return found


def _maybe(module: str, name: str) -> Any:
    """Return what ``_find`` returns, or ``None`` if this version of torch has no such name."""
    try:
        return _find(module, name)
    except ImportError:
        return None


# --- classes -------------------------------------------------------------------------------------

# Classes of torch's FSDP: the base class of its state objects, and the enum of its phases.
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

# The spec and the metadata of a DTensor; the placement of a dimension that both FSDP and tensor
# parallelism shard; a tensor that is the result of a collective, perhaps still in flight.
DTensorSpec = _find("torch.distributed.tensor._dtensor_spec", "DTensorSpec")
TensorMeta = _find("torch.distributed.tensor._dtensor_spec", "TensorMeta")
StridedShard = _find("torch.distributed.tensor.placement_types", "_StridedShard")
AsyncCollectiveTensor = _find("torch.distributed._functional_collectives", "AsyncCollectiveTensor")

# Compares types, dtypes, devices, shapes and strides of many tensors with those of an earlier time.
# None if torch has no such class: each checkpoint save then reads model and optimizer anew.
TensorGuards = _maybe("torch._C._dynamo.guards", "TensorGuards")

# Modes: the first sees every operation that torch runs, the second every call of a torch function.
TorchDispatchMode = _find("torch.utils._python_dispatch", "TorchDispatchMode")
TorchFunctionMode = _find("torch.overrides", "TorchFunctionMode")


def fake_tensors() -> Any:
    """Return the module of ``FakeTensorMode``. It is imported on demand, because the import takes
    long.
    """
    _find("torch._subclasses.fake_tensor", "FakeTensorMode")
    _find("torch._subclasses.fake_tensor", "unset_fake_temporarily")
    return sys.modules["torch._subclasses.fake_tensor"]


@functools.cache
def dcp_index_classes() -> dict[tuple[str, str], Any]:
    """Return the classes that a DCP folder's pickled index consists of, by module and name. They
    are imported on demand.
    """
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
    """Return the number of users of a storage: tensors, and the storage's Python object if there is
    one.
    """
    return int(_storage_use_count(storage._cdata))


def group_timeouts() -> list[float]:
    """Return the timeouts, in seconds, of the default group's collectives, for the backends that
    have this option.
    """
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
# Functions on pytrees. Not all supported versions of torch have a public module for them.
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
# The cheapest function that tells whether autocast is enabled for any device type.
is_any_autocast_enabled = _find("torch._C", "_is_any_autocast_enabled")
# Functions about the backward that runs on this thread: its id (-1: none), whether its graph is
# kept for another backward, and whether it will run a node.
current_graph_task_id = _find("torch._C", "_current_graph_task_id")
keeps_graph = _find("torch._C", "_autograd._get_current_graph_task_keep_graph")
will_execute = _find("torch._C", "_will_engine_execute_node")
# Functions of torch.func: whether a transform is active, whether a transform has wrapped a tensor,
# and what the tensor wraps. To ask for the transform's level instead would create a state of
# torch.func in the thread, and each autograd node would copy this state. Last, the function that
# adds a callback at the end of a backward.
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
# Functions that set, increment and preserve version counters, which autograd's check of saved
# tensors compares.
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
# Sets the compiler's strategy for frames of a code object. SKIP_FRAME skips the frame itself, but
# not its callees; SKIP_CALLEES skips both.
set_code_exec_strategy = _find("torch._C", "_dynamo.eval_frame.set_code_exec_strategy")
_Strategy = _find("torch._C", "_dynamo.eval_frame._FrameExecStrategy")
_Action = _find("torch._C", "_dynamo.eval_frame._FrameAction")
SKIP_FRAME = _Strategy(_Action.SKIP, _Action.DEFAULT)
SKIP_CALLEES = _Strategy(_Action.SKIP, _Action.SKIP)
# The hooks called before the steps of every optimizer. The function below returns those of a single
# optimizer.
global_step_pre_hooks = _find("torch.optim.optimizer", "_global_optimizer_pre_hooks")


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return the step pre-hooks of this optimizer only, without the global ones."""
    return optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined, no-any-return]


def first_step_post_hook(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the id of the first hook that is called after a step, or None. Local."""
    return next(iter(optimizer._optimizer_step_post_hooks), None)  # type: ignore[attr-defined]


def calls_hooks(optimizer: object) -> bool:
    """Return whether a step of this object calls the object's hooks. A wrapper around an optimizer
    does not.
    """
    return hasattr(optimizer, "_optimizer_step_post_hooks")


# --- functions that fsdpc replaces ---------------------------------------------------------------

# Both clip_grad_norm_ and get_total_norm call this function.
TOTAL_NORM = "_get_total_norm"
total_norm = _find("torch.nn.utils.clip_grad", TOTAL_NORM)
# The function by which clip_grad_norm_ and clip_grads_with_norm_ scale gradients.
CLIP_BY_NORM = "_clip_grads_with_norm_"
_find("torch.nn.utils.clip_grad", CLIP_BY_NORM)
# The method of each class of torch.optim that collects a group's parameters, gradients and states
# at the start of a step.
INIT_GROUP = "_init_group"
_find("torch.optim", f"Adam.{INIT_GROUP}")
# DTensor's random operations use the tracker in this module, if there is one.
RNG_TRACKER = "_rng_tracker"
dtensor_random = _find("torch.distributed.tensor", "_random")
_find("torch.distributed.tensor._random", "_RNGStateTracker._distribute_region")
# The name in torch.autograd of the function that every backward calls, and the name of the method
# that adds hooks to the step of a class of optimizers.
RUN_BACKWARD = "_engine_run_backward"
_find("torch.autograd", RUN_BACKWARD)
PROFILE_STEP = "profile_hook_step"
_find("torch.optim", f"Optimizer.{PROFILE_STEP}")
# The function in torch.distributed.checkpoint.state_dict that returns a parameter's names. That
# module is imported on demand.
GET_FQNS = "_get_fqns"
# The module with torch's wrapper for checkpointed modules (imported on demand).
CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"

# The key under which torch's fully_shard.state finds the state of a module.
STATE_KEY = _find("torch.distributed._composable.contract", "STATE_KEY")
# The key under which torch records whether replicate or fully_shard was applied to a module.
REGISTRY_KEY = _find("torch.distributed._composable.contract", "REGISTRY_KEY")
# The older modules from which frameworks import fully_shard.
COMPOSABLE = (
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)

# --- the compiler, which this package never loads ------------------------------------------------

COMPILER = "torch._dynamo"


def compiled_class() -> type[nn.Module] | None:
    """Return the class of the modules that ``torch.compile`` returns, or ``None`` if no compiler is
    loaded.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return None if frames is None else frames.OptimizedModule


def compiled_from(module: nn.Module) -> nn.Module:
    """Return the module from which ``torch.compile`` made ``module``."""
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
    "torch._C._FunctionBase": ("_register_hook_dict", "_sequence_nr"),  # an autograd node
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
        "_is_profiler_enabled",  # in torch.autograd.profiler: true while a profiler runs
        "_metadata",  # on a state dict: versions of its modules
        "_wrap_overrides",  # on a module: arguments of its unit that replace the common ones
    }
)


def _check_attributes() -> None:
    for path, names in ATTRIBUTES.items():
        home, _, name = path.rpartition(".")
        owner = _find(home, name)
        for attribute in names:
            # The constructor of nn.Module sets its tables, so the class does not have them.
            if not hasattr(nn.Module() if owner is nn.Module else owner, attribute):
                raise _missing(f"{path}.{attribute}")


_check_attributes()

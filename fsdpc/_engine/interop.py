"""Interoperation of torch and the engine, such as dtype names and tensors over engine memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.dlpack import from_dlpack

from fsdpc import _torch
from fsdpc._engine.inputs import alias_arguments
from fsdpc._engine.listeners import call_listeners
from fsdpc._engine.outputs import copy_outputs, inner_tensors

_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


# Returns whether autocast is enabled for any device type.
autocasts = _torch.is_any_autocast_enabled


def dtype_name(dtype: torch.dtype) -> str:
    """Return the engine's name of a dtype. The name is "uint8" (opaque bytes) if the engine cannot
    cast and sum the dtype.
    """
    return _NAMES.get(dtype, "uint8")


def computes(dtype: torch.dtype) -> bool:
    """Whether the engine can cast and sum a dtype."""
    return dtype in _NAMES


def check_trains(what: str, dtype: torch.dtype) -> None:
    """Raise ``TypeError`` if the engine cannot sum the dtype of trainable parameter ``what``."""
    if computes(dtype):
        return
    out = "Freeze it (requires_grad_(False)), or list it in ignored_states (ignored_params)"
    if dtype.is_complex:
        raise TypeError(
            f"{what} is complex ({dtype}), and complex gradients are not summed over ranks: keep "
            "real and imaginary parts in a real parameter of shape (..., 2) and compute with "
            f"torch.view_as_complex(parameter). {out}"
        )
    raise TypeError(
        f"{what} requires a gradient but has dtype {dtype}; fsdpc trains float32, bfloat16, "
        f"float16 and float64. {out}"
    )


def over(capsule: Any, dtype: torch.dtype, shape: torch.Size | None = None) -> torch.Tensor:
    """Return a tensor over the memory of a DLPack capsule, with a new storage and no copy."""
    tensor = from_dlpack(capsule)
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype)
    return tensor if shape is None else tensor.view(shape)


@torch.inference_mode(False)  # tensors made in inference mode have no version counter
def version_counter(device: torch.device) -> torch.Tensor:
    """Return a tensor whose version counter other tensors can share; see ``counted``."""
    return torch.empty(16, dtype=torch.uint8, device=device)


def counted(counter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of ``tensor`` and the version counter of ``counter``."""
    result = counter.view(tensor.dtype).detach()
    result.data = tensor
    return result


def makes_grads(params: list[torch.Tensor]) -> bool:
    """Whether the backward that runs on this thread computes the gradient of one of these leaves.

    ``torch.autograd.grad`` computes only the gradients of its ``inputs``.
    """
    trained = (param for param in params if param.requires_grad)
    return any(_torch.will_execute(get_gradient_edge(param).node) for param in trained)


def refuse_export() -> None:
    """Raise ``NotImplementedError`` while ``torch.export`` traces."""
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            "torch.export cannot trace a sharded model, which computes with memory that it fills "
            "in each forward: export the unsharded module, with values from a full state dict"
        )


def torch_functions() -> tuple[Any, ...]:
    """Return the Python objects that the engine's hooks use, in the order in which
    csrc/py/step/py_tree.c lists them.
    """
    return (
        torch.Tensor,
        torch.is_grad_enabled,
        _torch.current_graph_task_id,
        _torch.keeps_graph,
        makes_grads,
        _torch.queue_callback,
        call_listeners,
        _torch.set_version_counters,
        _torch.increment_version_counters,
        alias_arguments,
        copy_outputs,
        _torch.pytree_nodes,
        _torch.transforms_active,
        inner_tensors,
        refuse_export,
        _torch.profiler_flags,
        torch.profiler.record_function,
    )


def around(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return a DTensor with ``spec`` whose local tensor is the object ``local`` itself."""
    if spec.tensor_meta.dtype != local.dtype:
        meta = _torch.TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = _torch.DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def put_grad(leaf: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set ``leaf.grad``, even to a gradient of another dtype, which torch would refuse. Local."""
    leaf.grad = None
    if grad is None or grad.dtype == leaf.dtype:
        leaf.grad = grad
    else:
        low, grad.data = grad.data, torch.empty_like(leaf)
        leaf.grad = grad
        grad.data = low

"""Where torch tensors meet the engine: dtypes by name, tensors over the engine's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from fsdpc._listeners import call_listeners

_NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


# Whether autocast is on for any kind of device; the cheapest way to ask.
autocasts = torch._C._is_any_autocast_enabled


def dtype_name(dtype: torch.dtype) -> str:
    """The engine's name of a dtype; "uint8" (opaque bytes) for what it only carries."""
    return _NAMES.get(dtype, "uint8")


def computes(dtype: torch.dtype) -> bool:
    """True for dtypes that the engine can cast and sum."""
    return dtype in _NAMES


def over(capsule: Any, dtype: torch.dtype, shape: torch.Size | None = None) -> torch.Tensor:
    """A tensor over the memory of a DLPack capsule: no copy, a storage of its own."""
    tensor = from_dlpack(capsule)
    if tensor.dtype != dtype:
        tensor = tensor.view(dtype)
    return tensor if shape is None else tensor.view(shape)


def torch_functions() -> tuple[Any, ...]:
    """What the engine's hooks call in torch, per step or per unit."""
    return (
        torch.Tensor,
        torch.nn.Parameter,
        torch.is_grad_enabled,
        torch._C._current_graph_task_id,
        torch.autograd.Variable._execution_engine.queue_callback,
        call_listeners,
    )

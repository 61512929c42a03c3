"""The part of mixed precision that the engine does not do: casts of buffers, and of the inputs and
outputs of modules such as BatchNorm that must compute in fp32.

The engine casts parameters and gradients. Forward inputs are cast as ``_engine/inputs.py`` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdpc._engine.inputs import cast_tree
from fsdpc._fsdp1.collect import owned_modules
from fsdpc._fsdp1.names import join


def cast_buffers(
    root: nn.Module,
    ignored: set[nn.Module],
    dtype: torch.dtype | None,
    device: torch.device | None = None,
) -> dict[str, torch.dtype]:
    """Cast the unit's own floating-point buffers in place to ``dtype``, and move all buffers of the
    unit to ``device``.

    Return ``{clean name below root: original dtype}`` of the buffers whose dtype changed, for state
    dicts. Local.
    """
    changed: dict[str, torch.dtype] = {}
    originals: dict[int, torch.dtype] = {}
    if dtype is None and device is None:
        return changed
    for module_name, module in owned_modules(root, ignored, shared_twice=True):
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if device is not None and buffer.device != device:
                buffer.data = buffer.to(device)
            if dtype is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                originals[id(buffer)] = buffer.dtype
                buffer.data = buffer.to(dtype)
            if id(buffer) in originals:
                changed[join(module_name, name)] = originals[id(buffer)]
    return changed


class FullPrecisionHooks:
    """Forward hooks of one module that computes in fp32 inside a low-precision model (BatchNorm).

    Outputs are cast to the dtype of the last floating input, which is the model's compute dtype.
    """

    def __init__(self, module: nn.Module):
        self._dtype: torch.dtype | None = None
        module.register_forward_pre_hook(self._before, prepend=False)
        module.register_forward_hook(self._after, prepend=False)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in args:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._dtype = value.dtype
        return tuple(cast_tree(torch.float32, value) for value in args)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output if self._dtype is None else cast_tree(self._dtype, output)

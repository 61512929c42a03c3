"""The choice of a unit's compute device from ``device_id`` and the module's device, and the move of
the module to this device.

The rules are torch's. A module on a GPU stays on that GPU. A module on the CPU moves to
``device_id``. Each unit moves after the units inside it were sharded, so the GPU has at most one
unit's full parameters in addition to the shards. Without ``device_id`` a module is sharded on its
device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdpc import _C
from fsdpc._comm.channel import this_rank
from fsdpc._engine.device import CPU
from fsdpc._fsdp1.collect import Ignored, own_params, owned_modules, unit_modules


def asked_device(device_id: Any) -> torch.device | None:
    """Return the device that the constructor's ``device_id`` names, with an index if it is a GPU.
    Local.

    A GPU without an index means torch's current GPU (``UserWarning``, as in torch). ``TypeError``:
    ``device_id`` is not a device at all. ``RuntimeError``: the device is unusable; the message
    gives the reason.
    """
    if device_id is None:
        return None
    if isinstance(device_id, bool) or not isinstance(device_id, (int, str, torch.device)):
        raise TypeError(
            f"device_id must be an int, a torch.device or None, but got {type(device_id).__name__}"
        )
    named = f"cuda:{device_id}" if isinstance(device_id, int) else device_id
    device = torch.device(named)
    if device.type == "cpu":
        return CPU
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        current = torch.cuda.current_device()
        warnings.warn(
            f"FSDP got the argument `device_id` {device_id} on rank {this_rank()}, which does not "
            f"have an explicit index. FSDP will use the current device {current}. If this is "
            "incorrect, please explicitly call `torch.cuda.set_device()` before FSDP "
            "initialization or pass "
            "in the explicit device index as the `device_id` argument.",
            stacklevel=3,
        )
        device = torch.device("cuda", current)
    reason = why_not(device)
    if reason is not None:
        raise RuntimeError(
            f"device_id={device_id!r} on rank {this_rank()}: {reason}. Pass device_id=None or "
            'torch.device("cpu") to train on the CPU'
        )
    return device


def why_not(device: torch.device) -> str | None:
    """Return the reason, in one sentence, why ``device`` is unusable, or None if it is usable.
    Local.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"fsdpc trains on the CPU and on CUDA devices, not on {device}"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: no GPU, no driver, or CUDA_VISIBLE_DEVICES hides it"
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        return f"torch finds {count} CUDA device{'s' * (count != 1)}, numbered from 0"
    try:
        _C.cuda_device(index)
    except NotImplementedError as error:
        return str(error)
    return None


def default_device() -> torch.device:
    """Return torch's current GPU, or the CPU if that GPU is unusable. Without
    ``device_id`` this is the compute device of a module on the meta device, and of a module that
    has neither parameters nor nested units. Local.
    """
    if not torch.cuda.is_available():
        return CPU
    current = torch.device("cuda", torch.cuda.current_device())
    return CPU if why_not(current) is not None else current


def move_module(
    root: nn.Module, ignored: Ignored, asked: torch.device | None, unit_name: str
) -> torch.device:
    """Move the unit's own parameters and buffers to ``asked``; return the compute device. Local.

    Tensors that are ignored or belong to nested units do not move. ``RuntimeError``: parameters are
    on several GPUs or on an unusable device. ``RuntimeError`` also if ``asked`` is None, and some
    parameters are on the CPU and others on a GPU. ``ValueError``: parameters are on another GPU
    than ``asked``.
    """
    _check_single_device(root, ignored, asked, unit_name)
    if asked is not None:
        _move(root, ignored, asked)
    device = next((param.device for param in own_params(root, ignored)), None)
    if device is None:
        nested = next(iter(unit_modules(root)), None)
        return asked or (default_device() if nested is None else nested.compute_device)
    if device.type == "meta":  # collect_infos raises for this parameter
        return asked or CPU
    if asked is not None and device != asked:
        raise ValueError(
            f"Inconsistent compute device and `device_id` on rank {this_rank()}: {device} vs "
            f"{asked} (unit {unit_name!r}); move the module, or pass its device as device_id"
        )
    _check_usable(device, unit_name)
    if asked is None and device == CPU and torch.cuda.is_available():
        _warn_of_cpu()
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        _warn_of_current(device, unit_name)
    return device


def _check_single_device(
    root: nn.Module, ignored: Ignored, asked: torch.device | None, unit_name: str
) -> None:
    found = {param.device for param in own_params(root, ignored) if not param.is_meta}
    if asked is None and len(found) == 2 and CPU in found:
        raise RuntimeError(
            "To support a module with both CPU and GPU params, please pass in device_id argument: "
            f"unit {unit_name!r} has parameters on {sorted(map(str, found))}"
        )
    if len(found) > 1 and not (asked is not None and len(found - {CPU}) == 1):
        raise RuntimeError(
            "FSDP only supports single device modules but got params on "
            f"{sorted(map(str, found))} in unit {unit_name!r}"
        )


@torch.no_grad()
def _move(root: nn.Module, ignored: Ignored, device: torch.device) -> None:
    """Move the tensors one at a time and in place, so that Parameters keep their identity, as in
    ``Module.to``.
    """
    if device == CPU:
        return
    for tensor in _on_the_cpu(root, ignored):
        tensor.data = tensor.to(device)
        if tensor.grad is not None:
            tensor.grad.data = tensor.grad.to(device)


def _on_the_cpu(root: nn.Module, ignored: Ignored) -> Iterator[torch.Tensor]:
    yield from (param for param in own_params(root, ignored) if param.device == CPU)
    for _, module in owned_modules(root, ignored.modules):
        for buffer in module._buffers.values():
            if buffer is not None and buffer.device == CPU:
                yield buffer


def _check_usable(device: torch.device, unit_name: str) -> None:
    reason = why_not(device)
    if reason is not None:
        raise RuntimeError(
            f"unit {unit_name!r} has parameters on {device} on rank {this_rank()}, but {reason}; "
            "to train on the CPU, move the module there"
        )


def _warn_of_current(device: torch.device, unit_name: str) -> None:
    warnings.warn(
        f"unit {unit_name!r} is on {device}, but torch's current CUDA device is "
        f"{torch.cuda.current_device()}: threads that run the unit switch to {device}. To make "
        f"{device} current everywhere, call torch.cuda.set_device({device.index}) before wrapping.",
        stacklevel=5,
    )


def _warn_of_cpu() -> None:
    warnings.warn(
        "The passed-in `module` is on CPU and will thus have FSDP's sharding initialization run on "
        "CPU, and train there. Pass the `device_id` argument, or move the module to the GPU before "
        "wrapping it, to train on the GPU; pass device_id=torch.device('cpu') to train on the CPU.",
        stacklevel=5,
    )

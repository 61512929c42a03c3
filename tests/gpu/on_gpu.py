"""Functions that run tests of several ranks on a real GPU (``pytest --gpu cuda``), although these
tests were written for models on the CPU.

In the ranks, tensors that a test makes without a device are on the GPU. For tensors that fsdpc,
torch's optimizers and torch.distributed make, the device does not change. A device mesh of "cpu"
becomes a mesh of "cuda". The ranks share GPU 0, which NCCL allows from version 2.30 on;
FSDPC_COLLECTIVES=shm or c10d works with older versions. Products of matrices on a GPU depend on the
addresses of their operands, so tests that compare bitwise on the CPU allow for some roundings here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map

TESTS = str(Path(__file__).resolve().parents[1])
TORCH = str(Path(torch.__file__).parent)
OWN_PLACES = tuple(f"{TORCH}/{folder}/" for folder in ("optim", "distributed", "_dynamo"))
DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")
# How far two results of a dtype may differ: both the relative and the absolute tolerance.
ROUNDINGS = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def asked_by_a_test() -> bool:
    """Return True if the tensor is made by a test's own code, or by torch code that a test calls.
    Return False for fsdpc, torch's optimizers and torch.distributed."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OWN_PLACES) or "/fsdpc/" in file.replace(TESTS, ""):
            return False
        if file.startswith(TESTS) and not file.startswith(__file__):
            return True
        frame = frame.f_back
    return False


class OnTheGPU(TorchFunctionMode):
    """A mode in which the tensors that tests make are on the GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if function is torch.equal:
            return equal(*args, **kwargs)
        if (
            function in _device_constructors()
            and kwargs.get("device") is None
            and torch.get_default_device() == CPU
            and asked_by_a_test()
        ):
            generator = kwargs.get("generator")
            if generator is not None and generator.device == CPU:
                return function(*args, **kwargs).to(DEVICE)
            return function(*args, **{**kwargs, "device": DEVICE})
        return function(*args, **kwargs)


def equal(first: Tensor, second: Tensor) -> bool:
    """Compare as torch.equal does, but allow for roundings in floating-point results of a GPU."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    bound = ROUNDINGS.get(first.dtype)
    first, second = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (first, second))
    if bound is None or first.device == second.device == CPU:
        return torch.equal(first.cpu(), second.cpu())
    return torch.allclose(first.cpu(), second.cpu(), bound, bound, equal_nan=False)


def prepare() -> None:
    """Replace functions that tests import by name. Call this before the first test module is
    imported."""
    close, mesh = torch.testing.assert_close, dist.device_mesh.DeviceMesh.__init__

    @functools.wraps(close)
    def loose(actual: Any, expected: Any, **options: Any) -> None:
        if isinstance(actual, Tensor) and isinstance(expected, Tensor):
            bound = ROUNDINGS.get(actual.dtype, 0.0)
            options["rtol"] = max(options.get("rtol") or 0.0, bound)
            options["atol"] = max(options.get("atol") or 0.0, bound)
            actual, expected = actual.cpu(), expected.cpu()
        close(actual, expected, **options)

    @functools.wraps(mesh)
    def moved(self: Any, device_type: str, *args: Any, **options: Any) -> None:
        mesh(self, "cuda" if device_type == "cpu" else device_type, *args, **options)

    torch.testing.assert_close = loose
    dist.device_mesh.DeviceMesh.__init__ = moved


def in_host_memory(value: Any) -> Any:
    """Return what a rank returns, with its tensors in host memory."""
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) and x.is_cuda else x, value)


def start(function: Callable[[], Any]) -> Any:
    """Call a rank's function so that its tensors are on the GPU."""
    torch.cuda.set_device(DEVICE)
    with OnTheGPU():
        return function()

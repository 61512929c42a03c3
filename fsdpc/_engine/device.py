"""The engine's device for a torch device: the CPU, or a GPU with its ordinal number.

``FSDPC_LIBCUDA`` may name a simulated driver, whose device memory is host memory. In that case CPU
modules are sharded on the driver's GPU 0, so that tests can run GPU code without a GPU.
"""

from __future__ import annotations

from functools import cache

import torch

from fsdpc import _C
from fsdpc._torch import current_raw_stream

CPU = torch.device("cpu")


@cache
def stand_in() -> bool:
    """Whether CPU modules are sharded on a simulated GPU. Local.

    ``NotImplementedError``: the driver named by ``FSDPC_LIBCUDA`` does not work.
    """
    return _C.stand_in()


@cache
def use_torch_allocator(ordinal: int) -> None:
    """Allocate units' memory on this GPU through torch's caching allocator. Local.

    The memory then counts in torch's statistics. Slots of gathered parameters are not allocated
    through torch, because slots need mappings of the driver. If the driver has no memory left for a
    slot, torch's cache is emptied, and the driver is asked again.
    """

    def alloc(size: int, stream: int) -> int:
        return torch.cuda.caching_allocator_alloc(size, ordinal, stream)

    _C.set_cuda_allocator(
        ordinal, alloc, torch.cuda.caching_allocator_delete, torch.cuda.empty_cache
    )


def engine_device(device: torch.device) -> int | None:
    """Return the ordinal of the GPU on which modules on ``device`` are sharded; None for the CPU.

    Local.
    """
    if device.type == "cuda":
        _C.set_stream_function(current_raw_stream)
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        use_torch_allocator(ordinal)
        return ordinal
    return 0 if stand_in() else None


def kernel_ordinal(tensor: torch.Tensor) -> int:
    """Return the ordinal of the GPU whose kernels work on a tensor; -1 for the CPU. Local."""
    ordinal = engine_device(tensor.device)
    return -1 if ordinal is None else ordinal


def tensor_device(ordinal: int | None) -> torch.device:
    """Return the torch device of tensors in memory of the engine's device ``ordinal``. Local."""
    return CPU if ordinal is None or stand_in() else torch.device("cuda", ordinal)

"""Which of the engine's devices serves a torch device: the CPU, or a GPU by its number.

``FSDPC_LIBCUDA`` may name a simulated driver, whose memory is host memory. Then modules on the CPU
are sharded on its GPU 0, which is how the GPU's code is tested where there is none.
"""

from __future__ import annotations

from functools import cache

import torch

from fsdpc import _C
from fsdpc._torch import current_raw_stream

CPU = torch.device("cpu")


@cache
def stand_in() -> bool:
    """True where CPU modules are sharded on a simulated GPU. ``NotImplementedError`` when
    the driver that ``FSDPC_LIBCUDA`` names does not work.
    """
    return _C.stand_in()


@cache
def use_torch_allocator(ordinal: int) -> None:
    """What units allocate on this GPU comes out of torch's cache, and counts in its figures. Local.

    Slots of gathered parameters do not: they need the driver's own mappings. When they find no
    memory, torch's unused blocks are given back first.
    """

    def alloc(size: int, stream: int) -> int:
        return torch.cuda.caching_allocator_alloc(size, ordinal, stream)

    _C.set_cuda_allocator(
        ordinal, alloc, torch.cuda.caching_allocator_delete, torch.cuda.empty_cache
    )


def engine_device(device: torch.device) -> int | None:
    """Number of the GPU that shards modules on ``device``; None: the CPU does. Local."""
    if device.type == "cuda":
        _C.set_stream_function(current_raw_stream)
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        use_torch_allocator(ordinal)
        return ordinal
    return 0 if stand_in() else None


def tensor_device(ordinal: int | None) -> torch.device:
    """Where the tensors are that the engine's device with this number makes. Local."""
    return CPU if ordinal is None or stand_in() else torch.device("cuda", ordinal)

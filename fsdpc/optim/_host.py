"""States in pinned host memory for parameters on a GPU, which are stepped chunk by chunk on the
GPU.

Two buffers on the GPU take turns for chunks of states (``_chunks.py``). While the kernels step one
chunk in a buffer, the next chunk is copied to the other buffer. A stepped chunk is copied back
while the next chunk is copied to the GPU, because the copies of each direction run on a separate
stream. The host queues this work and does not wait. A read of ``optimizer.state`` waits until the
last chunk is back in host memory.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdpc._companions.lane import Lane, pinned
from fsdpc._companions.state_layout import (
    ALIGN,
    PAGE,
    STAGES,
    Chunk,
    chosen_for_host,
    chunk_bytes_of,
)
from fsdpc.optim._chunks import Store, Wishes
from fsdpc.optim._device import gpu_of
from fsdpc.optim._places import local_of

_WHAT = "optimizer states on their way to host memory"
_said: list[str] = []  # not empty once all_in_host_memory has warned


@dataclass(frozen=True)
class Host:
    """An option that keeps the states of parameters on a GPU in pinned memory of this rank's host.

    ``ratio``: the part of the states' bytes in host memory, from 0 to 1; the other states stay on
    the GPU. Parameters are chosen one by one, in their order, so that at most this part of the
    bytes is in host memory. ``buffer_bytes``: GPU memory for the two buffers through which states
    pass. A step copies the states to the GPU and back: for ``AdamW`` 8 bytes in each direction per
    element of a float32 parameter. ``masters``: parameters in bfloat16 and float16 get a float32
    master and float32 states; ``ratio`` applies to masters and states together.

    ``ratio`` has no effect on the states of parameters in host memory, which are always there.
    """

    ratio: float = 1.0
    buffer_bytes: int = 64 << 20
    masters: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(
                f"ratio must be from 0 (all states on the GPU) to 1 (all in host memory), got "
                f"{self.ratio}"
            )
        least = STAGES * 32 * PAGE
        if self.buffer_bytes < least:
            raise ValueError(f"buffer_bytes must be at least {least}, got {self.buffer_bytes}")

    @property
    def chunk_bytes(self) -> int:
        """The number of bytes of one buffer, a multiple of the page size."""
        return chunk_bytes_of(self.buffer_bytes, STAGES)


def all_in_host_memory(params: Iterable[Tensor]) -> bool:
    """Return whether all parameters are in host memory. If so, warn once per process. Local."""
    if any(param.is_meta or gpu_of(param) is not None for param in params):
        return False
    if not _said:
        _said.append("said")
        warnings.warn(
            "fsdpc.optim: offload=Host(...) changes nothing: the parameters are in host memory, "
            "and so are their states. offload=Disk(folder) keeps states on a disk",
            stacklevel=5,
        )
    return True


class HostStore(Store):
    """States in pinned memory, with two buffers on the GPU and a ``Lane`` for each direction.

    Marks of the lanes order the work of torch's current stream, of ``incoming`` and of
    ``outgoing``: a chunk is copied to a buffer after the buffer's previous chunk was copied back,
    is stepped after it has arrived, and is copied back after its step.
    """

    page = ALIGN

    def __init__(self, options: Host, name: str) -> None:
        super().__init__(name, options.chunk_bytes)
        self.ratio = options.ratio
        self.masters = options.masters
        self.chosen: dict[Tensor, bool] = {}
        self.chosen_bytes = (0, 0)  # bytes of states in host memory, and of all states
        self.buffers: list[Tensor] = []
        self.host_bytes = 0
        self.blocks: list[tuple[int, Tensor]] = []  # (first byte in the layout, pinned memory)
        self.last = 0  # the mark of the last copy to host memory; 0: none

    # --- where states lie ------------------------------------------------------------------------

    def choose(self, wanted: Wishes) -> None:
        """Choose the parameters whose states are in host memory. ``NotImplementedError``:
        parameters are on two GPUs.
        """
        new = [(p, extents) for p, extents in wanted if p.requires_grad and p not in self.chosen]
        if not new:
            return
        for param, _ in new:
            ordinal = gpu_of(param)
            if ordinal is not None and self.ordinal not in (None, ordinal):
                raise NotImplementedError(
                    f"{self.name}: offload=Host(...) with parameters on GPUs {self.ordinal} and "
                    f"{ordinal}: make an optimizer for each"
                )
            if ordinal is not None and self.ordinal is None:
                self._open(ordinal, local_of(param).device)
        there = [(p, extents) for p, extents in new if gpu_of(p) is not None]
        sizes = [sum(extent.nbytes for extent in extents) for _, extents in there]
        found = chosen_for_host(sizes, self.ratio, self.chosen_bytes)
        held = sum(size for size, here in zip(sizes, found, strict=True) if here)
        self.chosen_bytes = (self.chosen_bytes[0] + held, self.chosen_bytes[1] + sum(sizes))
        self.chosen.update((param, False) for param, _ in new)
        self.chosen.update((p, here) for (p, _), here in zip(there, found, strict=True))

    def knows(self, param: Tensor) -> bool:
        return param in self.chosen

    def takes(self, param: Tensor) -> bool:
        return self.chosen.get(param, False)

    def _open(self, ordinal: int, device: torch.device) -> None:
        self.ordinal, self.device = ordinal, device
        self.incoming, self.outgoing = Lane(ordinal), Lane(ordinal)

    def _grow(self, begin: int, end: int) -> Tensor:
        assert self.ordinal is not None
        if not self.buffers:
            size = self.chunk_bytes
            self.buffers = [
                torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(STAGES)
            ]
        try:
            memory = pinned(self.ordinal, end - begin)
        except MemoryError as error:
            raise MemoryError(
                f"{self.name}: offload=Host(ratio={self.ratio}): {end - begin} bytes of host "
                f"memory cannot be pinned for optimizer states: {error}. Use a smaller ratio, or "
                "offload=Disk(folder)"
            ) from error
        self.host_bytes += end - begin
        self.blocks.append((begin, memory))
        return memory

    def _view(self, memory: Tensor, dtype: torch.dtype, count: int, offset: int) -> Tensor:
        return memory[offset : offset + count * dtype.itemsize].view(dtype)

    def addresses(self, buffer: int, chunk: Chunk) -> Iterator[tuple[int, int, int]]:
        """Yield the address in the buffer, the address in host memory and the number of bytes of
        each range of a chunk.
        """
        if not chunk.parts:  # the parameters have no elements on this rank
            return
        there = self.buffers[buffer].data_ptr()
        begin, memory = self.blocks[bisect_right(self.blocks, chunk.parts[0][0], key=_begin) - 1]
        for offset, nbytes, place in chunk.parts:
            yield there + place, memory.data_ptr() + offset - begin, nbytes

    # --- a step ----------------------------------------------------------------------------------

    def passes(self, active: Sequence[Tensor]) -> Pass | None:
        """Return a pass as ``Store.passes`` does, or None if there is no chunk to step."""
        due = self.due(active)
        return Pass(self, due) if due else None

    def finish(self) -> None:
        """Wait until the last chunk is back in host memory. This is a host sync, unless the host
        has already waited for this chunk.
        """
        if self.last:
            self.outgoing.finish(self.last, _WHAT)

    def settle(self) -> None:
        with suppress(Exception):
            self._join_all()
            self.finish()

    def _join_all(self) -> None:
        """Let torch's stream wait until no transfer touches the buffers any more."""
        for lane in (self.incoming, self.outgoing) if self.ordinal is not None else ():
            lane.join(lane.mark())

    def __del__(self) -> None:
        self.settle()  # otherwise a transfer could write to memory that is reused


def _begin(block: tuple[int, Tensor]) -> int:
    return block[0]


class Pass:
    """One pass over chunks. While one chunk is copied to the GPU, another chunk is stepped and
    copied back.
    """

    def __init__(self, store: HostStore, due: list[Chunk]) -> None:
        self.store = store
        self.due = due
        self.arrived: list[int] = []  # marks of ``incoming``
        self.began = False  # whether this pass has begun to change values
        self._fetch(STAGES)

    def _fetch(self, count: int) -> None:
        """Queue the copies of the next ``count`` chunks to the GPU, behind all copies to host
        memory that are queued so far.
        """
        store, first = self.store, len(self.arrived)
        if first == len(self.due):
            return
        if store.last:
            store.outgoing.join(store.last)
        store.incoming.begin()
        for number in range(first, min(first + count, len(self.due))):
            for there, host, nbytes in store.addresses(number % STAGES, self.due[number]):
                store.incoming.back(there, host, nbytes)
            self.arrived.append(store.incoming.mark())

    def run(self, step: Any) -> None:
        """Call ``step(chunk, buffer)`` for each chunk in turn. The host queues the work without
        waiting.
        """
        store = self.store
        for number, chunk in enumerate(self.due):
            buffer = number % STAGES
            store.incoming.join(self.arrived[number])
            self.began = True
            step(chunk, store.buffers[buffer] if store.buffers else None)
            store.outgoing.begin()
            for there, host, nbytes in store.addresses(buffer, chunk):
                store.outgoing.out(host, there, nbytes)
            store.last = store.outgoing.mark()
            self._fetch(1)

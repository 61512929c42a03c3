"""Streams of a model's full weights, for an inference engine or another process. A set of weights
has the values of one step. The values are read bucket by bucket, so that no second model is in
memory.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpc import _C
from fsdpc._comm.bootstrap import read_timeout
from fsdpc.checkpoint.dtypes import name_of
from fsdpc.checkpoint.errors import CheckpointError
from fsdpc.checkpoint.kept import stamp_of
from fsdpc.checkpoint.names import Only, lasting
from fsdpc.checkpoint.outlet import Outlet, socket_path
from fsdpc.checkpoint.ranks import Ranks, ranks_of
from fsdpc.checkpoint.whole import Part, Rooms, Whole, room_of

BUCKET_BYTES = 256 << 20
_WHAT = "streaming weights"
_POLL_S = 0.5  # how long rank 0 waits for readers before the ranks synchronize again

Bucket = list[tuple[str, Tensor]]


class WeightInfo(NamedTuple):
    """Name, dtype and shape of a tensor of a ``WeightStream``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightStream:
    """A stream of sets of full weights, which ``fsdpc.checkpoint.stream`` returns. Each iteration
    over the object gives one set; ``buckets``, ``send`` and ``publish`` give a set in other forms.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        rank0_only: bool,
        device: torch.device | None,
        options: dict[str, Any],
    ) -> None:
        self._model, self._group, self._options = model, group, options
        self._rank0_only, self._device = rank0_only, device
        self._rooms = Rooms()
        self._outlet: Outlet | None = None
        # From the last set: the values of the model's stamp (see ``kept.Stamp``), and the plan.
        self._kept: tuple[list[Any], Whole] | None = None

    def metadata(self) -> list[WeightInfo]:
        """Return the name, dtype and shape of each tensor, in the order in which a set gives them.
        Local; no parameter is gathered.
        """
        whole = Whole(self._model, (0, 1), self._rooms, **self._options)
        return [
            WeightInfo(name, part.dtype, part.shape) for part in whole.parts for name in part.names
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a set one by one. Collective: every rank must iterate. See
        ``buckets``.
        """
        for bucket in self.buckets():
            yield from bucket

    def buckets(self) -> Iterator[Bucket]:
        """Yield a set in buckets, which are lists of ``(name, tensor)``. Collective: every rank
        must iterate, also the ranks that get no values (``rank0_only``). A rank that leaves the
        loop early still takes part in the reads of the remaining buckets.

        A tensor stays valid as long as it is referenced; the memory of a bucket is reused when no
        tensor of the bucket is alive. Forwards and backwards may run between two buckets.

        ``CheckpointError``: ranks have different models or arguments, a rank has died, or a
        parameter or buffer was written before the set was complete.
        """
        ranks = ranks_of(self._group, beside=True)
        keeps = self._keeps(ranks)
        whole = self._plan(ranks)
        buckets = self._read(ranks, whole, lambda bucket: self._room(whole, bucket, keeps))
        try:
            for bucket in buckets:
                if keeps:
                    yield bucket
        except GeneratorExit:
            keeps = False
            for _ in buckets:
                pass
            raise

    def send(self, to: Callable[[Bucket], object]) -> None:
        """Call ``to`` with every bucket of a set, on every rank. With ``rank0_only``, call it only
        on rank 0. Collective. ``CheckpointError``: as for ``buckets``, or ``to`` has raised an
        error on a rank.
        """
        ranks = ranks_of(self._group, beside=True)
        keeps = self._keeps(ranks)
        with ranks.together():
            whole = self._plan(ranks)
            for bucket in self._read(ranks, whole, lambda each: self._room(whole, each, keeps)):
                with ranks.step(_WHAT):
                    if keeps:
                        to(bucket)

    def publish(
        self,
        path: str | os.PathLike[str],
        *,
        readers: int = 1,
        deadline: float | None = None,
        step: int | None = None,
    ) -> None:
        """Send a set to other processes of rank 0's host, each of which reads with a
        ``StreamReader``. Collective. Returns when all readers have the whole set, on the CPU.
        ``rank0_only`` and ``device`` are ignored.

        Args:
            path: the path of a Unix socket. The first call makes the socket; ``close`` or the
                interpreter's end removes it. Only processes of the same user may read.
            readers: the least number of readers. The call waits until they have asked for a set.
            deadline: seconds that each wait for a reader may take; default ``FSDPC_TIMEOUT``.
            step: a number that the readers get with the set.

        ``CheckpointError``, on every rank: as for ``buckets``, or fewer than ``readers`` readers
        have asked for a set, or a reader has ended or left in the middle of the set. After an
        error, readers must connect again for the next call.
        """
        ranks = ranks_of(self._group, beside=True)
        seconds = read_timeout() if deadline is None else deadline
        with ranks.together():
            try:
                self._publish(ranks, path, readers, seconds, step)
            except BaseException as error:
                if self._outlet is not None:
                    self._outlet.abort(f"{type(error).__name__}: {error}")
                raise

    def close(self) -> None:
        """Close the stream: the loops of all readers end. Local."""
        if self._outlet is not None:
            self._outlet.close()
            self._outlet = None

    def __enter__(self) -> WeightStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the steps of a set ----------------------------------------------------------------------

    def _keeps(self, ranks: Ranks) -> bool:
        return not self._rank0_only or ranks.rank == 0

    def _plan(self, ranks: Ranks) -> Whole:
        with ranks.step(_WHAT) as planned:
            whole = self._whole((ranks.rank, ranks.world))
            planned.value = (whole.digest, self._rank0_only)
        others = [rank for rank, value in enumerate(planned.values) if value != planned.values[0]]
        if others:
            raise CheckpointError(
                f"{_WHAT}: ranks {others} have other tensors than rank 0, or other arguments of "
                "stream()"
            )
        return whole

    def _whole(self, everyone: tuple[int, int]) -> Whole:
        kept, self._kept = self._kept, None
        now = None if kept is None else stamp_of(self._model, everyone)
        if kept is None or now is None or kept[0] != now.values:
            return Whole(self._model, everyone, self._rooms, **self._options)
        now.values = kept[0]  # kept[0] is equal to now.values, and has no tensors
        kept[1].hold(now)
        return kept[1]

    def _room(self, whole: Whole, bucket: list[Part], keeps: bool) -> Tensor | None:
        if not keeps:
            return None
        return self._rooms.take(room_of(bucket), self._device or whole.device)

    def _read(
        self, ranks: Ranks, whole: Whole, room: Callable[[list[Part]], Tensor | None]
    ) -> Iterator[Bucket]:
        """Yield each bucket in the memory that ``room`` returns, or an empty list if ``room``
        returns None. Collective.
        """
        before = whole.versions()
        for bucket in whole.buckets:
            try:
                yield whole.read(bucket, room(bucket))
            except _C.CommError as error:
                raise CheckpointError(f"{_WHAT}: {error}") from error
        with ranks.step(_WHAT):
            if whole.versions() != before:
                raise CheckpointError(
                    "parameters or buffers were written before the set was complete, so that it "
                    "has values of two steps: step the optimizer after the last bucket"
                )
        values = whole.let_go()
        self._kept = None if values is None else (values, whole)

    def _publish(
        self,
        ranks: Ranks,
        path: str | os.PathLike[str],
        readers: int,
        deadline: float,
        step: int | None,
    ) -> None:
        with ranks.step(_WHAT):
            if readers < 1:
                raise ValueError(f"readers must be at least 1, not {readers}")
            if ranks.rank == 0:
                self._open(socket_path(path))
        outlet, is_first = self._outlet, ranks.rank == 0
        assert outlet is not None or not is_first

        def wait(ready: Callable[[Outlet], Callable[[float], bool]], late: str) -> None:
            _wait(ranks, ready(outlet) if outlet is not None else None, deadline, late)

        def room(bucket: list[Part]) -> Tensor | None:
            wait(lambda out: out.is_free, f"a reader at {path} has not asked for the next tensors")
            return None if outlet is None else outlet.room()

        wait(
            lambda out: lambda seconds: out.connected(readers, seconds),
            f"not all of the {readers} readers at {path} have asked for a set",
        )
        whole = self._plan(ranks)
        with ranks.step(_WHAT):
            if outlet is not None:
                most = max(map(room_of, whole.buckets), default=0)
                outlet.begin(most, step, [_forms(bucket) for bucket in whole.buckets], deadline)
        for _ in self._read(ranks, whole, room):
            with ranks.step(_WHAT):
                if outlet is not None:
                    outlet.deliver()
        with ranks.step(_WHAT):
            if outlet is not None:
                outlet.end()
        wait(lambda out: out.is_taken, f"a reader at {path} has not taken the set's last tensors")

    def _open(self, path: str) -> None:
        if self._outlet is not None and self._outlet.path != path:
            self.close()
        if self._outlet is None:
            self._outlet = Outlet(path)
            weakref.finalize(self, self._outlet.close)


def stream(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    rank0_only: bool = False,
    only: Only = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> WeightStream:
    """Return a stream of the model's full weights, under the names of the unsharded
    ``state_dict()``. Inference engines and evaluations can read the weights after any step.

        tap = checkpoint.stream(model, dtype=torch.bfloat16)
        for name, tensor in tap:  # on every rank
            engine.load_weights([(name, tensor)])

    The units that shard the model gather their parameters bucket by bucket. A rank needs memory for
    two more buckets (three with ``dtype``), but not for a second model. A tied weight comes under
    each of its names. Buffers come last; each rank gets its own values of them.

    Args:
        model: a model of fsdpc's ``FullyShardedDataParallel`` or ``fully_shard``, a model of
            DTensors, or a plain model.
        dtype: the dtype of floats in the sets; by default the dtype in which they are stored.
        bucket_bytes: the largest size of a bucket, before and after the cast. A larger tensor is a
            bucket by itself.
        rank0_only: give the values only to rank 0; the other ranks must still take part.
        only: limit the sets to these tensors; see ``save``.
        device: the device of the values; by default that of the model.
        group: the ranks that have the model; by default all ranks.

    Local. Errors in the model or the arguments are raised when a set begins.
    """
    options = {"dtype": dtype, "bucket_bytes": bucket_bytes, "only": lasting(only)}
    place = None if device is None else torch.device(device)
    return WeightStream(model, group, rank0_only, place, options)


def _wait(ranks: Ranks, ready: Callable[[float], bool] | None, deadline: float, late: str) -> None:
    """Wait until ``ready`` returns True on rank 0. Meanwhile the ranks synchronize about every
    ``_POLL_S`` seconds. Collective.
    """
    until = time.monotonic() + deadline
    while True:
        with ranks.step(_WHAT) as waited:
            if ready is not None:
                left = until - time.monotonic()
                waited.value = ready(max(0.0, min(_POLL_S, left)))
                if not waited.value and left <= 0:
                    raise CheckpointError(f"{late} within {deadline:g} s")
        if waited.values[0]:
            return


def _forms(bucket: list[Part]) -> list[list[Any]]:
    """Return the names, dtype, shape and offset of each tensor of a bucket, for a reader."""
    forms, at = [], 0
    for part in bucket:
        forms.append([part.names, name_of(part.dtype, part.names[0]), list(part.shape), at])
        at += part.room
    return forms

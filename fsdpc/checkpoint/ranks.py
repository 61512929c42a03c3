"""The ranks that save or load together, and steps that succeed on all ranks or on none.

The ranks use a separate communicator, so that messages of a save in the background do not mix with
the collectives of a training step. The communicator uses memory that the ranks of one host share,
or a process group.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fsdpc import _C
from fsdpc._comm.bootstrap import comm_beside, comm_for_group, read_timeout
from fsdpc._comm.objects import exchange
from fsdpc.checkpoint.errors import CheckpointError

_Made = weakref.WeakKeyDictionary[dist.ProcessGroup, "Ranks"]
_made: _Made = weakref.WeakKeyDictionary()
_beside: _Made = weakref.WeakKeyDictionary()


class Ranks:
    """A communicator, with the host and the process id of each rank for error messages."""

    def __init__(self, comm: Any, parent: Any = None, group: Any = None) -> None:
        self.comm = comm
        self.rank, self.world = comm.rank, comm.world
        self._parent = None if parent is None else weakref.ref(parent)
        self.group = group  # this reference keeps torch's group alive
        self._ended = ""
        self.known: BaseException | None = None  # the interruption that other ranks know of, if any
        here = f"{socket.gethostname()}, pid {os.getpid()}"
        self.places: list[str] = exchange(comm, here, "checkpoint: the ranks' places")
        hosts = [place.rpartition(", pid ")[0] for place in self.places]
        self.hosts = sorted(set(hosts), key=hosts.index)
        self.host = self.hosts.index(hosts[self.rank])
        self.hosts_first = [hosts.index(host) for host in self.hosts]  # each host's first rank

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Send a plain value to all ranks, and return the values of all ranks in rank order.
        Collective.
        """
        if self._ended:
            raise _C.CommError(self._ended)
        return exchange(self.comm, value, what)

    def torch_group(self) -> Any:
        """Return a process group of these ranks, for ``torch.distributed.checkpoint``. Collective
        on first use.
        """
        parent = None if self._parent is None else self._parent()
        if self.group is None and parent is not None:
            self.group = _new_group(parent)
        return self.group

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context around a whole save or load. If an interruption (Ctrl-C) comes between two
        steps or in the middle of a message, the save or load ends on every rank at once, and every
        later save or load fails. Without this context, the other ranks would wait until their
        timeout for a rank that has caught the interruption and gone on.
        """
        self.known = None
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and error is not self.known:
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        self.comm.abort(f"{type(error).__name__} in a save or load of a checkpoint")
        self._ended = (
            f"{type(error).__name__} has ended an earlier save or load in the middle of a message "
            "to the other ranks: start the program again"
        )
        if self.group is not None:
            dist.destroy_process_group(self.group)  # torch closes the group with its last reference
            self.group = None

    def step(self, what: str) -> Step:
        """Return a step, which all ranks must enter; see ``Step``."""
        return Step(self, what)


def ranks_of(group: dist.ProcessGroup | None, *, beside: bool = False) -> Ranks:
    """Return the ranks of a process group (``None``: all ranks), or this rank alone if torch has no
    process group. Collective over the group on first use. With ``beside``, the ranks have a
    communicator that no save in the background uses. Raises ``ValueError`` if this rank is not in
    the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(_C.Comm.self_())
    if isinstance(group, int):  # new_group() returns an int on ranks outside the group
        raise ValueError(
            "group: this rank is not one of the group's, and only these save and load together: "
            "call on them alone"
        )
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None
    made = _beside if beside else _made
    found = made.get(parent)
    if found is None:
        try:
            found = _make_ranks(parent)
        except (_C.CommError, RuntimeError) as error:  # RuntimeError: torch's connection ended
            raise CheckpointError(f"before the first save or load: {_text(error)}") from error
        made[parent] = found
    return found


def _make_ranks(parent: dist.ProcessGroup) -> Ranks:
    if dist.get_world_size(parent) == 1:
        return Ranks(_C.Comm.self_())
    comm = None
    try:
        comm = comm_beside(parent) if dist.get_backend(parent) != "fake" else None
    except _C.CommError as error:
        # After a caught Ctrl-C the ranks still exist, but their communicator has ended.
        if not any(words in str(error) for words in ("gave up", "given up")):
            raise
    if comm is not None:
        return Ranks(comm, parent)
    own = _new_group(parent)
    return Ranks(comm_for_group(own), parent, own)


def _new_group(parent: dist.ProcessGroup) -> Any:
    is_world = parent is dist.group.WORLD
    return dist.new_group(
        None if is_world else dist.get_process_group_ranks(parent),
        timeout=timedelta(seconds=read_timeout()),
        backend="gloo",
        use_local_synchronization=not is_world,
    )


class Step:
    """A ``with`` block that every rank enters. If the block raises on some ranks,
    ``CheckpointError`` with these ranks and causes is raised on all ranks; a rank that was
    interrupted (Ctrl-C) raises the interruption itself. If there is no error, ``values`` has what
    each rank has assigned to ``value``. Collective.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self.ranks, self.what = ranks, what
        self.value: Any = None
        self.values: list[Any] = []

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, _C.CommError):  # a rank died or left: no exchange is possible
            raise CheckpointError(f"{self.what}: {error}") from error
        problem = None if error is None else _text(error)
        mine = {"problem": problem, "value": self.value if problem is None else None}
        try:
            received = self.ranks.exchange(mine, self.what)
        except (_C.CommError, TypeError) as failure:
            cause = error if error is not None else failure
            raise CheckpointError(f"{self.what}: {_text(cause)}") from cause
        if error is not None and not isinstance(error, Exception):
            error.add_note(f"in {self.what}")
            self.ranks.known = error
            return False
        problems = {
            rank: t["problem"] for rank, t in enumerate(received) if t["problem"] is not None
        }
        if problems:
            raise CheckpointError(self._message(problems)) from error
        self.values = [t["value"] for t in received]
        return False

    def _message(self, problems: dict[int, str]) -> str:
        if len(problems) == self.ranks.world and len(set(problems.values())) == 1:
            return f"{self.what}: {problems[0]}"
        parts = [
            f"rank {rank} ({self.ranks.places[rank]}): {text}" for rank, text in problems.items()
        ]
        return f"{self.what}: " + "; ".join(parts)


def check_equal(what: str, received: list[dict[str, Any]]) -> None:
    """Raise ``CheckpointError`` if a rank plans another checkpoint than rank 0. ``received`` has
    each rank's ``"target"`` and ``"sets"``. ``"sets"`` is the fingerprint of the rank's layouts.
    """
    for key, text in (("target", "path"), ("sets", "names, shapes or dtypes of tensors")):
        for rank, values in enumerate(received):
            if values[key] != received[0][key]:
                raise CheckpointError(
                    f"{what}: rank {rank} has another {text} than rank 0: {values[key]!r} and "
                    f"{received[0][key]!r}"
                )


def _text(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"

"""A rendezvous before calls that a program may make on some ranks only; comparison of models.

If a communicator's ``names_absentees`` is true, its waits have a deadline and their errors name the
missing ranks. Over a wire, the backend waits. Its waits end late or never, and name no rank. In
that case each rank first sets a key in the group's store, so that all ranks see which keys are
missing.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdpc import _C
from fsdpc._comm.bootstrap import Groups, read_timeout
from fsdpc._comm.channel import store_of

_HERE, _LEFT = b"here", b"left"
_POLL_S = 0.05
_warned = False  # whether this process has warned of names that differ between ranks
_rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def rendezvous(groups: Groups, text: str, what: str, nameless: str | None = None) -> None:
    """Wait for all ranks of the sharding group, and compare ``text`` and ``nameless`` (by default
    ``text``) over the ranks as ``agree_on_model`` does. Collective.

    ``CommTimeout`` names the ranks that are missing after ``FSDPC_TIMEOUT``. ``MismatchError``
    quotes the ``text`` of a rank that differs. Both errors contain ``what``.
    """
    if not groups.shard.names_absentees and groups.shard_pg is not None:
        _sign_in(groups.shard_pg, what)
    agree_on_model(groups.shard, text, text if nameless is None else nameless, what)


def agree_on_model(
    comm: _C.Comm, text: str, nameless: str, what: str, names: Sequence[str] = ()
) -> None:
    """Check that ``text`` is equal on all ranks, apart from ``names`` of modules and parameters.

    ``nameless`` is ``text`` without these names. If only the names differ, the process warns once.
    Raise ``MismatchError`` if ``nameless`` differs between ranks, or if all ranks have the same
    ``names`` in different orders. The error quotes the first difference of ``text``. Collective.
    """
    global _warned
    try:
        comm.agree(text, what)
    except _C.MismatchError as error:
        if not _agrees(comm, nameless, what) or (
            names and _agrees(comm, "\n".join(sorted(names)), what)
        ):
            raise
        if not _warned:
            _warned = True
            warnings.warn(
                f"{error}: only names differ, so the ranks train modules and parameters in their "
                "order, as one model; each rank's state dicts have its own names",
                stacklevel=2,
            )


def _agrees(comm: _C.Comm, text: str, what: str) -> bool:
    try:
        comm.agree(text, what)
    except _C.MismatchError:
        return False
    return True


def _sign_in(pg: dist.ProcessGroup, what: str) -> None:
    store = store_of(pg)
    if store is None:
        return
    number, rank, seconds = _rounds.get(pg, 0), pg.rank(), read_timeout()
    keys = [f"fsdpc/{number}/{r}" for r in range(pg.size())]
    store.set(keys[rank], _HERE)
    absent = _wait(store, keys, seconds)
    if absent:
        # The key is kept: without the key, this rank would look absent to ranks that time out now.
        store.set(keys[rank], _LEFT)
        more = "; every rank must make this call"
        raise _C.CommTimeout(_C.Comm.late_text(rank, seconds, what, absent, more))
    _rounds[pg] = number + 1
    if number > 0:  # all ranks are in this round, so no rank reads the last round's keys
        store.delete_key(f"fsdpc/{number - 1}/{rank}")


def _wait(store: Any, keys: list[str], seconds: float) -> list[int]:
    """Return the ranks without a key, and those whose wait timed out before this rank's wait."""
    deadline = time.monotonic() + seconds
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # torch's DistStoreError
        return [r for r, key in enumerate(keys) if not store.check([key])]
    while True:
        left = [r for r, key in enumerate(keys) if store.get(key) == _LEFT]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(_POLL_S)

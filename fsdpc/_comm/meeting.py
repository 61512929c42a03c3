"""Ranks meet before something that only some of them may have been told to do.

In shared memory every wait has a deadline and names who is missing. Over a wire the wait is the
backend's, which ends late or never and names nobody; there the ranks sign in at the group's store
first, where each can see who did not come.
"""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fsdpc import _C
from fsdpc._comm.bootstrap import Groups, read_timeout
from fsdpc._comm.channel import store_of

_HERE, _LEFT = b"here", b"left"
_POLL_S = 0.05
_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def meet(groups: Groups, text: str, what: str) -> None:
    """Wait for the ranks of the sharding group and compare what they are about to do. Collective.

    ``CommTimeout`` names the ranks that did not come within ``FSDPC_TIMEOUT``, ``MismatchError``
    quotes a rank whose ``text`` differs; ``what`` is in both.
    """
    if groups.shard.kind == "c10d" and groups.shard_pg is not None:
        _sign_in(groups.shard_pg, what)
    groups.shard.agree(text, what)


def _sign_in(pg: dist.ProcessGroup, what: str) -> None:
    store = store_of(pg)
    if store is None:
        return
    turn, rank, seconds = _turns.get(pg, 0), pg.rank(), read_timeout()
    keys = [f"fsdpc/{turn}/{r}" for r in range(pg.size())]
    store.set(keys[rank], _HERE)
    absent = _wait(store, keys, seconds)
    if absent:
        store.set(keys[rank], _LEFT)  # not deleted: others who give up now must not miss this rank
        names = " and ".join(f"rank {r}" for r in absent)
        raise _C.CommTimeout(
            f"{what}: rank {rank} waited {seconds:g} s, but {names} of the group did not come; "
            "every rank must make this call"
        )
    _turns[pg] = turn + 1
    if turn > 0:  # all have signed in for this turn, so nobody looks at the one before
        store.delete_key(f"fsdpc/{turn - 1}/{rank}")


def _wait(store: Any, keys: list[str], seconds: float) -> list[int]:
    """Ranks that did not sign in, or left again before this rank came and did not return."""
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

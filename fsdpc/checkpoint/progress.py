"""A progress bar on rank 0, if tqdm is installed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from fsdpc.checkpoint.entries import Entry
from fsdpc.checkpoint.layout import NBYTES, Place
from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.saving import Plan
from fsdpc.checkpoint.staging import in_host_memory

Advance = Callable[[int], object] | None


def bar(plan: Plan, ranks: Ranks, wanted: bool) -> Advance:
    """Return a function that advances the bar by a number of written bytes, or ``None`` if there is
    no bar.
    """
    if not wanted or ranks.rank != 0:
        return None
    total = sum(int(table.rows[:, NBYTES].sum()) for each in plan.sets for table in each.tables)
    return _shown(total, plan.target.name)


def read_bar(
    items: Sequence[tuple[Entry, Any, Place]], ranks: Ranks, name: str, wanted: bool
) -> Advance:
    """Return a function that advances the bar by a number of bytes that were read into host memory,
    or ``None`` if there is no bar.
    """
    if not wanted or ranks.rank != 0:
        return None
    here = [(entry, place) for entry, _, place in items if in_host_memory(entry)]
    total = sum(int(entry.spans[:, 2].sum()) * place.dtype.itemsize for entry, place in here)
    return _shown(total, name)


def _shown(total: int, name: str) -> Advance:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    shown = tqdm(total=total, unit="B", unit_scale=True, desc=name)
    lock = threading.Lock()

    def advance(nbytes: int) -> None:
        with lock:
            shown.update(nbytes)
            if shown.n >= total:
                shown.close()

    return advance

"""A progress bar on rank 0, by tqdm where it is installed."""

from __future__ import annotations

from collections.abc import Callable

from fsdpc.checkpoint.ranks import Ranks
from fsdpc.checkpoint.saving import Plan


def bar(plan: Plan, ranks: Ranks, wanted: bool) -> Callable[[int], object] | None:
    """A function that gets the bytes written; ``None`` without a bar."""
    if not wanted or ranks.rank != 0:
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    item = [(place, entry) for layout, entries in plan.sets for file in layout.files
            for place in file.places for entry in [entries[place.index]]]  # fmt: skip
    total = sum(
        int(entry.own(place.index)[:, 2].sum()) * place.dtype.itemsize for place, entry in item
    )
    shown = tqdm(total=total, unit="B", unit_scale=True, desc=plan.target.name)

    def advance(nbytes: int) -> None:
        shown.update(nbytes)
        if shown.n >= total:
            shown.close()

    return advance

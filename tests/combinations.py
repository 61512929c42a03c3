"""Which combinations of a test's axes run: `pytest --combinations pairs`.

A test of several ranks that is parametrised by several axes (world size, strategy,
use_orig_params, ...) has the product of the axes as its items. `pairs` keeps items in which every
two values of two axes still occur together, `each` keeps items in which every value of every axis
occurs, and `all`, the default, keeps the product. The choice depends on the items alone, so every
process and every day choose the same.

The rows of one parametrize call are one axis, however many arguments they hold: no row is left out.
One rank exchanges nothing: where a test runs on several ranks as well, an item on one rank counts
for its world size and for nothing else.

A test that starts its ranks with `run_ranks` is chosen alike: its parametrize calls are the axes.
`subset` does the same for a product inside a test: it follows $FSDPC_TEST_COMBINATIONS, which the
option sets for the ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

MODES = {"all": 0, "pairs": 2, "each": 1}  # how many axes must have all their values together
VARIABLE = "FSDPC_TEST_COMBINATIONS"
FOLDERS = ("dist", "parity", "fault", "clients", "fuzz")  # folders with tests of several ranks

Row = dict[str, Hashable]  # axis -> value
Goal = tuple[tuple[str, Hashable], ...]  # values that must occur together


def goals(row: Row, size: int, alone: bool) -> set[Goal]:
    """What a row covers: `size` values at a time; with `alone` only those with the world size."""
    size = min(size, len(row))
    found = set(itertools.combinations(row.items(), size))
    return {goal for goal in found if any(axis == "world" for axis, _ in goal)} if alone else found


def cover(rows: Sequence[Row], size: int) -> list[int]:
    """Indexes of rows that together cover what all cover; chosen greedily, on a tie the first."""
    several = any(row.get("world") != "1" for row in rows)
    covered = [goals(row, size, several and row.get("world") == "1") for row in rows]
    missing: set[Goal] = set().union(*covered)
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda i: (len(covered[i] & missing), -i))
        chosen.append(best)
        missing -= covered[best]
    return sorted(chosen)


def subset(
    product: Iterable[tuple[Any, ...]], mode: str | None = None, least: str = "each"
) -> list[tuple[Any, ...]]:
    """The tuples of a product, or those among them that the mode asks for; `least` at least."""
    values = list(product)
    size = MODES[mode or os.environ.get(VARIABLE, "all")]
    if not size:
        return values
    size = max(size, MODES[least])
    rows = [{str(axis): repr(value) for axis, value in enumerate(row)} for row in values]
    return [values[i] for i in cover(rows, size)]


def axes_of(item: Any) -> tuple[Hashable, Row] | None:
    """A test of several ranks, and the values of its axes in this item; None for any other item."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    case_of = getattr(item.function, "case_of", None)  # tests of tests/conformance have it
    if case_of is not None:
        function, arguments = case_of(**callspec.params)
        return (item.path, item.originalname, function), arguments
    by_ranks = hasattr(item.function, "rank_function")  # dist/harness.py sets it
    if not by_ranks and item.path.parent.name not in FOLDERS:
        return None
    ids = getattr(callspec, "_idlist", ())  # one id for each parametrize call
    calls = [mark.args[0] for mark in item.iter_markers("parametrize")]
    if len(calls) < 2 or len(calls) != len(ids):
        return None
    row = {str(call): i for call, i in zip(calls, ids, strict=True)}
    return (item.path, item.cls, item.originalname), row


def choose(items: Sequence[Any], mode: str) -> list[Any]:
    """The items that run, in their order."""
    if mode == "all":
        return list(items)
    groups: dict[Hashable, list[tuple[int, Row]]] = {}
    kept = []
    for number, item in enumerate(items):
        found = axes_of(item)
        if found is None or item.get_closest_marker("skip"):
            kept.append(number)
        else:
            groups.setdefault(found[0], []).append((number, found[1]))
    for group in groups.values():
        kept += [group[i][0] for i in cover([row for _, row in group], MODES[mode])]
    return [items[number] for number in sorted(kept)]

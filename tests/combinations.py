"""Choose which combinations of a test's axes run: `pytest --combinations pairs`.

A test of several ranks that is parametrised by several axes (world size, strategy,
use_orig_params, ...) has an item for each combination of the axes' values. `all`, the default,
runs all items. `pairs` keeps enough items that any two values of two axes still occur together.
`each` keeps enough items that every value of every axis occurs. The choice depends only on the
items, so it is the same in every process and in every run.

Each parametrize call is one axis, and its rows are the values of the axis, even if a row has many
arguments. No row is therefore left out. An item on one rank exchanges no data. If a test also runs
on several ranks, its items on one rank therefore count only for combinations with the world size 1.

The items of a test that starts its ranks with `run_ranks` are chosen in the same way; the test's
parametrize calls are the axes. `subset` chooses from a product inside of a test. `subset` follows
$FSDPC_TEST_COMBINATIONS, which the option sets for the ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

# Mode -> n. For any n axes, each combination of their values must occur. With 0, every item runs.
MODES = {"all": 0, "pairs": 2, "each": 1}
VARIABLE = "FSDPC_TEST_COMBINATIONS"
FOLDERS = ("dist", "parity", "fault", "clients", "fuzz")  # folders with tests of several ranks

Row = dict[str, Hashable]  # axis -> value
Goal = tuple[tuple[str, Hashable], ...]  # values that must occur together


def goals(row: Row, size: int, alone: bool) -> set[Goal]:
    """Return all groups of `size` values of a row; if `alone`, only groups with the world size."""
    size = min(size, len(row))
    found = set(itertools.combinations(row.items(), size))
    return {goal for goal in found if any(axis == "world" for axis, _ in goal)} if alone else found


def cover(rows: Sequence[Row], size: int) -> list[int]:
    """Return indexes of rows that cover all goals, chosen greedily; the first row wins a tie."""
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
    """Return the tuples of a product that a mode keeps: `mode` or `least`, whichever keeps more."""
    values = list(product)
    size = MODES[mode or os.environ.get(VARIABLE, "all")]
    if not size:
        return values
    size = max(size, MODES[least])
    rows = [{str(axis): repr(value) for axis, value in enumerate(row)} for row in values]
    return [values[i] for i in cover(rows, size)]


def axes_of(item: Any) -> tuple[Hashable, Row] | None:
    """Return the test and the values of its axes if ``item`` tests several ranks, else None."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    case_of = getattr(item.function, "case_of", None)  # in tests/conformance only
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
    """Return the items that run, in the given order."""
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

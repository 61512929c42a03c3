"""Tests of pytest's option `--combinations`: which combinations of a test's parameters it keeps."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import combinations
import pytest
from combinations import choose, cover, goals, subset

AXES = {
    "world": ["1", "2", "3"],
    "strategy": ["f", "g", "n", "h"],
    "flag": ["a", "b"],
    "late": "xyz",
}
ROWS = [dict(zip(AXES, row, strict=True)) for row in itertools.product(*AXES.values())]


def covered(chosen, size):
    return set().union(*(goals(ROWS[i], size, False) for i in chosen))


@pytest.mark.parametrize(("mode", "most"), [("pairs", 20), ("each", 6)])
def test_everything_occurs_that_must_occur_together(mode, most):
    size = combinations.MODES[mode]
    chosen = cover(ROWS, size)
    assert covered(chosen, size) == covered(range(len(ROWS)), size)
    assert len(chosen) <= most < len(ROWS)
    assert chosen == cover(ROWS, size) == sorted(set(chosen))


def test_one_rank_stands_for_nothing_else():
    several = [i for i in cover(ROWS, 2) if ROWS[i]["world"] != "1"]
    without = {axis: values for axis, values in AXES.items() if axis != "world"}
    for one, other in itertools.combinations(without, 2):
        pairs = {(ROWS[i][one], ROWS[i][other]) for i in several}
        assert pairs == set(itertools.product(AXES[one], AXES[other]))


def test_a_test_on_one_rank_only_keeps_its_pairs():
    rows = [row for row in ROWS if row["world"] == "1"]
    pairs = {(rows[i]["strategy"], rows[i]["late"]) for i in cover(rows, 2)}
    assert pairs == set(itertools.product(AXES["strategy"], AXES["late"]))


def test_rows_of_one_axis_all_stay():
    rows = [{"case": str(i)} for i in range(7)]
    assert cover(rows, 1) == cover(rows, 2) == list(range(7))


def test_combinations_that_a_test_lacks_are_not_asked_for():
    rows = [{"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "2", "c": "1"}]
    assert cover(rows, 2) == [0, 1]


def test_a_product_inside_a_test(monkeypatch):
    product = list(itertools.product(range(3), [None, True], "ab", "cd"))
    assert subset(product, "all") == product
    chosen = subset(product, "pairs")
    assert len(chosen) < 10 and [row for row in product if row in chosen] == chosen
    monkeypatch.setenv(combinations.VARIABLE, "each")
    assert len(subset(product)) == 3
    monkeypatch.delenv(combinations.VARIABLE)
    assert subset(product) == product


# --- on pytest's items ---------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("left", "right"), [(1, 1), (2, 1), (2, 2)])
def with_axes(world, size, left, right):
    """This function never runs. ``size`` has the same values as ``world``."""


with_axes.rank_function = with_axes  # as harness.ranks does


def items_of(function, ids, folder="unit", **more):
    """Return items like pytest's: marks and ids begin with the parametrize call nearest the
    function.
    """
    markers = function.pytestmark
    return [
        SimpleNamespace(
            path=Path(folder, "file"),
            cls=None,
            originalname=function.__name__,
            function=function,
            callspec=SimpleNamespace(_idlist=row, params=more),
            iter_markers=lambda name: iter(markers),
            get_closest_marker=lambda name: None,
        )
        for row in itertools.product(*ids)
    ]


def test_items_are_chosen_by_test():
    items = items_of(with_axes, (["1-1", "2-1", "2-2"], ["1", "2", "3"], ["1", "2", "3"]))
    assert choose(items, "all") == items
    kept = choose(items, "pairs")
    assert 9 <= len(kept) <= 14
    several = {i.callspec._idlist[:2] for i in kept if i.callspec._idlist[2] != "1"}
    assert len(several) == 9, "pairs of the other two axes on several ranks"
    assert len(choose(items, "each")) <= 5


def test_pytest_shows_what_the_choice_reads(request):
    """combinations.py must find the parametrised axes in pytest's items. Otherwise no item would be
    left out, and no other test would fail.
    """
    found = [i for i in request.session.items if i.originalname == "test_with_axes"]
    assert all(set(combinations.axes_of(item)[1]) == {"world", "flag"} for item in found)


def test_one_process_keeps_its_product(monkeypatch):
    """Tests of one process keep all combinations: they take milliseconds, and each value may run
    different code.
    """
    monkeypatch.delattr(with_axes, "rank_function")
    items = items_of(with_axes, (["1-1", "2-1"], ["1", "2"], ["1", "2"]))
    assert choose(items, "each") == items
    items = items_of(with_axes, (["1-1", "2-1"], ["1", "2"], ["1", "2"]), folder="dist")
    assert len(choose(items, "each")) == 3, "one that starts its ranks itself"


@pytest.mark.parametrize("world", [1])
@pytest.mark.parametrize("flag", [True, False])
def test_with_axes(world, flag):
    """Provide the items that test_pytest_shows_what_the_choice_reads looks at."""
    assert world == 1


test_with_axes.rank_function = test_with_axes

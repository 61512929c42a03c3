"""Tests of the suite: it must find the differences that are planted here."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compare import difference
from outcome import HANGS, dies, raises, wrong
from suite import Cases

case = Cases(__name__, __file__)


@case()
def other_values(lib):
    return torch.tensor([1.0, 2.0 if lib.name == "torch" or lib.rank == 0 else 2.1])


@case(raises=ValueError, words="mine")
def other_exceptions(lib):
    raise ValueError("mine") if lib.name == "torch" else KeyError("mine")


@case(raises=ValueError, words="mine")
def other_words(lib):
    raise ValueError("mine" if lib.name == "torch" else "yours")


@case(torch=raises(ValueError))
def a_failure_that_is_gone(lib):
    return None


@case()
def an_unexpected_exception(lib):
    raise ValueError("both")


@case(torch=wrong("mine"))
def an_own_assertion(lib):
    assert lib.name == "fsdpc", "mine"


@case(torch=raises(AssertionError))
def an_own_assertion_is_no_exception_of_the_library(lib):
    assert lib.name == "fsdpc", "mine"


@case(torch=raises(ValueError, "alone"))
def a_rank_that_raises_alone(lib):
    if lib.name == "torch" and lib.rank == 1:
        raise ValueError("alone")
    return 1


@case(torch=dies("SIGSEGV"))
def a_rank_that_dies(lib):
    if lib.name == "torch" and lib.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


@case()
def a_rank_of_torch_that_dies_once(lib):
    mark = Path(tempfile.gettempdir(), f"fsdpc-conform-died-{os.getppid()}")
    if lib.name == "torch" and lib.rank == 1:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGABRT)
        mark.unlink()
    dist.barrier()


@case()
def a_rank_of_torch_that_dies_unexpectedly(lib):
    if lib.name == "torch" and lib.rank == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()


@case(torch=HANGS, alone=2)
def a_rank_that_never_ends(lib):
    if lib.name == "torch" and lib.rank == 1:
        time.sleep(600)
    return lib.rank


@case()
def the_case_after_them(lib):
    return dist.get_world_size(), lib.rank


test_torch, test_fsdpc = case.tests()
GOOD = {
    "an_own_assertion",
    "a_rank_that_dies",
    "a_rank_of_torch_that_dies_once",
    "a_rank_of_torch_that_dies_unexpectedly",
    "a_rank_that_never_ends",
    "the_case_after_them",
}
BAD_TORCH = {
    "a_failure_that_is_gone",
    "an_unexpected_exception",
    "a_rank_that_raises_alone",
    "a_rank_of_torch_that_dies_unexpectedly",
    "an_own_assertion_is_no_exception_of_the_library",
}
del test_torch, test_fsdpc  # so that pytest does not run them: some must fail, see test_planted


@pytest.mark.parametrize("name", list(case.cases))
def test_planted(name, monkeypatch):
    import suite

    monkeypatch.setattr(suite, "DIFFERENCES", {})
    chosen = {(case.module, n) for n in case.cases}
    on_torch, on_fsdpc = case.tests()
    with expected_to_fail(name in BAD_TORCH):
        on_torch(name=name, chosen_cases=chosen)
    with expected_to_fail(name not in GOOD):
        on_fsdpc(name=name, chosen_cases=chosen)


def expected_to_fail(fails):
    from contextlib import nullcontext

    return pytest.raises(AssertionError) if fails else nullcontext()


def test_equality():
    t = torch.tensor
    assert difference([t([1.0]), {"a": 1.0}], [t([1.0]), {"a": 1.0 + 1e-9}], 1e-6) == ""
    assert difference(t([float("inf")]), t([float("inf")]), 1e-6) == ""
    for got, expected in [
        (t([1.0]), t([1.1])),
        (t([1.0]), t([1])),
        (t([1.0]), t([[1.0]])),
        (t([1.0]), 1.0),
        (t([float("nan")]), t([1.0])),
        (t([1.0]), t([float("nan")])),
        (t([float("nan")]), t([float("nan")])),
        (float("nan"), float("nan")),
        (t([1.0]), t([float("inf")])),
        ((1,), [1]),
        ([1], [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": 1}, {"a": 2}),
        ("x", "y"),
        (1.0, 1.1),
    ]:
        assert difference(got, expected, 1e-6), f"{got} and {expected} count as equal"

"""The harness itself: results, failures, deadlines and signals of ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from harness import LOADED_BY_RANKS, RankFailure, Template, die, ranks, run_ranks, signal_rank

import fsdpc.wrap


@ranks(1, 2, 4)
@pytest.mark.parametrize("factor", [1, 3])
def test_ranks_form_a_process_group(rank, world, factor):
    value = torch.tensor([float(rank * factor)])
    dist.all_reduce(value)
    assert value.item() == factor * world * (world - 1) / 2
    assert torch.get_num_threads() == 1


def return_rank(rank, world, scale):
    return {"rank": torch.tensor([rank * scale])}


def test_results_come_back_in_rank_order():
    values = run_ranks(return_rank, 3, scale=2)
    assert [v["rank"].item() for v in values] == [0, 2, 4]


def raise_on_rank_one(rank, world):
    if rank == 1:
        raise KeyError("from rank one")
    dist.barrier()


def test_an_exception_names_rank_and_place():
    with pytest.raises(RankFailure, match=r"rank 1 raised KeyError(.|\n)*raise_on_rank_one"):
        run_ranks(raise_on_rank_one, 2)


def sleep_on_rank_zero(rank, world):
    if rank == 0:
        time.sleep(600)


def test_the_deadline_prints_stacks():
    with pytest.raises(RankFailure, match=r"rank 0 was still running(.|\n)*sleep_on_rank_zero"):
        run_ranks(sleep_on_rank_zero, 2, timeout=6.0)


def die_and_survive(rank, world):
    if rank == 1:
        die()
    if rank == 2:
        signal_rank(2, signal.SIGSTOP, after=0.05)
        time.sleep(600)
    try:
        signal_rank(0, signal.SIGINT, after=0.1)
        time.sleep(600)
    except KeyboardInterrupt:
        return "interrupted"


def test_ranks_can_be_killed_stopped_and_interrupted():
    zero, one, two = run_ranks(die_and_survive, 3, faults=True, timeout=60)
    assert zero.value == "interrupted" and zero.finished_at >= zero.signalled_at
    assert one.exit_signal == signal.SIGKILL and not one.returned
    assert two.stopped and two.value is None


def look_and_leave(rank, world, change):
    found = os.getpid(), os.environ.get("FSDPC_LEFT"), torch.is_grad_enabled()
    dist.all_reduce(torch.ones(1))
    os.environ["FSDPC_LEFT"] = "set"
    torch.set_grad_enabled(False)
    if change == "raise":
        raise KeyError("left")
    if change:
        fsdpc.wrap.always_wrap_policy = None
    return found


def test_shared_ranks_are_as_new_or_new():
    def look(change="", **more):
        found = run_ranks(look_and_leave, 2, change=change, **more)
        assert [f[1:] for f in found] == [(None, True)] * 2
        return [f[0] for f in found]

    first = look(shared=True)
    assert look("function", shared=True) == first
    second = look(shared=True)
    assert not set(first) & set(second)
    assert not set(look()) & set(second)
    assert look(shared=True) == second
    with pytest.raises(RankFailure, match="left"):
        run_ranks(look_and_leave, 2, change="raise", shared=True)
    assert not set(look(shared=True)) & set(second)


def list_unloaded(rank, world):
    return [m for m in LOADED_BY_RANKS if m not in sys.modules and importlib.util.find_spec(m)]


def test_what_ranks_load_is_loaded_once_for_all():
    assert run_ranks(list_unloaded, 1) == [[]]


def variable(rank, world):
    return os.environ.get("FSDPC_TEST_OF_THE_HARNESS")


def test_a_template_that_died_is_replaced_and_has_the_environment_of_its_pytest(monkeypatch):
    assert run_ranks(variable, 1) == [None]
    died = Template.instance()
    signal.pidfd_send_signal(died.process, signal.SIGKILL)
    assert died.ended(60)
    monkeypatch.setenv("FSDPC_TEST_OF_THE_HARNESS", "set")
    assert run_ranks(variable, 1) == ["set"]
    Template.close()  # templates of the next tests must not have the variable


def die_before_a_child(rank: int, world: int) -> None:
    if os.fork() == 0:
        time.sleep(25)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_before_a_process_that_it_has_forked():
    """The harness notices the death although the forked process keeps the rank's channel open."""
    began = time.monotonic()
    (outcome,) = run_ranks(die_before_a_child, 1, faults=True)
    assert outcome.exit_signal == signal.SIGKILL
    assert time.monotonic() - began < 15

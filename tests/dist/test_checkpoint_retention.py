"""Tests of which checkpoints a Checkpointer keeps, and of how a signal ends a run."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn

from fsdpc.checkpoint import Checkpointer, CheckpointError, Preemption


def stays(path, metrics: dict[int, float | None], **options) -> list[int]:
    """Return the steps whose folders remain after a run that saves the steps of `metrics`."""
    keeper = Checkpointer(path, **options)
    model = nn.Linear(2, 2)
    for step, metric in metrics.items():
        keeper.save(step, model, metric=metric)
    return keeper.steps()


LOSSES = {1: 5.0, 2: 1.0, 3: 4.0, 4: 2.0, 5: 3.0, 6: 6.0, 7: 7.0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": 2}, [6, 7]),
        ({"keep": 2, "keep_every": 3}, [3, 6, 7]),
        ({"keep": 1, "best": "min"}, [2, 7]),
        ({"keep": 1, "best": "max"}, [7]),
        ({"keep": 1, "best": "min", "keep_best": 2}, [2, 4, 7]),
        ({"keep": 1, "protected": [1, 5]}, [1, 5, 7]),
        ({"keep": 1, "keep_every": 3, "best": "min", "protected": [1]}, [1, 2, 3, 6, 7]),
        ({"keep": None, "best": "min"}, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_stays(tmp_path, options, expected):
    assert stays(tmp_path, LOSSES, **options) == expected


def test_the_best_is_found_again(tmp_path):
    """Metrics are in the manifests, so a later run can read them. Some steps have no metric."""
    assert stays(tmp_path, {1: 5.0, 2: 1.0, 3: None}, keep=1, best="min") == [2, 3]
    keeper = Checkpointer(tmp_path, keep=1, best="min")
    assert keeper.best() == keeper.path(2)
    assert json.loads((keeper.path(2) / "fsdpc.json").read_text())["metric"] == 1.0
    model = nn.Linear(2, 2)
    found = keeper.resume(model)
    assert (found.step, found.metric) == (3, None)
    keeper.save(4, model, metric=0.5)
    assert (keeper.steps(), keeper.best()) == ([3, 4], keeper.path(4))  # step 3 was resumed
    assert Checkpointer(tmp_path / "none", best="max").best() is None


def test_rolled_back(tmp_path):
    """Steps later than the step to which the run has gone back are abandoned.

    Abandoned steps are removed before all others. `best` and `keep_every` do not keep an abandoned
    step, but `protected` does.
    """
    model = nn.Linear(2, 2)
    keeper = Checkpointer(tmp_path, keep=2, keep_every=2, best="min", protected=[6])
    for step in (2, 4, 5, 6):
        keeper.save(step, model, metric=10.0 - step)
    keeper.resume(model, step=4)
    keeper.save(5, model, metric=9.0)
    assert keeper.abandoned() == [6]
    keeper.save(7, model, metric=9.5)
    assert keeper.steps() == [2, 4, 5, 6, 7] and keeper.best() == keeper.path(4)


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="best must be"):
        Checkpointer(tmp_path, best="loss")
    with pytest.raises(ValueError, match="keep_every must be at least 1"):
        Checkpointer(tmp_path, keep_every=0)
    keeper = Checkpointer(tmp_path, best="min")
    with pytest.raises(CheckpointError, match="metric must be a finite number, not nan"):
        keeper.save(1, nn.Linear(2, 2), metric=float("nan"))
    with pytest.raises(ValueError, match="best= is not given"):
        Checkpointer(tmp_path).best()


@ranks(2)
def test_ranks_with_other_metrics(rank, world, tmp_path):
    keeper = Checkpointer(tmp_path, best="min")
    with pytest.raises(CheckpointError, match=r"ranks give other metrics: \[0.0, 1.0\]"):
        keeper.save(1, nn.Linear(2, 2), metric=float(rank))
    assert keeper.steps() == []


@ranks(2, 3)
def test_preemption(rank, world, tmp_path, caplog=None):
    """One rank gets the signal in the middle of a step. All ranks save the same step and end."""
    model, done = nn.Linear(2, 2), 0
    before = signal.getsignal(signal.SIGTERM)
    keeper = Checkpointer(tmp_path, every=100, async_=True)
    with Preemption(within=60) as preemption:
        for step in range(1, 50):
            torch.ones(10).sum()
            if rank == world - 1 and step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            ending = preemption.agreed()
            keeper.save(step, model, force=ending)
            if ending:
                done = step
                break
        assert (preemption.left is not None) == (rank == world - 1)
    keeper.wait()
    assert (done, keeper.steps()) == (3, [3])
    assert signal.getsignal(signal.SIGTERM) == before
    dist.barrier()


def test_too_late(caplog):
    with Preemption(within=0.05) as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.agreed()
        deadline = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "0.05 s after the signal the run has not ended" in caplog.text


def test_signals_that_no_process_can_handle():
    """Preemption restores signal handlers if it cannot handle one of its signals.

    It also restores a handler of a signal that is given twice.
    """
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="Invalid argument"):
        Preemption(signals=(signal.SIGTERM, signal.SIGKILL))
    assert signal.getsignal(signal.SIGTERM) == before
    with Preemption(signals=(signal.SIGTERM, signal.SIGTERM)):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before

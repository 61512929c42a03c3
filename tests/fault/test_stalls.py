"""Tests of ranks that stall: all other ranks report the same table and the same cause, and log
warnings.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from harness import run_ranks, signal_rank
from torch import nn
from toys import Block, loss_of, tokens, toy, wrap_blocks

from fsdpc._comm import bootstrap as _bootstrap

VICTIM = 2
ENVIRONMENT = {"FSDPC_TIMEOUT": "4", "FSDPC_STALL": "1"}
MARK = "the cause: "


class Trap(nn.Module):
    """A module that calls `fatal` after its block has run for the second time."""

    def __init__(self, block: nn.Module, fatal) -> None:
        super().__init__()
        self.block, self.fatal, self.calls = block, fatal, 0

    def forward(self, x):
        x = self.block(x)
        self.calls += 1
        if self.calls == 2:
            self.fatal()
        return x


def stop_here():
    os.kill(os.getpid(), signal.SIGSTOP)


def train(rank, world, fatal, group=None):
    model = toy(blocks=3)
    model.blocks[1] = Trap(model.blocks[1], fatal if rank == VICTIM else lambda: None)
    options = {} if group is None else {"process_group": group}
    sharded = wrap_blocks("fsdpc", model, Block, use_orig_params=True, **options)
    for step in range(3):
        loss_of(sharded, tokens(rank, step)).backward()


def stopped(rank, world):
    train(rank, world, lambda: (signal_rank(rank, signal.SIGSTOP), stop_here()))


def stopped_over_gloo(rank, world):
    group = dist.new_group(timeout=timedelta(seconds=4))
    fatal = lambda: (signal_rank(rank, signal.SIGSTOP), stop_here())  # noqa: E731
    train(rank, world, fatal, group)


def stopped_on_a_host(rank, world):
    """Ranks 1 and 2 count as being on another host than rank 0. The group's own timeout (4 s) is
    shorter than FSDPC_STALL."""
    host = _bootstrap.this_host()
    _bootstrap.this_host = lambda: f"node{min(rank, 1)} {host}"
    stopped_over_gloo(rank, world)


def holding_the_lock(rank, world, path):
    """The victim waits in C for a file that rank 0 has locked, and holds the GIL."""
    with open(path, "w") as file:
        if rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        train(rank, world, lambda: ctypes.PyDLL(None).flock(file.fileno(), fcntl.LOCK_EX))


def survivors(outcomes):
    return [outcome for outcome in outcomes if outcome.rank != VICTIM]


def check_one_cause(outcomes, expected):
    """Check that every survivor's error has the same table, and that the table names the victim as
    the cause."""
    tables = []
    for outcome in survivors(outcomes):
        assert outcome.error, f"rank {outcome.rank} did not notice: {outcome.log}"
        assert MARK in outcome.error, outcome.error
        tables.append(outcome.error.partition(MARK)[2].split("\n\n")[0])
    assert tables[0].startswith(f"rank {VICTIM} ("), tables[0]
    assert expected in tables[0], tables[0]
    lines = [text.splitlines()[: 2 + len(outcomes)] for text in tables]
    assert all(each == lines[0] for each in lines), tables
    return tables[0]


def check_warnings(outcomes):
    """Check that every rank that still runs has logged a table."""
    for outcome in survivors(outcomes):
        assert "no progress for" in outcome.log, outcome.log
        assert f"{MARK}rank {VICTIM} (" in outcome.log, outcome.log


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "env"),
    [
        (stopped, {"FSDPC_COLLECTIVES": "shm"}),
        (stopped_over_gloo, {"FSDPC_COLLECTIVES": "wire"}),
        (stopped_on_a_host, {"FSDPC_TIMEOUT": "24", "FSDPC_STALL": "10"}),
    ],
)
def test_a_stopped_rank_is_the_cause_on_every_rank(function, env):
    outcomes = run_ranks(function, 3, faults=True, env={**ENVIRONMENT, **env}, on_device=False)
    assert outcomes[VICTIM].stopped
    table = check_one_cause(outcomes, "is stopped (SIGSTOP or a debugger)")
    assert "kill -CONT" in table and ".py:" in table
    assert function is not stopped_on_a_host or f"* {VICTIM}   node1" in table
    check_warnings(outcomes)


@pytest.mark.long
def test_the_line_of_a_rank_that_holds_the_interpreters_lock(tmp_path):
    path = str(tmp_path / "file")
    outcomes = run_ranks(holding_the_lock, 3, faults=True, env=ENVIRONMENT, path=path)
    table = check_one_cause(outcomes, "sleeps or waits outside of fsdpc")
    assert "test_stalls.py:" in table and " in <lambda>" in table, table
    check_warnings(outcomes)


def silent(rank, world):
    train(rank, world, lambda: None)


def test_no_warnings_without_a_stall():
    outcomes = run_ranks(silent, 3, faults=True, env={"FSDPC_STALL": "30"})
    assert all(outcome.returned for outcome in outcomes), outcomes
    assert all("no progress" not in outcome.log for outcome in outcomes)


def meets_others(rank, world):
    """The last rank calls a collective while the other ranks train."""
    model = wrap_blocks("fsdpc", toy(), Block, use_orig_params=True)
    loss_of(model, tokens(rank, 0)).backward()
    if rank == VICTIM:
        model.state_dict()
    time.sleep(1)  # so that the last rank's deadline passes first
    loss_of(model, tokens(rank, 0)).backward()


def test_a_rank_that_is_the_cause_itself_says_for_whom_it_waits():
    env = {"FSDPC_TIMEOUT": "4"}
    outcomes = run_ranks(meets_others, 3, faults=True, env=env)
    for outcome in outcomes:
        assert f"{MARK}rank {VICTIM} (" in outcome.error, outcome.error
    errors = "".join(outcome.error for outcome in outcomes)
    waits = re.findall(rf"rank {VICTIM} waited 4 s in .* for (ranks?.*) \(FSDPC_TIMEOUT", errors)
    assert waits, errors
    assert all(who in ("ranks 0 and 1", "rank 0", "rank 1") for who in waits), waits

"""Tests of a rank that dies, stops, raises or is interrupted: the other ranks name it, and end.

Every test also checks that no shared memory file and no process is left.
"""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import die, run_ranks, shorten_deadlines, signal_rank
from torch import nn
from toys import Block, loss_of, tokens, toy, wrap_blocks

from fsdpc import CommError, checkpoint, fully_shard

# The most seconds from the signal to the last survivor's error. The deadline is longer: 30 s.
LATE_S = 20.0
# The deadline of the other ranks in seconds. It is set in the step in which a rank stops.
STOPPED_S = 4.0
VICTIM = 1


class Trap(nn.Module):
    """A module that calls `fatal` when `trip` is called for the second time with `place`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.place, self.fatal, self.calls = "", None, 0

    def trip(self, place):
        if place == self.place:
            self.calls += 1
            if self.calls == 2:
                self.fatal()

    def forward(self, x):
        self.trip("before the block")
        x = self.block(x)
        self.trip("after the block")
        if x.requires_grad:
            x.register_hook(lambda grad: self.trip("backward"))
        return x


PHASES = [
    "construction",
    "before the block",
    "after the block",
    "backward",
    "end of backward",
    "optimizer step",
    "state_dict",
]


def train_until(rank, world, phase, fatal, stops=False):
    """Train three steps on every rank. The victim calls `fatal` in the given phase: at
    construction, or in the second step. With `stops`, the other ranks wait only STOPPED_S for the
    victim from the second step on."""
    model = toy(blocks=3)
    trap = model.blocks[1] = Trap(model.blocks[1])
    mine = rank == VICTIM
    if mine and phase == "construction":
        fatal()
    sharded = wrap_blocks("fsdpc", model, Block, use_orig_params=True)
    if mine:
        trap.place, trap.fatal = phase, fatal
    optimizer = torch.optim.AdamW(sharded.parameters())
    for step in range(3):
        if step == 1 and stops:
            shorten_deadlines(STOPPED_S, here=not mine)
        loss = loss_of(sharded, tokens(rank, step))
        if mine and step == 1 and phase == "end of backward":
            loss.register_hook(lambda grad: at_end_of_backward(fatal))
        loss.backward()
        if mine and step == 1 and phase == "optimizer step":
            optimizer.register_step_pre_hook(lambda *_: fatal())
        optimizer.step()
        optimizer.zero_grad()
        if phase == "state_dict" and step == 1:
            if mine:
                fatal()
            sharded.state_dict()


def at_end_of_backward(fatal):
    """Call `fatal` when all gradients are complete, before the engine's own callback runs."""
    torch.autograd.Variable._execution_engine.queue_callback(fatal)


def with_what_was_left(body):
    """Run a test body, and check that it leaves no file of fsdpc in /dev/shm."""
    before = set(os.listdir("/dev/shm"))
    outcomes = body()
    left = set(os.listdir("/dev/shm")) - before
    assert not {name for name in left if "fsdpc" in name}, f"left in /dev/shm: {left}"
    return outcomes


def check_survivors(outcomes, expected, *, since=None, within=LATE_S, kinds=("PeerError",)):
    victim = outcomes[VICTIM]
    since = victim.signalled_at if since is None else since
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            continue
        assert outcome.error, f"rank {outcome.rank} did not notice: {outcome.log}"
        assert set(kinds) & set(outcome.error_types), outcome.error
        assert f"rank {VICTIM}" in outcome.error, outcome.error
        assert expected in outcome.error, outcome.error
        assert outcome.finished_at - since <= within, (
            f"rank {outcome.rank} raised {outcome.finished_at - since:.2f} s after: {outcome.error}"
        )


def killed(rank, world, phase):
    train_until(rank, world, phase, die)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("phase", PHASES)
def test_sigkill(world, phase):
    outcomes = with_what_was_left(lambda: run_ranks(killed, world, faults=True, phase=phase))
    assert outcomes[VICTIM].exit_signal == signal.SIGKILL
    if phase == "construction":  # no communicator exists yet; torch's rendezvous notices
        for outcome in outcomes:
            assert not outcome.returned
        return
    # On a slow machine a survivor may wait elsewhere than in the phase in which the victim died.
    check_survivors(outcomes, "died")
    assert all(re.search("unit|end of backward", o.error) for o in outcomes if o.rank != VICTIM)


def killed_between_units(rank, world):
    """The victim dies while its second unit is being made, when communicators already exist."""
    model = toy(blocks=3)
    if rank == VICTIM:
        from fsdpc._engine import unit as _unit

        original = _unit.Unit.__init__

        def dying(self, name, *args, **kwargs):
            if name.endswith("1"):
                die()
            original(self, name, *args, **kwargs)

        _unit.Unit.__init__ = dying
    wrap_blocks("fsdpc", model, use_orig_params=True)


@pytest.mark.parametrize("world", [2, 3])
def test_sigkill_between_units(world):
    outcomes = with_what_was_left(lambda: run_ranks(killed_between_units, world, faults=True))
    check_survivors(outcomes, "construction of unit")


def raising(rank, world, phase):
    def fatal():
        raise ArithmeticError("the loader of rank one is empty")

    train_until(rank, world, phase, fatal)


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "construction"])
def test_exception(phase):
    """If one rank does not catch an exception, the other ranks end too, and their errors quote the
    exception."""
    outcomes = with_what_was_left(lambda: run_ranks(raising, 3, faults=True, phase=phase))
    victim = outcomes[VICTIM]
    assert "ArithmeticError" in victim.error_types
    check_survivors(outcomes, "the loader of rank one is empty", since=victim.finished_at)


def stopping(rank, world, phase):
    def fatal():
        signal_rank(rank, signal.SIGSTOP)
        time.sleep(600)

    train_until(rank, world, phase, fatal, stops=True)


@pytest.mark.parametrize("phase", ["before the block", "backward", "optimizer step"])
def test_sigstop(phase):
    """A stopped rank is not dead. The deadline ends the wait, and the error names the rank that did
    not come."""
    outcomes = with_what_was_left(lambda: run_ranks(stopping, 2, faults=True, phase=phase))
    assert outcomes[VICTIM].stopped
    # After a while, the other ranks stop waiting for a slot of the stopped rank, and use private
    # memory. They then wait at the end of backward, not in a unit's gather.
    expected = f"the cause: rank {VICTIM} (pid "
    check_survivors(outcomes, expected, within=STOPPED_S + LATE_S, kinds=["CommTimeout"])


def interrupted(rank, world):
    store = dist.distributed_c10d._get_default_store()

    def fatal():
        signal_rank(0, signal.SIGINT, after=0.3)
        store.wait(["interrupted"])

    try:
        train_until(rank, world, "before the block", fatal)
    except KeyboardInterrupt:
        store.set("interrupted", "")
        raise


@pytest.mark.parametrize("collectives", ["shm", "wire"])
def test_sigint_while_waiting(collectives):
    env = {"FSDPC_COLLECTIVES": collectives}
    outcomes = with_what_was_left(lambda: run_ranks(interrupted, 2, env=env, faults=True))
    zero = outcomes[0]
    assert "KeyboardInterrupt" in zero.error_types, zero.error
    assert zero.finished_at - zero.signalled_at <= LATE_S
    assert "rank 0" in outcomes[VICTIM].error and "KeyboardInterrupt" in outcomes[VICTIM].error


def sharded_toy(interface):
    if interface == "FullyShardedDataParallel":
        return wrap_blocks("fsdpc", toy(), use_orig_params=True)
    model = toy()
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


def caught(rank, world, interface, place, path):
    """Rank 0 catches Ctrl-C in the middle of a collective, and continues."""
    sharded = sharded_toy(interface)
    store = dist.distributed_c10d._get_default_store()

    def step(number):
        loss = loss_of(sharded, tokens(rank, number))
        if number == 1 and rank == VICTIM and place == "backward":
            come_late()
        loss.backward()
        if interface == "FullyShardedDataParallel":
            sharded.clip_grad_norm_(1.0)

    def come_late():
        signal_rank(0, signal.SIGINT, after=0.3)
        store.wait([str(other) for other in range(world) if other != rank])

    step(0)
    dist.barrier()
    told, waits = [], []
    if rank == VICTIM and place == "between units":
        sharded.blocks[1].register_forward_pre_hook(lambda *_: come_late(), prepend=True)
    elif rank == VICTIM and place != "backward":
        if place == "clip":
            loss_of(sharded, tokens(rank, 1)).backward()
        come_late()
    for _ in range(2):
        since = time.monotonic()
        try:
            step(1)
        except (KeyboardInterrupt, CommError) as error:
            told.append((type(error).__name__, str(error)))
            store.set(str(rank), "")
        waits.append(time.monotonic() - since)
        dist.barrier()
        checkpoint.save(f"{path}/{len(waits)}", sharded)
    return told, waits


@pytest.mark.parametrize(
    ("interface", "place"),
    [
        (interface, place)
        for interface in ("FullyShardedDataParallel", "fully_shard")
        for place in ("gather", "between units", "backward", "clip")
        if (interface, place) != ("fully_shard", "clip")  # torch, not fsdpc, clips DTensors
    ],
)
def test_sigint_caught_in_a_collective(tmp_path, interface, place):
    """Ranks that are waiting and ranks that come later raise an error at once. The error names the
    interrupted rank. All later steps raise an error too. Checkpoints can still be saved, because
    checkpoints have their own communicators."""
    options = {"interface": interface, "place": place, "path": str(tmp_path)}
    outcomes = with_what_was_left(lambda: run_ranks(caught, 3, faults=True, **options))
    for outcome in outcomes:
        assert outcome.value, outcome.error
        (first, why), (then, later) = outcome.value[0]
        assert max(outcome.value[1]) < LATE_S
        assert "KeyboardInterrupt" in later and "waiting in" in later
        if outcome.rank == 0:
            assert (first, then) == ("KeyboardInterrupt", "CommError")
            assert "this rank (0) has given up" in later or "rank 0 gave up" in later
        else:
            assert (first, then) == ("PeerError", "PeerError")
            assert "rank 0" in why and "KeyboardInterrupt" in why and "rank 0" in later
    for number in (1, 2):
        loaded = toy(seed=1)
        checkpoint.load(tmp_path / str(number), loaded)
        for value, expected in zip(loaded.parameters(), toy().parameters(), strict=True):
            assert torch.equal(value, expected)


def test_no_process_is_left():
    """After a fault test, the processes of all its ranks are gone, survivors and stopped ranks
    included."""
    outcomes = run_ranks(report_pid_and_stop, 3, faults=True)
    pids = [
        int(line.split()[-1])
        for o in outcomes
        for line in o.log.splitlines()
        if line.startswith("pid")
    ]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def report_pid_and_stop(rank, world):
    print("pid", os.getpid())
    stopping(rank, world, "before the block")


def evaluate_unevenly(rank, world):
    sharded = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    with torch.no_grad():
        sharded(tokens(rank, 0))
        shorten_deadlines(here=rank == 1)
        if rank == 1:
            sharded(tokens(rank, 1))
    dist.barrier()


def test_uneven_evaluation_that_cannot_go_on():
    """Rank 0 waits for rank 1 outside of the engine, so rank 1's timeout error names rank 0."""
    outcomes = run_ranks(evaluate_unevenly, 2, faults=True)
    assert "CommTimeout" in outcomes[1].error_types and "rank 0" in outcomes[1].error

"""Tests of ranks on several hosts: what the other ranks report, and how soon, if a process or a
link is lost.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import on_hosts
import pytest
import torch
from harness import die, run_ranks, signal_rank
from torch.distributed.fsdp import ShardingStrategy
from toys import loss_of, tokens, toy, wrap_blocks

namespaces = pytest.mark.skipif(bool(on_hosts.missing()), reason=on_hosts.missing())

TIMEOUT_S = 4.0
CUT_AT = 2  # the step before which a rank or a link fails
SHORT = {"FSDPC_TIMEOUT": str(TIMEOUT_S)}


def train(rank, world, fail=None, steps=30):
    """Train, and call `fail(rank)` before step CUT_AT."""
    model = wrap_blocks("fsdpc", toy(blocks=3), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        if step == CUT_AT and fail:
            fail(rank)
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss_of(model, tokens(0, 0)).detach())


def killed(rank, world, victim):
    train(rank, world, lambda rank: die() if rank == victim else None)


def raising(rank, world, victim):
    def fail(rank):
        if rank == victim:
            raise ValueError("no such word")

    train(rank, world, fail)


def check_named_at_once(outcomes, victim, kind):
    """Check that all other ranks name the victim within 3 s. After the victim's rank, the error has
    a text in parentheses, which must begin with ``kind``."""
    begun = outcomes[victim].signalled_at
    for outcome in outcomes:
        if outcome.rank != victim:
            assert "PeerError" in outcome.error_types, outcome
            assert f"rank {victim} ({kind}" in outcome.error, outcome.error
            assert outcome.finished_at - begun < 3.0, outcome.finished_at - begun


@namespaces
@pytest.mark.parametrize("world, victim", [(2, 0), (2, 1)])
def test_a_killed_rank_is_named_at_once(world, victim):
    """A killed rank is named at once, even if its process holds the group's store."""
    env = on_hosts.environment_for(2, world)
    outcomes = run_ranks(killed, world, env=env, faults=True, victim=victim)
    check_named_at_once(outcomes, victim, "process")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_named_on_its_host_and_on_others(victim):
    """Rank 0 is on one host, ranks 1 and 2 are on another one."""
    outcomes = run_ranks(killed, 3, env=on_hosts.counted_as("abb"), faults=True, victim=victim)
    check_named_at_once(outcomes, victim, "p")


def late(rank, world, victim):
    train(rank, world, lambda rank: time.sleep(2 * TIMEOUT_S) if rank == victim else None)


@pytest.mark.long
@pytest.mark.parametrize("victim", [2])
def test_a_late_rank_is_named_on_its_host_and_on_others(victim):
    env = {**on_hosts.counted_as("abb"), "FSDPC_TIMEOUT": "2"}
    outcomes = run_ranks(late, 3, env=env, faults=True, victim=victim)
    for outcome in outcomes:
        assert not outcome.returned, outcome
        if outcome.rank != victim:
            assert f"rank {victim}" in outcome.error, outcome.error


def elsewhere(rank, world, victim):
    """From step CUT_AT on, the victim skips a block, and comes to the next block later than the
    other ranks."""
    model = wrap_blocks("fsdpc", toy(blocks=4), use_orig_params=True)
    for step in range(CUT_AT + 2):
        if step == CUT_AT and rank == victim:
            model.module.blocks[1].forward = lambda x: x
            model.module.blocks[2].register_forward_pre_hook(lambda *_: time.sleep(0.3))
        loss_of(model, tokens(rank, step)).backward()


@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_at_different_units_of_hosts_that_share_memory(victim):
    env = {**on_hosts.counted_as("abb"), "FSDPC_TIMEOUT": "60"}
    outcomes = run_ranks(elsewhere, 3, env=env, faults=True, victim=victim, timeout=30)
    for outcome in outcomes:
        assert "MismatchError" in outcome.error_types, outcome


@namespaces
def test_the_reason_of_a_rank_that_raises_arrives():
    outcomes = run_ranks(raising, 2, env=on_hosts.environment_for(2, 2), faults=True, victim=1)
    assert "rank 1 gave up: ValueError: no such word" in outcomes[0].error, outcomes[0]


def cut_off(rank, world, seconds):
    """Cut the last host's link before step CUT_AT, for `seconds`, or for good if `seconds` is
    None."""

    def fail(rank):
        if rank == world - 1:
            on_hosts.set_link(rank, "down")
            if seconds:
                threading.Timer(seconds, on_hosts.set_link, [rank, "up"]).start()

    begun = time.monotonic()
    try:
        return train(rank, world, fail)
    finally:
        if seconds is None and rank == world - 1:
            on_hosts.set_link(rank, "up")
        print(f"took {time.monotonic() - begun:.1f} s")


@pytest.mark.long
@namespaces
@pytest.mark.parametrize("world", [2, 3])
def test_a_cut_link_ends_every_rank_at_its_deadline(world):
    """Ranks on both sides of the cut, with and without the group's store, end at the deadline and
    name ranks beyond the cut."""
    env = {**on_hosts.environment_for(2, world), **SHORT}
    outcomes = run_ranks(cut_off, world, env=env, faults=True, seconds=None)
    for outcome in outcomes:
        assert "CommTimeout" in outcome.error_types, outcome
        assert "on host" in outcome.error, outcome.error
    ends = [outcome.finished_at for outcome in outcomes]
    assert max(ends) - min(ends) < 4.0, ends


@pytest.mark.long
@namespaces
def test_training_goes_on_after_a_short_cut():
    env = {**on_hosts.environment_for(2, 2), "FSDPC_TIMEOUT": "30"}
    outcomes = run_ranks(cut_off, 2, env=env, faults=True, seconds=2.0)
    assert outcomes[0].returned and outcomes[0].value == outcomes[1].value, outcomes


def few_steps(rank, world):
    return train(rank, world, steps=3)


@pytest.mark.long
@namespaces
@pytest.mark.parametrize("link", [{"delay": 0.05}, {"loss": 0.05}], ids=["delay", "loss"])
def test_a_slow_or_lossy_link_is_no_error(link):
    """With a delay of 50 ms in each direction, or with 5 % of all frames lost, the values are those
    of a good link."""
    slow = run_ranks(few_steps, 3, env=on_hosts.environment_for(2, 3, **link))
    assert slow == run_ranks(few_steps, 3, env=on_hosts.counted_as("abb"))


def stopped(rank, world):
    """The last host's ranks stop, and continue after the other ranks have given up."""

    def stop(rank):
        if rank >= 1:
            signal_rank(rank, signal.SIGCONT, after=TIMEOUT_S + 4)
            os.kill(os.getpid(), signal.SIGSTOP)

    train(rank, world, stop)


@pytest.mark.long
@namespaces
def test_a_stopped_host_is_named_and_learns_it():
    """Rank 0 is on one host, and ranks 1 and 2 are on the host that stops. Ranks 1 and 2 also raise
    an error when they continue."""
    env = {**on_hosts.environment_for(2, 3), **SHORT}
    first, *others = run_ranks(stopped, 3, env=env, faults=True)
    assert "CommTimeout" in first.error_types, first
    assert any(f"for rank {rank}" in first.error for rank in (1, 2)), first
    assert first.error.count("no answer") == 2, first
    for outcome in others:
        assert not outcome.returned and not outcome.expired, outcome


def asked(rank, world):
    """Measure the link as fsdpc doctor does."""
    from fsdpc.plan import link

    link.BYTES = 4 << 20
    return link.measure()


def test_a_link_is_measured():
    outcomes = run_ranks(asked, 3, env=on_hosts.counted_as("abb"))
    (found, travels), silent = outcomes[0], outcomes[2]
    assert (found.other, found.host) == (1, "counted-as-b") and silent[0] is None
    assert found.rate > 1e6 and 0 < found.latency < 1 and found.gather > 0, found
    assert travels.endswith("sends and receives in the background, shared memory inside each host")


def hybrid(rank, world):
    wrap_blocks("fsdpc", toy(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


@namespaces
def test_hybrid_on_uneven_hosts_is_the_same_error_on_every_rank():
    env = {**on_hosts.environment_for(2, 3), **SHORT}
    for outcome in run_ranks(hybrid, 3, env=env, faults=True):
        assert "ValueError: HYBRID sharding needs the same number of ranks" in outcome.error, (
            outcome
        )

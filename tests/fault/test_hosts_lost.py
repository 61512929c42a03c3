"""Ranks on several hosts: what the others say, and when, if a process or a link is lost."""

from __future__ import annotations

import threading
import time

import on_hosts
import pytest
import torch
from harness import die, run_ranks
from torch.distributed.fsdp import ShardingStrategy
from toys import loss_of, tokens, toy, wrap_blocks

pytestmark = pytest.mark.skipif(bool(on_hosts.missing()), reason=on_hosts.missing())

TIMEOUT_S = 4.0
CUT_AT = 2  # this step
SHORT = {"FSDPC_TIMEOUT": str(TIMEOUT_S)}


def train(rank, world, fail=None, steps=30):
    """Steps; before step CUT_AT, `fail(rank)` is called."""
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


@pytest.mark.parametrize("world, victim", [(2, 0), (2, 1), (3, 1)])
def test_a_killed_rank_is_named_at_once(world, victim):
    """Also one in whose process the group's store is."""
    env = on_hosts.environment_for(2, world)
    outcomes = run_ranks(killed, world, env=env, faults=True, victim=victim)
    begun = outcomes[victim].signalled_at
    for outcome in outcomes:
        if outcome.rank != victim:
            assert "PeerError" in outcome.error_types, outcome
            assert f"rank {victim} (process" in outcome.error, outcome.error
            assert outcome.finished_at - begun < 3.0, outcome.finished_at - begun


def test_the_reason_of_a_rank_that_raises_arrives():
    outcomes = run_ranks(raising, 2, env=on_hosts.environment_for(2, 2), faults=True, victim=1)
    assert "rank 1 gave up: ValueError: no such word" in outcomes[0].error, outcomes[0]


def cut_off(rank, world, seconds):
    """The last host's link is cut before step CUT_AT, for so many seconds or (None) for good."""

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


@pytest.mark.parametrize("world", [2, 3])
def test_a_cut_link_ends_every_rank_at_its_deadline(world):
    """On both sides, with the group's store and without it, with the names of ranks beyond."""
    env = {**on_hosts.environment_for(2, world), **SHORT}
    outcomes = run_ranks(cut_off, world, env=env, faults=True, seconds=None)
    for outcome in outcomes:
        assert "CommTimeout" in outcome.error_types, outcome
        assert "on host" in outcome.error, outcome.error
    ends = [outcome.finished_at for outcome in outcomes]
    assert max(ends) - min(ends) < 4.0, ends


def test_training_goes_on_after_a_short_cut():
    env = {**on_hosts.environment_for(2, 2), "FSDPC_TIMEOUT": "30"}
    outcomes = run_ranks(cut_off, 2, env=env, faults=True, seconds=2.0)
    assert outcomes[0].returned and outcomes[0].value == outcomes[1].value, outcomes


def hybrid(rank, world):
    wrap_blocks("fsdpc", toy(), sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def test_hybrid_on_uneven_hosts_is_the_same_error_on_every_rank():
    env = {**on_hosts.environment_for(2, 3), **SHORT}
    for outcome in run_ranks(hybrid, 3, env=env, faults=True):
        assert "ValueError: HYBRID sharding needs the same number of ranks" in outcome.error, (
            outcome
        )

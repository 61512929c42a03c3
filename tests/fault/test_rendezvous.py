"""Tests of ranks that cannot join their group: the other ranks get the reason at once."""

from __future__ import annotations

import os
import resource
import time

import pytest
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from toys import wrap

from fsdpc._comm import bootstrap as _bootstrap

SOON_S = 30.0  # far below the deadline of 120 s
ENVIRONMENT = {"FSDPC_TIMEOUT": "120"}


def limit_file_sizes():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))


def limit_descriptors():
    """Allow two or three more descriptors. The limit is on descriptor numbers, so this function
    first fills the unused numbers below the highest number in use."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while os.dup(0) < highest:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, 1 << 12))


def set_wrong_timeout():
    os.environ["FSDPC_TIMEOUT"] = "soon"


def set_wrong_kind():
    os.environ["FSDPC_COLLECTIVES"] = "smoke"


CAUSES = {
    "file sizes": (limit_file_sizes, "ulimit -f"),
    "descriptors": (limit_descriptors, "Too many open files"),
    "timeout": (set_wrong_timeout, "'soon'"),
    "kind": (set_wrong_kind, "'smoke'"),
}


def fail_to_join(rank, world, cause, victim):
    if rank == victim:
        CAUSES[cause][0]()
    begun = time.monotonic()
    try:
        wrap("fsdpc", nn.Linear(3, 3))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "", 0.0


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("cause", CAUSES)
def test_a_rank_that_cannot_join(cause, victim):
    outcomes = run_ranks(
        fail_to_join, 2, timeout=40, env=ENVIRONMENT, faults=True, cause=cause, victim=victim
    )
    for outcome in outcomes:
        assert outcome.value, outcome.log
        kind, text, seconds = outcome.value
        assert CAUSES[cause][1] in text, text
        assert seconds < SOON_S
        if outcome.rank != victim:
            assert kind == "PeerError"
            assert f"rank {victim}" in text


def go_over_torch(rank, world):
    """A limit that prevents shared memory on one rank does not prevent torch's collectives."""
    limit_file_sizes()
    os.environ["FSDPC_COLLECTIVES"] = "c10d"
    assert _bootstrap.comm_for_group(dist.group.WORLD).kind == "c10d"


def test_torch_needs_no_segment():
    run_ranks(go_over_torch, 2, timeout=40)

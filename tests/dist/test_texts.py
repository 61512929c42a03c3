"""Tests of short texts that ranks exchange before they have a communicator."""

from __future__ import annotations

import torch.distributed as dist
from harness import ranks

from fsdpc._comm.bootstrap import comm_for_group
from fsdpc._comm.texts import TEXT_BYTES, gather_texts


@ranks(1, 3)
def test_every_rank_gets_all_texts(rank, world):
    mine = [f"rank {rank}", "", "ü" * rank, str(rank) * (TEXT_BYTES + 9)]
    everyone = gather_texts(dist.group.WORLD, mine)
    for other, texts in enumerate(everyone):
        assert texts == [f"rank {other}", "", "ü" * other, str(other) * TEXT_BYTES]


@ranks(2)
def test_a_communicator_unpickles_nothing(rank, world):
    def refuse(*args, **kwargs):
        raise AssertionError("objects of peers are unpickled")

    pg, theirs, dist.all_gather_object = dist.new_group(), dist.all_gather_object, refuse
    try:
        assert comm_for_group(pg).world == world
    finally:
        dist.all_gather_object = theirs

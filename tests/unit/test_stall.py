"""What ranks tell each other of a collective that does not end, without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fsdpc._comm import stall as _stall
from fsdpc._comm.stall import Stall, summary
from fsdpc._comm.table import spans


class Rank:
    """What `_C` would say of a communicator, and what was said to it."""

    def __init__(self, store: Any, rank: int, world: int, timeout: float) -> None:
        self.seconds, self.where, self.others = 0.0, "in none of its collectives yet", ""
        self.stall = Stall(store, rank, world, timeout)

    def look(self) -> None:
        self.stall.poll(self)


@pytest.fixture
def clock(monkeypatch) -> Iterator[SimpleNamespace]:
    fake = SimpleNamespace(now=100.0)
    monkeypatch.setattr(_stall, "time", SimpleNamespace(monotonic=lambda: fake.now))
    said = SimpleNamespace(
        nccl_stall=lambda comm: (comm.seconds, comm.where),
        nccl_note_others=lambda comm, text: setattr(comm, "others", text),
    )
    monkeypatch.setattr(_stall, "_C", said)
    yield fake


def make(world: int, timeout: float = 600) -> list[Rank]:
    store = dist.PrefixStore("t", dist.HashStore())
    return [Rank(store, rank, world, timeout) for rank in range(world)]


def look(ranks: list[Rank], clock: SimpleNamespace, seconds: float = 0.0) -> None:
    clock.now += seconds
    for rank in ranks:
        rank.seconds += seconds if rank.seconds else 0.0
        rank.look()


def test_ranks_that_wait_for_each_other_log_where_all_are(clock, caplog):
    ranks = make(4)
    for rank, what in zip(ranks, ["gather of a", "gather of a", "reduce of b", ""], strict=True):
        if what:
            rank.seconds, rank.where = 1.0, f"in {what}"
    with caplog.at_level(logging.WARNING, logger="fsdpc"):
        for _ in range(80):
            look(ranks, clock, 0.5)
    said = (
        "Where the ranks are: rank 2 in reduce of b; rank 3 in none of its collectives yet; "
        "ranks 0-1 in gather of a"
    )
    assert [rank.others for rank in ranks] == [said, said, said, ""]
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 0 has waited 34 s for other ranks. {said}"
    ]


def test_a_rank_whose_process_stands_still_does_not_answer(clock):
    ranks = make(3, timeout=6)
    ranks[0].seconds, ranks[0].where = 1.0, "in gather of a"
    for _ in range(8):
        look(ranks[:2], clock, 0.5)
    assert "; rank 2 without an answer" in ranks[0].others


def test_the_report_is_withdrawn_when_the_rank_goes_on(clock, caplog):
    ranks = make(2, timeout=20)
    ranks[0].seconds, ranks[0].where = 1.0, "in gather of a"
    for _ in range(26):
        look(ranks, clock, 0.5)
    assert "rank 1 in none of its collectives" in ranks[0].others
    ranks[0].seconds = 0.0
    look(ranks, clock)
    assert ranks[0].others == ""
    # The next stall starts a question of its own, on whichever rank.
    ranks[1].seconds, ranks[1].where = 1.0, "in gather of c"
    ranks[0].where = "in none of its collectives, after gather of a"
    for _ in range(26):
        look(ranks, clock, 0.5)
    assert ranks[1].others.endswith(
        "rank 0 in none of its collectives, after gather of a; rank 1 in gather of c"
    )
    assert ranks[0].others == "" and len(caplog.records) == 2


def test_a_stall_that_ends_in_time_is_not_reported(clock, caplog):
    ranks = make(2, timeout=20)
    ranks[0].seconds = 1.0
    for _ in range(17):
        look(ranks, clock, 0.5)
    ranks[0].seconds = 0.0
    look(ranks, clock, 20)
    assert not caplog.records and ranks[0].others == ""


def test_who_waits_while_the_one_that_collects_is_gone_asks_again_later(clock):
    ranks = make(2, timeout=60)
    for rank in ranks:
        rank.seconds = 1.0
    for _ in range(59):
        look(ranks, clock, 0.5)  # rank 0 has asked
    ranks[1].seconds = 0.0
    for _ in range(40):
        look(ranks[1:], clock, 0.5)
    ranks[1].seconds, ranks[1].where = 1.0, "in reduce of b"
    for _ in range(70):
        look(ranks[1:], clock, 0.5)
    assert ranks[1].others.startswith(
        "Where the ranks are: rank 0 without an answer; rank 1 in red"
    )


def test_many_ranks_are_abbreviated():
    assert spans([0]) == "0" and spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    text = summary([f"in gather of unit {rank}" for rank in range(100)])
    assert len(text) == 600 and text.endswith("...")

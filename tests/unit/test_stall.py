"""Tests of the messages that ranks of several hosts send each other about a wait that does not end.
All ranks are in one process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fsdpc._comm import stall as _stall
from fsdpc._comm.board import Status
from fsdpc._comm.stall import Location, Stall
from fsdpc._comm.table import Row, spans

WORK = Status("runs", line="t.py:3 in data")


class Rank:
    """A rank of a simulated world. It holds the status that real ranks write to the boards of their
    host, and the text that the rank gets about the other ranks.
    """

    def __init__(
        self, world: list[Rank], store: Any, locations: list[Location], patience: float
    ) -> None:
        self.rank, self.seconds, self.does, self.others = len(world), 0.0, WORK, ""
        world.append(self)
        self.world = world
        self.stall = Stall(
            store,
            self.rank,
            locations,
            patience=patience,
            seconds=lambda comm: self.seconds,
            note=lambda comm, text: setattr(self, "others", text),
            read=lambda members: [
                Row(r, 100 + r, Status(world[r].does.state, world[r].does.waits, world[r].seconds))
                if world[r].does.waits
                else Row(r, 100 + r, world[r].does)
                for r in members
            ],
        )

    def waits(self, seconds: float, what: str) -> None:
        self.seconds, self.does = seconds, Status("sleeps", what)


@pytest.fixture
def clock(monkeypatch) -> Iterator[SimpleNamespace]:
    fake = SimpleNamespace(now=100.0)
    sleep = lambda seconds: setattr(fake, "now", fake.now + seconds)  # noqa: E731
    monkeypatch.setattr(_stall, "time", SimpleNamespace(monotonic=lambda: fake.now, sleep=sleep))
    yield fake


def make(hosts: list[str], patience: float = 30.0) -> list[Rank]:
    store = dist.PrefixStore("t", dist.HashStore())
    locations = [Location(f"{host} and more", os.getpid()) for host in hosts]
    world: list[Rank] = []
    for _ in hosts:
        Rank(world, store, locations, patience)
    return world


def poll(ranks: list[Rank], clock: SimpleNamespace, seconds: float = 0.0) -> None:
    clock.now += seconds
    for rank in ranks:
        rank.seconds += seconds if rank.seconds else 0.0
    for rank in ranks:
        rank.stall.poll(rank)


def test_one_table_of_all_hosts_in_every_ranks_log(clock, caplog):
    ranks = make(["a", "a", "b", "b"])
    for rank in ranks[:3]:
        rank.waits(1.0, "gather of unit x")
    with caplog.at_level(logging.WARNING, logger="fsdpc"):
        for _ in range(64):
            poll(ranks, clock, 0.5)
    first, head, *lines = ranks[0].others.strip().splitlines()
    assert (
        first
        == "the cause: rank 3 (pid 103 on b) computes outside of fsdpc's waits, at t.py:3 in data"
    )
    assert head.split() == ["rank", "host", "pid", "state", "for", "where", "line"]
    assert [line.replace("*", "").split()[:2] for line in lines] == [
        ["0", "a"], ["1", "a"], ["2", "b"], ["3", "b"]
    ]  # fmt: skip
    assert lines[3].startswith("* 3") and "t.py:3 in data" in lines[3]
    assert [rank.others == ranks[0].others for rank in ranks] == [True, True, True, False]
    assert [rank.stall.verdict is None for rank in ranks] == [False, False, False, True]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"rank {r}: no progress for 30 s{ranks[0].others}" for r in range(4)]
    for _ in range(60):  # the next report comes after twice the time, not before
        poll(ranks, clock, 0.5)
    assert len(caplog.records) == 8
    for _ in range(50):
        poll(ranks, clock, 0.5)
    assert len(caplog.records) == 8


def test_a_host_that_does_not_answer_is_the_cause(clock):
    ranks = make(["a", "b", "b"], patience=3.0)
    ranks[0].waits(1.0, "gather of unit x")
    for _ in range(12):
        poll(ranks[:1], clock, 0.5)
    text = ranks[0].others
    assert "the cause: ranks 1-2 (pid" in text and " on b) do not answer: the process" in text
    assert text.count("no answer") == 2


def test_any_rank_of_a_host_reads_the_status_of_all(clock):
    ranks = make(["a", "b", "b"], patience=3.0)
    ranks[0].waits(1.0, "gather of unit x")
    ranks[2].waits(1.0, "gather of unit x")
    ranks[1].does = Status("stopped")
    for _ in range(8):
        poll([ranks[0], ranks[2]], clock, 0.5)
    assert ranks[0].others == ranks[2].others
    assert "the cause: rank 1 (pid 101 on b) is stopped" in ranks[0].others


def test_the_table_is_withdrawn_when_the_rank_goes_on(clock, caplog):
    ranks = make(["a", "b"], patience=10.0)
    ranks[0].waits(1.0, "gather of unit x")
    for _ in range(26):
        poll(ranks, clock, 0.5)
    assert "the cause: rank 1" in ranks[0].others
    ranks[0].seconds, ranks[0].does = 0.0, WORK
    poll(ranks, clock)
    assert ranks[0].others == "" and ranks[0].stall.verdict is None
    # The next stall leads to a new query. This time rank 1 makes the query.
    ranks[1].waits(1.0, "gather of unit y")
    for _ in range(26):
        poll(ranks, clock, 0.5)
    assert "the cause: rank 0" in ranks[1].others and ranks[0].others == ""
    assert len(caplog.records) == 4


def test_a_stall_that_ends_in_time_is_not_reported(clock, caplog):
    ranks = make(["a", "b"], patience=10.0)
    ranks[0].waits(1.0, "gather of unit x")
    for _ in range(17):
        poll(ranks, clock, 0.5)
    ranks[0].seconds = 0.0
    poll(ranks, clock, 20)
    assert not caplog.records and ranks[0].others == ""


def test_who_waits_while_the_one_that_collects_is_gone_asks_again_later(clock):
    ranks = make(["a", "b"], patience=30.0)
    for rank in ranks:
        rank.waits(1.0, "gather of unit x")
    for _ in range(58):
        poll(ranks, clock, 0.5)  # after this loop, rank 0 has asked the other rank
    ranks[1].seconds = 0.0
    for _ in range(60):
        poll(ranks[1:], clock, 0.5)
    ranks[1].waits(1.0, "reduce of unit y")
    for _ in range(75):
        poll(ranks[1:], clock, 0.5)
    assert "the cause: rank 0 (pid" in ranks[1].others and "no answer" in ranks[1].others


def test_a_deadline_that_passes_before_any_table(clock):
    """All ranks take the same table. The rank that gives up waits until the other ranks have the
    table.
    """
    ranks = make(["a", "a", "b"], patience=300.0)
    for rank in ranks[:2]:
        rank.waits(5.0, "gather of unit x")

    def wait(took: Any) -> None:
        for _ in range(5):
            poll(ranks[1:], clock, 0.1)
            poll(ranks[:1], clock, 0.1)
        assert took.is_set()

    ranks[0].stall.urge(wait)
    poll(ranks, clock, 0.5)
    assert ranks[0].stall.verdict == ranks[1].stall.verdict
    assert ranks[0].stall.verdict is not None and ranks[0].stall.verdict[0] == [2]
    poll(ranks, clock, 5.0)  # the table stays while the wait goes on
    assert ranks[1].stall.verdict is not None


def test_spans():
    assert spans([0]) == "0" and spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_nobody_is_accused_of_a_wait_that_is_over(clock, caplog):
    """A link was cut, so rank 0's query reached rank 1 late. When the table is made, training
    already goes on again, so no rank is named.
    """
    ranks = make(["a", "b"], patience=3.0)
    ranks[0].waits(1.0, "gather of unit x")
    poll(ranks[:1], clock, 2.5)
    ranks[0].seconds, ranks[0].does = 0.0, WORK
    for _ in range(12):
        poll(ranks, clock, 0.5)
    assert ranks[0].others == ranks[1].others == ""
    assert not caplog.records

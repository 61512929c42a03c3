"""Reports of stalled ranks on several hosts: one table and one cause, through the group's store.

A rank that has waited for ``patience`` seconds starts a query. On each host, the first rank whose
watching thread sees the query reads the status of all ranks of that host, so that the table also
has ranks that are stopped or hold the interpreter's lock. The rank that started the query joins the
rows of all hosts to one table. Every rank logs this table, and adds it to its error if its deadline
passes. While the wait lasts, queries follow after twice, four times, eight times ... ``patience``.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from fsdpc._comm.board import Process, Status
from fsdpc._comm.table import NO_ANSWER, Row, causes, report
from fsdpc._comm.verdict import statuses

LONGEST_ANSWER_S = 5.0  # the longest time to wait for the rows of all hosts
_RECEIVED_S = 2.0  # how long a rank that gives up waits until other ranks have read the table


@dataclass(frozen=True)
class Location:
    """Where a rank runs. ``host`` is equal for ranks that can read each other's status; its first
    word is the host's name for users.
    """

    host: str
    pid: int

    @property
    def host_name(self) -> str:
        return self.host.partition(" ")[0]


class Stall:
    """One rank's side of the queries that the module's docstring describes, for one communicator.

    The watching thread calls ``poll`` periodically with the communicator. ``seconds(comm)`` returns
    how long this rank has waited for other ranks in ``comm``; ``note(comm, text)`` gives ``comm``
    the table for its errors. ``numbers`` is the result of ``numbers_of``, for warnings. Methods
    raise the store's errors.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        locations: Sequence[Location],
        *,
        patience: float,
        seconds: Callable[[Any], float],
        note: Callable[[Any, str], None],
        read: Callable[[dict[int, Process]], list[Row]] = statuses,
        numbers: str = "",
    ) -> None:
        self._store, self._rank, self._locations = store, rank, locations
        self._seconds, self._note, self._read = seconds, note, read
        self._patience = patience
        self._who = f"rank {rank} ({numbers})" if numbers else f"rank {rank}"
        self.answer_s = min(LONGEST_ANSWER_S, patience)
        first: dict[str, int] = {}
        self._host = [first.setdefault(location.host, r) for r, location in enumerate(locations)]
        self.members = {
            r: Process.find(location.pid)
            for r, location in enumerate(locations)
            if self._host[r] == self._host[rank]
        }
        self._question = 0  # the number of the last query that this rank has read
        self._asks_at = 0.0  # the next query starts after this many seconds of waiting
        # When the wait for the hosts' rows ends; None if this rank did not start the query.
        self._collects_until: float | None = None
        self._report_until = 0.0  # the time until which the query's report may come
        self._urgent = False
        self._took, self._took_at = threading.Event(), 0.0
        self.verdict: tuple[list[int], str] | None = None  # (causes, table) of the current wait

    def poll(self, comm: Any) -> None:
        seconds = self._seconds(comm)
        self._answer()
        if self.verdict is not None and seconds < time.monotonic() - self._took_at:
            self._note(comm, "")  # the last table describes an earlier wait
            self.verdict = None
        if seconds < self._patience and not self._urgent:
            self._asks_at = 0.0
        elif seconds >= self._asks_at or (self._urgent and self.verdict is None):
            self._asks_at = 2 * max(seconds, self._patience)
            self._ask()
        if self._collects_until is not None:
            self._collect(seconds)
        if time.monotonic() < self._report_until and self._store.check([self._key("report")]):
            self._take(comm)

    def urge(self, wait: Callable[[threading.Event], Any]) -> None:
        """Let the watching thread start a query at once, as this rank's deadline has passed and
        there is no table yet. ``wait`` blocks until the event is set or for a limited time.
        """
        self._took.clear()
        self._urgent = True
        try:
            wait(self._took)
        finally:
            self._urgent = False

    def _key(self, what: object) -> str:
        return f"stall/{self._question}/{what}"

    def _answer(self) -> None:
        """Read the status of this host's ranks for a new query, unless another rank does that."""
        before = self._question
        while self._store.check([f"stall/{self._question + 1}/asked"]):
            self._question += 1
        if self._question == before:
            return
        self._report_until = time.monotonic() + 4 * LONGEST_ANSWER_S
        mine, host = str(self._rank), self._host[self._rank]
        claim = self._store.compare_set(self._key(f"claims/{host}"), "", mine)
        if claim.decode(errors="replace") == mine:
            rows = [astuple(row) for row in self._read(self.members)]
            self._store.set(self._key(f"rows/{host}"), json.dumps(rows))

    def _ask(self) -> None:
        if time.monotonic() < self._report_until:
            return  # a query is under way, and its report may still come
        mine = str(self._rank)
        first = self._store.compare_set(f"stall/{self._question + 1}/asked", "", mine)
        self._answer()
        if first.decode(errors="replace") == mine:
            self._collects_until = time.monotonic() + self.answer_s

    def _collect(self, seconds: float) -> None:
        """Make the table, once all hosts have answered or the time for answers is over."""
        keys = {host: self._key(f"rows/{host}") for host in sorted(set(self._host))}
        here = {host for host, key in keys.items() if self._store.check([key])}
        late = time.monotonic() > (self._collects_until or 0.0)
        if len(here) < len(keys) and not late:
            return
        self._collects_until = None
        rows = [Row(r, p.pid, Status(NO_ANSWER), "") for r, p in enumerate(self._locations)]
        for host in here:
            for rank, pid, status, _ in json.loads(self._store.get(keys[host])):
                rows[rank] = Row(rank, pid, Status(*status))
        several = len(keys) > 1
        rows = [
            Row(row.rank, row.pid, row.status, location.host_name if several else "")
            for row, location in zip(rows, self._locations, strict=True)
        ]
        guilty = causes(rows)
        waiting = [row.rank for row in rows if row.state == "waits" and row.rank != self._rank]
        message = {
            "causes": guilty,
            "seconds": seconds,
            "text": report(rows, guilty),
            "waiting": len(waiting),
            "gives_up": self._urgent,
        }
        self._store.set(self._key("report"), json.dumps(message))

    def _take(self, comm: Any) -> None:
        self._report_until = 0.0
        message = json.loads(self._store.get(self._key("report")))
        over = max(message["seconds"], self._seconds(comm)) < self._patience
        if over and not message["gives_up"]:
            return  # a link or a rank has recovered, and training goes on
        logging.getLogger("fsdpc").warning(
            "%s: no progress for %.0f s%s", self._who, message["seconds"], message["text"]
        )
        if self._seconds(comm) > 0.0:
            self.verdict, self._took_at = (message["causes"], message["text"]), time.monotonic()
            self._note(comm, message["text"])
        received = self._store.add(self._key("received"), 1)
        # This process may host the store, so other ranks must read the table before it ends.
        if self._urgent:
            until = time.monotonic() + _RECEIVED_S
            while received <= message["waiting"] and time.monotonic() < until:
                time.sleep(0.02)
                received = self._store.add(self._key("received"), 0)
        self._took.set()

"""The position of every rank when a collective of GPUs stalls.

A rank knows only its own collective. After half of the deadline, 30 seconds at most, a stalled rank
asks the others through the store; each rank's watching thread answers, whatever its program does.
The rank that asked first collects the answers, logs them once as a warning and sends them to all
ranks, for the text of a deadline that passes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from fsdpc import _C
from fsdpc._comm.table import spans

LONGEST_PATIENCE_S, LONGEST_ANSWER_S = 30.0, 3.0
_SAID_CHARACTERS = 600


class Stall:
    """A rank's part in such questions, under keys of the communicator's own.

    The watching thread calls ``poll`` periodically with the communicator. Errors are the store's.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        timeout: float,
        *,
        patience: float | None = None,
        look: Callable[[Any], tuple[float, str]] | None = None,
        note: Callable[[Any, str], None] | None = None,
    ) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._look, self._note = look or _C.nccl_stall, note or _C.nccl_note_others
        self._patience = min(LONGEST_PATIENCE_S, timeout / 2) if patience is None else patience
        self._answer_time = min(LONGEST_ANSWER_S, timeout / 6)
        self._question = 0  # the last one that this rank has answered
        self._stalled = False
        self._collects_at: float | None = None  # set if this rank asked
        self._report_until = 0.0  # a report is expected until then; the collecting rank may fail

    def poll(self, comm: Any) -> None:
        seconds, where = self._look(comm)
        self._answer(where)
        if seconds < self._patience:
            if self._stalled:
                self._note(comm, "")
            self._stalled = False
        elif not self._stalled:
            self._stalled = True
            self._ask(where)
        if self._collects_at is not None and time.monotonic() > self._collects_at:
            self._collect(seconds)
        if time.monotonic() < self._report_until and self._store.check([self._key("report")]):
            self._report_until = 0.0
            if self._stalled:
                report = self._store.get(self._key("report")).decode(errors="replace")
                self._note(comm, report)

    def _key(self, what: object) -> str:
        return f"stall/{self._question}/{what}"

    def _answer(self, where: str) -> None:
        """Answers the questions of other ranks."""
        while self._store.check([f"stall/{self._question + 1}/asked"]):
            self._question += 1
            self._store.set(self._key(self._rank), where)
            self._report_until = time.monotonic() + 4 * self._answer_time

    def _ask(self, where: str) -> None:
        if time.monotonic() < self._report_until:
            return  # another rank has just asked
        mine = str(self._rank)
        first = self._store.compare_set(f"stall/{self._question + 1}/asked", "", mine)
        self._answer(where)
        if first.decode(errors="replace") == mine:
            self._collects_at = time.monotonic() + self._answer_time

    def _collect(self, seconds: float) -> None:
        self._collects_at = None
        report = summary([self._answer_of(rank) for rank in range(self._world)])
        self._store.set(self._key("report"), report)
        if self._stalled:
            logging.getLogger("fsdpc").warning(
                "rank %d has waited %.0f s for other ranks. %s", self._rank, seconds, report
            )

    def _answer_of(self, rank: int) -> str | None:
        key = self._key(rank)
        if not self._store.check([key]):
            return None
        return self._store.get(key).decode(errors="replace")


def summary(answers: list[str | None]) -> str:
    """One sentence: which ranks are where, those in one place together. ``None``: no answer."""
    places: dict[str, list[int]] = {}
    for rank, where in enumerate(answers):
        places.setdefault(where or "without an answer", []).append(rank)
    # What few ranks do is what one looks for.
    parts = sorted(places.items(), key=lambda item: len(item[1]))
    text = "Where the ranks are: " + "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)} {where}" for where, ranks in parts
    )
    return text if len(text) <= _SAID_CHARACTERS else text[: _SAID_CHARACTERS - 3] + "..."

"""The table of all ranks of a stalled group, and the choice of the ranks that are the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpc._comm.board import Status

TABLE_BYTES = 2800  # the length limit of a table: the text of an error has room for no more
# In a group of up to 8 ranks, each rank has a line of the table. In a larger group, ranks that do
# the same thing share a line.
_EACH = 8
NO_ANSWER = "no answer"  # the state of a rank whose host has not reported what its ranks do
_WHAT_TO_DO = {
    "stopped": "is stopped (SIGSTOP or a debugger): kill -CONT {pid}",
    "dead": "has ended",
    NO_ANSWER: "does not answer: the process or its host has ended, stands still or is cut off",
    "in the kernel": "is blocked in the kernel, mostly a disk or a network file system",
    "runs": "computes outside of fsdpc's waits",
    "sleeps": "sleeps or waits outside of fsdpc",
}


@dataclass(frozen=True)
class Row:
    rank: int
    pid: int
    status: Status
    host: str = ""  # empty if all ranks are on one host

    @property
    def state(self) -> str:
        return self.status.state if self.status.gone or not self.status.waits else "waits"

    @property
    def where(self) -> str:
        if self.status.waits:
            return self.status.waits
        return f"after {self.status.last_operation}" if self.status.last_operation else ""


def causes(rows: Sequence[Row], late: Sequence[int] = ()) -> list[int]:
    """Return the ranks for which the others wait.

    These are the dead ranks; if there are none, the stopped ranks; else the ranks whose host has
    not answered; else the ranks that do not wait in fsdpc. If all ranks wait, the result is the
    ranks at the place where the fewest wait. If all ranks wait at one place, the result is
    ``late``: the ranks for which the caller's wait has timed out.
    """
    for kind in (["dead"], ["stopped"], [NO_ANSWER], ["runs", "sleeps", "in the kernel"]):
        found = [row.rank for row in rows if row.state in kind]
        if found:
            return found
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(row.where, []).append(row.rank)
    return min(groups.values(), key=len) if len(groups) > 1 else list(late)


def report(rows: Sequence[Row], guilty: Sequence[int]) -> str:
    """Return a sentence that names the cause, and the table. The text starts with a line break."""
    return _cut(f"\n{_sentence(rows, guilty)}{table(rows, guilty)}")


def table(rows: Sequence[Row], guilty: Sequence[int] = ()) -> str:
    """Return a table of what each rank does, after a line break. ``*`` marks the guilty ranks."""
    return _cut("".join(f"\n{line}".rstrip() for line in _lines(rows, guilty)))


def _cut(text: str) -> str:
    return text if len(text) <= TABLE_BYTES else text[: TABLE_BYTES - 4] + "\n..."


def _sentence(rows: Sequence[Row], guilty: Sequence[int]) -> str:
    named = [row for row in rows if row.rank in guilty]
    if not named:
        return "all ranks of this group wait in one place: the cause is outside of the group"
    first = named[0]
    who = f"rank {first.rank}" if len(named) == 1 else f"ranks {spans([r.rank for r in named])}"
    verb = _WHAT_TO_DO.get(first.state, "waits elsewhere than the others").format(pid=first.pid)
    if len(named) > 1:
        verb = _plural(verb)
    at = f", at {first.status.line}" if first.status.line else ""
    on = f" on {first.host}" if first.host else ""
    return f"the cause: {who} (pid {first.pid}{on}) {verb}{at}"


def _plural(verb: str) -> str:
    first, _, rest = verb.partition(" ")
    first = {"is": "are", "has": "have", "does": "do"}.get(first, first.removesuffix("s"))
    return f"{first} {rest.replace('or waits', 'or wait', 1)}"


def _lines(rows: Sequence[Row], guilty: Sequence[int]) -> list[str]:
    groups: dict[object, list[Row]] = {}
    for row in rows:
        what = (row.state, row.where, row.status.line, row.rank in guilty)
        groups.setdefault(row.rank if len(rows) <= _EACH else what, []).append(row)
    cells = [
        ("ranks" if len(rows) > _EACH else "rank", "host", "pid", "state", "for", "where", "line")
    ]
    for members in groups.values():
        row = members[0]
        since = max(member.status.since for member in members)
        cells.append(
            (
                ("* " if row.rank in guilty else "  ") + spans([m.rank for m in members]),
                row.host + (" ..." if len({m.host for m in members}) > 1 else ""),
                str(row.pid) + (" ..." if len(members) > 1 else ""),
                row.state,
                f"{since:.1f} s" if since else "",
                row.where,
                row.status.line,
            )
        )
    if not any(row.host for row in rows):
        cells = [(rank, *rest) for rank, _, *rest in cells]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]


def spans(ranks: Sequence[int]) -> str:
    """Return increasing numbers as a text such as ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

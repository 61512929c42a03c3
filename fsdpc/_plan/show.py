"""Tables on a terminal: by rich where it is installed, else in plain text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fsdpc._plan.advise import Change, Suggestion
from fsdpc._plan.cards import counted, size
from fsdpc._plan.cost import Cost
from fsdpc._plan.ledger import Plan

MISSING = "fsdpc: tables are plain text without rich: pip install 'fsdpc[tools]'"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


class Printer:
    """Prints titled tables and lines. ``plain``: never use rich."""

    def __init__(self, plain: bool = False) -> None:
        self.console: Any = None
        if not plain and sys.stdout.isatty():
            try:
                from rich.console import Console
            except ImportError:
                print(MISSING, file=sys.stderr)
            else:
                self.console = Console()

    def line(self, text: str) -> None:
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(text)

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Cells are texts; columns of numbers are aligned to the right."""
        if self.console is not None:
            self._rich(title, head, rows)
        else:
            print(plain_table(title, head, rows))

    def _rich(self, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title), title_justify="left", show_edge=False)
        for i, name in enumerate(head):
            table.add_column(
                name, justify="right" if _is_number(rows, i) else "left", no_wrap=i == 0
            )
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print(table)


def _is_number(rows: Sequence[Sequence[str]], column: int) -> bool:
    return all(not row[column] or row[column].lstrip("-+")[:1].isdigit() for row in rows)


def plain_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [
        max(len(head[i]), *(len(r[i]) for r in rows)) if rows else len(head[i])
        for i in range(len(head))
    ]
    right = [_is_number(rows, i) for i in range(len(head))]

    def one(cells: Sequence[str]) -> str:
        return "  ".join(
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True)
        ).rstrip()

    return "\n".join([title, one(head), one(["-" * w for w in widths]), *map(one, rows), ""])


def show_plan(out: Printer, plan: Plan, usable: int | None, cost: Cost | None) -> None:
    """The ledger, the timeline's summits and the verdict."""
    setup, peak = plan.setup, plan.peak
    out.line(
        f"{plan.model.name}: {plan.model.numel:,} parameters in "
        f"{counted(len(plan.model.units), 'unit')}, {setup.strategy} over {setup.shards} of "
        f"{counted(setup.world, 'rank')}; storage {setup.storage}, compute "
        f"{setup.compute or 'as stored'}, optimizer {setup.optimizer}"
        + (f", {plan.model.tokens:,} tokens per micro-batch" if plan.model.tokens else "")
    )
    out.line("")
    rows = []
    for row in plan.rows:
        at_peak = peak.roles.get(row.role, 0) if row.where == "device" else 0
        rows.append(
            (
                row.role,
                size(row.bytes),
                size(at_peak) if at_peak else "",
                " ".join(row.lifetime) if len(row.lifetime) < 4 else "always",
                "exact" if row.exact else "",
                row.why + ("" if row.where == "device" else f" [{row.where}]"),
            )
        )
    out.table("Memory of each rank", ("what", "bytes", "at peak", "lives", "", "because"), rows)
    tops = {}
    for point in plan.timeline:
        if point.phase not in tops or point.bytes > tops[point.phase].bytes:
            tops[point.phase] = point
    out.table(
        "Highest points",
        ("phase", "unit", "bytes"),
        [(p.phase, p.unit or "-", size(p.bytes)) for p in tops.values()],
    )
    where = f" in {peak.unit}" if peak.unit else ""
    out.line(
        f"peak {size(peak.bytes)} during {peak.phase}{where}, at most {size(plan.upper)} "
        "with the allocator's slack"
        + (f"; host memory {size(plan.host_bytes)}" if plan.host_bytes else "")
    )
    if cost is not None and plan.model.flops:
        packing = f"packing {seconds(cost.packing)}, " if cost.packing else ""
        out.line(
            f"step {seconds(cost.step)}: compute {seconds(cost.compute)}, {packing}wire "
            f"{seconds(cost.wire)} ({size(cost.sent_bytes)} sent per rank), update "
            f"{seconds(cost.update)}; {cost.tokens_per_second(plan):,.0f} tokens/s per GPU"
        )
    if usable is not None:
        out.line(verdict(plan, usable))
    for note in plan.notes:
        out.line(f"note: {note}")


def verdict(plan: Plan, usable: int) -> str:
    if plan.upper <= usable:
        return f"fits: {size(usable - plan.upper)} of {size(usable)} stay free"
    if plan.peak.bytes <= usable:
        return (
            f"may not fit: the peak of {size(plan.peak.bytes)} is below {size(usable)}, but "
            f"the upper bound {size(plan.upper)} is not"
        )
    return f"does not fit: {size(plan.peak.bytes - usable)} over {size(usable)}"


def show_changes(out: Printer, changes: Sequence[Change], timed: bool = True) -> None:
    """``timed`` False: step times are not known and left out."""
    out.table(
        "What each switch would change",
        ("switch", "peak", "step"),
        [
            (
                c.label,
                ("+" if c.bytes > 0 else "-") + size(abs(c.bytes)),
                f"{c.share:+.1%}" if timed else "-",
            )
            for c in changes
        ],
    )


def show_units(out: Printer, plan: Plan) -> None:
    """Formula and bytes of each distinct unit."""
    rows, seen = [], {}
    for unit, size_of in zip(plan.model.units, plan.engine.by_unit, strict=True):
        key = (unit.params, unit.depth)
        if key in seen:
            seen[key][1] += 1
            continue
        seen[key] = [len(rows), 1]
        rows.append(
            [
                unit.name or "(root)",
                "1",
                f"{unit.numel:,}",
                size(size_of["full_bytes"]),
                size(size_of["master_bytes"]),
                size(size_of["reduce_bytes"]),
                size(size_of["padding_bytes"]),
            ]
        )
    for at, count in seen.values():
        rows[at][1] = str(count)
    out.table(
        "Units",
        ("unit", "how many", "elements", "gathered", "shard", "packed gradients", "padding"),
        rows,
    )


def show_suggestions(out: Printer, found: Sequence[Suggestion]) -> None:
    out.table(
        "Plans that fit, fastest first",
        ("plan", "at most", "step", "tokens/s per GPU"),
        [
            (s.label, size(s.plan.upper), seconds(s.cost.step), f"{s.tokens_per_second:,.0f}")
            for s in found
        ],
    )

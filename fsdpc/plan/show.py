"""Tables and sentences of plans, in plain text: one line for each row, at most 100 columns."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from fsdpc.plan.advise import Change, Suggestion
from fsdpc.plan.cards import counted, size
from fsdpc.plan.cost import Cost
from fsdpc.plan.ledger import Plan
from fsdpc.plan.rows import ALWAYS, Line, Row, tops

WIDTH = 100


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def line(text: str, indent: str = "  ") -> None:
    """Print a sentence, wrapped at the terminal's width; lines after the first get ``indent``."""
    columns = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    print(textwrap.fill(text, max(columns, 40), subsequent_indent=indent))


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Cells are texts; columns of numbers are aligned to the right."""
    print(plain_table(title, head, rows))


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


def beside(title: str, lines: Sequence[Line], verdicts: bool = True) -> str:
    """Return a table of planned bytes beside the bytes of a run. If ``verdicts`` is false, the
    table has no verdicts and no notes.
    """
    rows = []
    for one in lines:
        planned = "-" if one.planned is None else size(one.planned)
        more = (one.verdict, one.note) if verdicts else ()
        rows.append((one.role, planned, size(one.actual), *more))
    head = ("what", "planned", "actual", *(("", "") if verdicts else ()))
    return plain_table(title, head, rows)


def show_plan(plan: Plan, usable: int | None, cost: Cost | None) -> None:
    """Print the ledger, the timeline's highest points and the verdict."""
    setup, peak = plan.setup, plan.peak
    line(
        f"{plan.model.name}: {plan.model.values:,} parameters in "
        f"{counted(len(plan.model.units), 'unit')}, {setup.strategy} over {setup.shards} of "
        f"{counted(setup.world, 'rank')}; storage {setup.storage}, compute "
        f"{setup.compute or 'as stored'}, optimizer {setup.optimizer}"
        + (f", {plan.model.tokens:,} tokens per micro-batch" if plan.model.tokens else "")
    )
    line("")
    table(
        "Memory of each rank",
        list(_COLUMNS),
        [[cell(row, peak.of(row.role)) for cell in _COLUMNS.values()] for row in plan.rows],
    )
    table(
        "Highest points",
        ("phase", "unit", "bytes"),
        [(p.phase, p.unit or "-", size(p.bytes)) for p in tops(plan.timeline)],
    )
    where = f" in {peak.unit}" if peak.unit else ""
    line(
        f"peak {size(peak.bytes)} during {peak.phase}{where}, at most {size(plan.upper)} "
        "with the allocator's slack"
        + (f"; host memory {size(plan.host_bytes)}" if plan.host_bytes else "")
    )
    if cost is not None and plan.model.flops:
        packing = f"packing {seconds(cost.packing)}, " if cost.packing else ""
        least, most = map(seconds, cost.between)
        line(
            f"step {seconds(cost.step)} (from {least} to {most}): compute {seconds(cost.compute)} "
            f"at {cost.efficiency:.0%} of peak FLOPs, {packing}wire "
            f"{seconds(cost.wire)} ({size(cost.sent_bytes)} sent per rank), update "
            f"{seconds(cost.update)}; {cost.tokens_per_second(plan):,.0f} tokens/s per GPU"
        )
    if usable is not None:
        line(verdict(plan, usable))
    for note in plan.notes:
        line(f"note: {note}")


# The columns of a plan's table, each made from a row and the row's bytes at the peak.
_COLUMNS: dict[str, Callable[[Row, int], str]] = {
    "what": lambda row, _: row.role + (f" [{row.where}]" if row.where != "device" else ""),
    "bytes": lambda row, _: size(row.bytes),
    "at peak": lambda row, top: size(top) if top and row.where == "device" else "",
    "lives": lambda row, _: " ".join(row.lifetime) if row.lifetime != ALWAYS else "always",
    "source": lambda row, _: "exact" if row.exact else "",
}


def show_reasons(plan: Plan) -> None:
    """Print why each row has its bytes."""
    line("Because")
    for row in plan.rows:
        line(f"{row.role}: {row.why}", indent="    ")
    line("")


def verdict(plan: Plan, usable: int) -> str:
    if plan.fits(usable) is None:
        return (
            f"cannot say whether it fits: {size(usable - plan.upper)} of {size(usable)} are left "
            "for activations, which are not in the plan"
        )
    if plan.upper <= usable:
        fits = "fits if these sizes are the model's" if plan.model.guessed else "fits"
        return f"{fits}: {size(usable - plan.upper)} of {size(usable)} stay free"
    if plan.peak.bytes <= usable:
        return (
            f"may not fit: the peak of {size(plan.peak.bytes)} is below {size(usable)}, but "
            f"the upper bound {size(plan.upper)} is not"
        )
    return f"does not fit: {size(plan.peak.bytes - usable)} over {size(usable)}"


def show_changes(changes: Sequence[Change], timed: bool = True) -> None:
    """Print a row per switch. ``timed``: whether step times are known; otherwise omit them."""
    table(
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


def show_units(plan: Plan) -> None:
    """Print the bytes of each distinct unit. The column ``packed`` has the size of the buffer into
    which gradients are packed before they are reduced.
    """
    alike: dict[Any, list[Any]] = {}
    for unit, sizes in zip(plan.model.units, plan.engine.by_unit, strict=True):
        alike.setdefault((unit.params, unit.depth), []).append((unit, sizes))
    rows = []
    for members in alike.values():
        unit, sizes = members[0]
        bytes_ = [size(sizes[f"{k}_bytes"]) for k in ("full", "master", "reduce", "padding")]
        rows.append((unit.name or "(root)", str(len(members)), f"{unit.numel:,}", *bytes_))
    head = ("unit", "units", "elements", "gathered", "shard", "packed", "padding")
    table("Units", head, rows)


def show_suggestions(found: Sequence[Suggestion]) -> None:
    """Print plans. The title names the means that all plans share. Long labels are wrapped."""
    common = [each for each in found[0].means if all(each in s.means for s in found)]
    rows = []
    for s in found:
        numbers = (size(s.plan.upper), seconds(s.cost.step), f"{s.tokens_per_second:,.0f}")
        label = ", ".join(s.without(common))
        first, *more = textwrap.wrap(label, WIDTH - 36)
        rows += [(*numbers, first), *(("", "", "", text) for text in more)]
    line("Plans that fit, fastest first" + (f"; all with {', '.join(common)}" if common else ""))
    table("", ("at most", "step", "tokens/s", "plan"), rows)

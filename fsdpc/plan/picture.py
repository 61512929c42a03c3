"""Pictures of timelines, with a layer or a part of a bar for each role. They need matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from fsdpc.plan.cards import GIB, size
from fsdpc.plan.ledger import Plan
from fsdpc.plan.rows import ROLES, Key, Point, total

MOST_BARS = 8
# The box behind a text, which hides a dashed line that crosses the text.
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}


def draw(path: str, plan: Plan, others: Sequence[tuple[str, Plan]], usable: int | None) -> None:
    """Write a PNG, SVG or PDF: bars of ``others`` at their peaks, and below them the timeline of
    ``plan``. ``ImportError``: no matplotlib. ``ValueError``: matplotlib does not know the format.
    """
    plt = _pyplot()
    figure, (bars, line) = plt.subplots(
        2, 1, figsize=(11, 8.5), layout="constrained", height_ratios=(1, 1.2)
    )
    peaks = {name: made.peak.roles for name, made in others}
    used = _bars(bars, peaks, (GIB, "GiB"), usable or 0)
    title = "At the peak, by strategy" + (" (dashed: what the card has)" if usable else "")
    bars.set_title(title, fontsize=10, loc="left")
    used |= _layers(line, plan.timeline, (GIB, "GiB"), usable or 0)
    _sections(line, [point.phase for point in plan.timeline])
    title = "Through a step: rest, forward, backward, update"
    line.set_title(title, fontsize=10, loc="left")
    if usable:
        bars.axvline(usable / GIB, color="black", linestyle="--", linewidth=1)
        line.axhline(usable / GIB, color="black", linestyle="--", linewidth=1)
    figure.suptitle(
        f"{plan.model.name}, {plan.setup.world} ranks, {plan.model.tokens:,} tokens "
        "per rank: memory of one rank"
    )
    _write(plt, figure, path, used)


def draw_profile(
    path: str,
    title: str,
    points: Sequence[Point],
    steps: Sequence[int],
    resident: Sequence[int],
    at_peak: dict[Key, int],
) -> None:
    """Write a PNG, SVG or PDF of a run: the timeline, with the process's resident bytes in its
    title, and below it the units with the most bytes at the peak. ``steps``: the number of the step
    of each point. ``at_peak``: bytes by role and unit.
    """
    plt = _pyplot()
    figure, (line, bars) = plt.subplots(
        2, 1, figsize=(11, 8), layout="constrained", height_ratios=(1.7, 1)
    )
    used = _layers(line, points, _scale(max(p.bytes for p in points)))
    _sections(line, [f"step {step}" for step in steps])
    least, most = size(min(resident)), size(max(resident))
    line.set_title(
        f"{title}: what was live, event by event (the process, resident: {least} to {most})",
        fontsize=10,
        loc="left",
    )
    units = total(at_peak, 1)
    names = sorted(units, key=lambda unit: -units[unit])[:MOST_BARS]
    each = {n: {role: b for (role, unit), b in at_peak.items() if unit == n} for n in names}
    bars.set_title("At the peak: tensors of each unit, largest first", fontsize=10, loc="left")
    if each:
        used |= _bars(bars, each, _scale(units[names[0]]))
    else:
        bars.text(0.01, 0.5, "tensors were not counted", transform=bars.transAxes)
        bars.set_axis_off()
    _write(plt, figure, path, used)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'fsdpc[tools]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _write(plt: Any, figure: Any, path: str, used: set[str]) -> None:
    shown = _in_order(used)[::-1]
    handles = [plt.Rectangle((0, 0), 1, 1, color=ROLES[r].colour) for r in shown]
    figure.legend(handles, shown, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _in_order(roles: Iterable[str]) -> list[str]:
    return sorted(roles, key=list(ROLES).index)


def _scale(count: float) -> tuple[float, str]:
    units = ((GIB, "GiB"), (1 << 20, "MiB"))
    return next((u for u in units if count >= u[0]), (1 << 10, "KiB"))


def _layers(
    axes: Any, points: Sequence[Point], unit: tuple[float, str], room: float = 0
) -> set[str]:
    """Draw a layer for each role and a mark at the highest point; return the roles. The axis
    reaches at least ``room`` bytes.
    """
    scale, name = unit
    roles = [p.roles for p in points]
    used = _in_order({role for each in roles for role, count in each.items() if count})
    layers = [[each.get(role, 0) / scale for each in roles] for role in used]
    colours = [ROLES[role].colour for role in used]
    axes.stackplot(range(len(points)), layers, colors=colours, step="mid", linewidth=0)
    top = max(range(len(points)), key=lambda i: points[i].bytes)
    peak, height = points[top], points[top].bytes / scale
    axes.plot([top], [height], marker="v", color="black", markersize=6)
    axes.annotate(
        f"peak {height:,.1f} {name} in {peak.phase} of {peak.unit or 'all units'}",
        (top, height),
        xytext=(0, 7),
        textcoords="offset points",
        ha="right" if top > len(points) / 2 else "left",
        fontsize=9,
    )
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_ylim(0, max(height, room / scale) * 1.15)
    axes.set_xticks([])
    axes.set_ylabel(name)
    axes.spines[["top", "right"]].set_visible(False)
    return set(used)


def _sections(axes: Any, labels: Sequence[str]) -> None:
    """Draw a dotted line at the end of each label's points, and as many labels as have room."""
    every = max(1, len(set(labels)) // 12)
    begin = 0
    for at, (label, same) in enumerate(itertools.groupby(labels)):
        count = len(list(same))
        axes.axvline(begin + count - 0.5, color="grey", linewidth=0.8, linestyle=":")
        if at % every == 0 and count > len(labels) / 40:
            axes.text(
                begin + (count - 1) / 2,
                -0.02,
                label,
                ha="center",
                va="top",
                fontsize=9,
                transform=axes.get_xaxis_transform(),
            )
        begin += count


def _bars(
    axes: Any, bars: dict[str, dict[str, int]], unit: tuple[float, str], room: float = 0
) -> set[str]:
    """Draw a stacked bar of roles for each name; return the roles. ``room``: as in ``_layers``."""
    scale, name = unit
    used = _in_order({role for roles in bars.values() for role in roles})
    left = [0.0] * len(bars)
    for role in used:
        widths = [roles.get(role, 0) / scale for roles in bars.values()]
        axes.barh(list(bars), widths, left=left, color=ROLES[role].colour, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    most = max(left)
    for i, whole in enumerate(left):
        axes.text(whole + most * 0.01, i, f"{whole:,.1f}", va="center", fontsize=9, bbox=_PAPER)
    axes.set_xlim(0, max(most * 1.1, room / scale * 1.05))
    axes.set_xlabel(name)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return set(used)

"""Pictures of plans: stacked bars per strategy, and the timeline of a step. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpc._plan.cards import GIB
from fsdpc._plan.ledger import Plan, Point

_MIB = 1 << 20
# Roles from the bottom up, with colours that stay apart in print and for the colour-blind.
ROLES = {
    "shards": "#1b4f72",
    "gradient shards": "#2e86c1",
    "optimizer states": "#85c1e9",
    "buffers of states": "#5dade2",
    "gather slots": "#117a65",
    "reduce slots": "#45b39d",
    "no_sync gradients": "#a2d9ce",
    "update's temporaries": "#d4e6f1",
    "buffers": "#626567",
    "inputs": "#979a9a",
    "activations": "#b9770e",
    "recomputed": "#f0b27a",
    "unit gradients": "#922b21",
    "logits and loss": "#d98880",
    "workspace": "#bfc9ca",
    "device context": "#7b7d7d",
    "communicators": "#b3b6b7",
    "allocator": "#e5e7e9",
    "spare memory": "#6c3483",
    "temporaries": "#f7dc6f",
    "other": "#d7bde2",
}

_PAPER = {
    "facecolor": "white",
    "edgecolor": "none",
    "pad": 1.0,
}  # where the card's line crosses text


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'fsdpc[tools]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw(path: str, plan: Plan, others: Sequence[tuple[str, Plan]], usable: int | None) -> None:
    """Writes a PNG, SVG or PDF: bars of ``others`` at their peaks, and below the timeline of
    ``plan``. ``ImportError``: no matplotlib. ``ValueError``: a format that it does not write.
    """
    plt = _pyplot()
    figure, (bars, line) = plt.subplots(
        2, 1, figsize=(11, 8.5), layout="constrained", height_ratios=(1, 1.2)
    )
    _bars(bars, others, usable)
    _timeline(line, plan, usable)
    used = [
        r
        for r in ROLES
        if any(r in p.peak.roles for _, p in others)
        or any(r in point.roles for point in plan.timeline)
    ]
    handles = [plt.Rectangle((0, 0), 1, 1, color=ROLES[r]) for r in used]
    figure.legend(handles[::-1], used[::-1], loc="outside right center", frameon=False)
    figure.suptitle(
        f"{plan.model.name}, {plan.setup.world} ranks, {plan.model.tokens:,} tokens "
        "per rank: memory of one rank, GiB"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_profile(
    path: str,
    title: str,
    points: Sequence[Point],
    steps: Sequence[int],
    resident: Sequence[int],
    at_peak: dict[tuple[str, str], int],
) -> None:
    """Writes a PNG, SVG or PDF of a run: the timeline with the process's resident bytes, and below
    the units with most bytes at the peak. ``steps``: of each point; ``at_peak``: by (role, unit).
    """
    plt = _pyplot()
    figure, (line, bars) = plt.subplots(
        2, 1, figsize=(11, 8), layout="constrained", height_ratios=(1.7, 1)
    )
    scale, name = _scale(max(p.bytes for p in points))
    used = [r for r in ROLES if any(p.roles.get(r) for p in points)]
    layers = [[p.roles.get(r, 0) / scale for p in points] for r in used]
    x = range(len(points))
    line.stackplot(x, layers, colors=[ROLES[r] for r in used], step="mid", linewidth=0)
    top = max(x, key=lambda i: points[i].bytes)
    height = points[top].bytes / scale
    line.plot([top], [height], marker="v", color="black", markersize=6)
    line.annotate(
        f"peak {height:,.1f} {name} in {points[top].phase} of {points[top].unit or 'all units'}",
        (top, height),
        xytext=(0, 7),
        textcoords="offset points",
        ha="right" if top > len(points) / 2 else "left",
        fontsize=9,
    )
    _mark_steps(line, steps)
    line.set_xlim(-0.5, len(points) - 0.5)
    line.set_ylim(0, height * 1.15)
    line.set_ylabel(name)
    line.set_title(
        f"{title}: what was live, event by event (the process, resident: "
        f"{min(resident) / _MIB:,.0f} to {max(resident) / _MIB:,.0f} MiB)",
        fontsize=10,
        loc="left",
    )
    line.spines[["top", "right"]].set_visible(False)
    more = _units_at_peak(bars, at_peak)
    shown = [r for r in ROLES if r in used or r in more]
    handles = [plt.Rectangle((0, 0), 1, 1, color=ROLES[r]) for r in shown]
    figure.legend(handles[::-1], shown[::-1], loc="outside right center", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _scale(count: float) -> tuple[float, str]:
    return (GIB, "GiB") if count >= GIB else (_MIB, "MiB") if count >= _MIB else (1024, "KiB")


def _mark_steps(axes: Any, steps: Sequence[int]) -> None:
    """A dotted line where a step ends, and as many numbers of steps as there is room for."""
    numbers = list(dict.fromkeys(steps))
    every = max(1, len(numbers) // 12)
    for number in numbers:
        here = [i for i, step in enumerate(steps) if step == number]
        axes.axvline(here[-1] + 0.5, color="grey", linewidth=0.8, linestyle=":")
        if number % every == 0 and len(here) > len(steps) / 40:
            axes.text(
                (here[0] + here[-1]) / 2,
                -0.02,
                f"step {number}",
                ha="center",
                va="top",
                fontsize=9,
                transform=axes.get_xaxis_transform(),
            )
    axes.set_xticks([])


def _units_at_peak(axes: Any, at_peak: dict[tuple[str, str], int]) -> set[str]:
    units: dict[str, int] = {}
    for (_, unit), count in at_peak.items():
        units[unit] = units.get(unit, 0) + count
    names = sorted(units, key=lambda unit: -units[unit])[:8]
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("At the peak: tensors of each unit, largest first", fontsize=10, loc="left")
    if not names:
        axes.text(0.01, 0.5, "tensors were not counted", transform=axes.transAxes)
        axes.set_axis_off()
        return set()
    scale, unit_name = _scale(units[names[0]])
    left = [0.0] * len(names)
    roles = [r for r in ROLES if any(role == r for role, _ in at_peak)]
    for role in roles:
        widths = [at_peak.get((role, name), 0) / scale for name in names]
        axes.barh(names, widths, left=left, color=ROLES[role], height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, total in enumerate(left):
        axes.text(total + left[0] * 0.01, i, f"{total:,.1f}", va="center", fontsize=9)
    axes.set_xlim(0, left[0] * 1.1)
    axes.set_xlabel(unit_name)
    axes.invert_yaxis()
    return set(roles)


def _bars(axes: Any, others: Sequence[tuple[str, Plan]], usable: int | None) -> None:
    names = [name for name, _ in others]
    bottom = [0.0] * len(others)
    for role, colour in ROLES.items():
        heights = [p.peak.roles.get(role, 0) / GIB for _, p in others]
        axes.barh(names, heights, left=bottom, color=colour, height=0.65)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    most = max(bottom)
    for i, total in enumerate(bottom):
        axes.text(total + most * 0.01, i, f"{total:,.1f}", va="center", fontsize=9, bbox=_PAPER)
    axes.set_xlim(0, max(most * 1.1, (usable or 0) / GIB * 1.05))
    if usable:
        axes.axvline(usable / GIB, color="black", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_title(
        "At the peak, by strategy" + (" (dashed: what the card has)" if usable else ""),
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)


def _timeline(axes: Any, plan: Plan, usable: int | None) -> None:
    points = plan.timeline
    x = range(len(points))
    layers = [[p.roles.get(role, 0) / GIB for p in points] for role in ROLES]
    axes.stackplot(x, layers, colors=list(ROLES.values()), step="mid", linewidth=0)
    top = max(range(len(points)), key=lambda i: points[i].bytes)
    height = points[top].bytes / GIB
    axes.plot([top], [height], marker="v", color="black", markersize=6)
    side = "right" if top > len(points) / 2 else "left"
    axes.annotate(
        f"peak {height:,.1f} in {points[top].unit or points[top].phase}",
        (top, height),
        xytext=(0, 7),
        textcoords="offset points",
        ha=side,
        fontsize=9,
    )
    for phase in ("forward", "backward"):
        here = [i for i in x if points[i].phase == phase]
        if here:
            axes.axvline(here[0] - 0.5, color="grey", linewidth=0.8, linestyle=":")
            axes.text(
                (here[0] + here[-1]) / 2,
                -0.02,
                phase,
                ha="center",
                va="top",
                fontsize=9,
                transform=axes.get_xaxis_transform(),
            )
    if usable:
        axes.axhline(usable / GIB, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_ylim(0, max(height, (usable or 0) / GIB) * 1.12)
    axes.set_xticks([])
    axes.set_title("Through a step: rest, forward, backward, update", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)

"""Draws docs/layers.svg. The picture shows the folders of the core, which folder includes which,
and the paths ("ways") of a gather and of a gradient through the folders. ``make docs`` writes the
picture. A test fails if the picture is out of date.

    python tests/layers_picture.py --write
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "unit"))

from test_layering import LAYERS, ROOT, SOURCES, includes, path_of  # noqa: E402

PICTURE = ROOT / "docs" / "layers.svg"
WIDE, HIGH, LEFT = 120, 34, 20  # the width and height of a box, and the page's margin
# Each step of a way is an include: a folder calls functions that the next folder declares.
WAYS = {
    "a gather": ("#2b6cb0", "py/step py/unit tree exchange unit device kernels"),
    "a gradient": ("#c05621", "py/step py/unit tree exchange unit comm shm"),
}
SAYS = {
    "base": "statuses, dtypes",
    "kernels": "SIMD and CUDA",
    "ckpt": "ranges of files",
    "device": "processor or GPU",
    "shm": "one host's ranks",
    "comm": "collectives",
    "unit": "where values lie",
    "exchange": "gather, reduce",
    "tree": "order of a step",
    "optim": "fused steps",
    "activation": "packed, offloaded",
    "disk": "io_uring",
    "py/base": "Python's objects",
    "py/step": "hooks of a step",
    "py/unit": "FlatParameter",
    "py/optim": "steps, for Python",
    "py/ckpt": "files, for Python",
    "py/comm": "ranks, for Python",
    "py/activation": "for Python",
    "py/disk": "for Python",
    "py": "fsdpc._C",
}


def arrows() -> dict[str, set[str]]:
    """Return, for each folder, the folders whose headers its files include."""
    found: dict[str, set[str]] = {layer: set() for layer in LAYERS}
    for file, text in SOURCES.items():
        own = str(Path(file).parent)
        for other in map(path_of, includes(text)):
            if other in SOURCES and str(Path(other).parent) != own:
                found[own].add(str(Path(other).parent))
    return {short(own): {short(other) for other in others} for own, others in found.items()}


def short(folder: str) -> str:
    return folder.removeprefix("csrc/")


def floors(uses: dict[str, set[str]]) -> dict[str, int]:
    """Return each folder's floor: one more than the highest floor of the folders that it
    includes."""
    found: dict[str, int] = {}

    def floor(folder: str) -> int:
        if folder not in found:
            found[folder] = 1 + max((floor(other) for other in uses[folder]), default=-1)
        return found[folder]

    for folder in uses:
        floor(folder)
    return found


def corners(uses: dict[str, set[str]]) -> dict[str, tuple[int, int]]:
    """Return the corner of each folder's box. Each floor is a row of boxes. In a row, the folders
    that a way passes through are at the left."""
    on_ways = [folder for _, way in WAYS.values() for folder in way.split()]
    rows: dict[int, list[str]] = {}
    for folder, floor in floors(uses).items():
        rows.setdefault(floor, []).append(folder)
    places = {}
    for floor, folders in rows.items():
        folders.sort(key=lambda f: (f not in on_ways, on_ways.index(f) if f in on_ways else 0))
        for column, folder in enumerate(folders):
            y = 60 + (max(rows) - floor) * (HIGH + 26)
            places[folder] = LEFT + column * (WIDE + 40), y
    return places


def lines(uses: dict[str, set[str]], at: dict[str, tuple[int, int]]) -> Iterator[str]:
    for folder, others in sorted(uses.items()):
        for other in sorted(others):
            (x, y), (u, v) = at[folder], at[other]
            yield (
                f'<line x1="{x + WIDE // 2}" y1="{y + HIGH}" x2="{u + WIDE // 2}" y2="{v}" '
                'stroke="#ddd"/>'
            )
    for number, (name, (colour, way)) in enumerate(WAYS.items()):
        steps = way.split()
        points = " ".join(f"{at[f][0] + 16 + 14 * number},{at[f][1] + HIGH // 2}" for f in steps)
        yield f'<text x="{LEFT + 160 * number}" y="30" fill="{colour}">● the way of {name}</text>'
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="3"/>'
    for folder, (x, y) in sorted(at.items()):
        yield (
            f'<rect x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="4" fill="#fff" '
            'fill-opacity="0.75" stroke="#444"/>'
            f'<text x="{x + WIDE // 2}" y="{y + 14}" text-anchor="middle" font-weight="bold">'
            f'{folder}</text><text x="{x + WIDE // 2}" y="{y + 28}" text-anchor="middle" '
            f'font-size="10" fill="#555">{SAYS.get(folder, "")}</text>'
        )


def picture() -> str:
    uses = arrows()
    for _, way in WAYS.values():
        steps = way.split()
        for above, below in zip(steps, steps[1:], strict=False):
            assert below in uses[above], f"csrc/{above} includes nothing of {below}"
    at = corners(uses)
    width = max(x for x, _ in at.values()) + WIDE + LEFT
    height = max(y for _, y in at.values()) + HIGH + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="Helvetica,Arial,sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *lines(uses, at),
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    if "--write" in sys.argv:
        PICTURE.write_text(picture())

"""Folders of steps (``step-000100``), in the order in which they were published.

Each manifest has a number, one more than any that was there before: after a run has gone back to an
earlier step, neither the highest step nor the clock says what was saved last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fsdpc.checkpoint import manifest as _manifest

LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})")
_NUMBER = re.compile(rb'^ "published": (\d+),$', re.MULTILINE)
_HEAD_BYTES = 512  # the number is one of the first members


@dataclass
class Steps:
    """Complete checkpoints of a directory, the last published first. ``abandoned``: published
    before a step that is not later than they are, so the run has gone back behind them.
    """

    live: list[int]
    abandoned: list[int]


def folder_of(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}"


def read_steps(directory: Path) -> Steps:
    """Local. Folders without numbers count as the oldest; of equal numbers the one comes first that
    the file ``latest`` names, then the higher step.
    """
    named = named_latest(directory)
    order = sorted(
        ((number, step == named, step) for step, number in _numbers(directory).items()),
        reverse=True,
    )
    found = Steps([], [])
    for _, _, step in order:
        is_live = not found.live or step < found.live[-1]
        (found.live if is_live else found.abandoned).append(step)
    return found


def named_latest(directory: Path) -> int | None:
    """The step that the file ``latest`` names. Local."""
    try:
        match = _NAME.fullmatch((directory / LATEST).read_text().strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None


def next_number(target: Path) -> int | None:
    """The number of a step that is about to be published; ``None``: the folder is no step's."""
    if not _NAME.fullmatch(target.name):
        return None
    return 1 + max(_numbers(target.parent).values(), default=0)


def _numbers(directory: Path) -> dict[int, int]:
    if not directory.is_dir():
        return {}
    found = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and (path / _manifest.NAME).is_file():
            found[int(match[1])] = _number(path / _manifest.NAME)
    return found


def _number(manifest: Path) -> int:
    with open(manifest, "rb") as file:
        match = _NUMBER.search(file.read(_HEAD_BYTES))
    return int(match[1]) if match else 0

"""Folders of steps (``step-000100``), in the order in which they were published.

Each manifest has a number, one more than any that was there before: after a run has gone back to an
earlier step, neither the highest step nor the clock says what was saved last.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsdpc.checkpoint import manifest as _manifest
from fsdpc.checkpoint.storage import AnyPath

LATEST = "latest"
_NAME = re.compile(r"step-(\d{6,})")
_METRIC = re.compile(rb'^ "metric": ([^,\n]+),$', re.MULTILINE)
_NUMBER = re.compile(rb'^ "published": (\d+),$', re.MULTILINE)


@dataclass
class Steps:
    """Checkpoints of a directory, the last published first. ``abandoned``: published before a step
    that is not later than they are, so the run has gone back behind them. ``damaged``: when they
    were published is not known, since their manifests are damaged or missing.
    """

    live: list[int]
    abandoned: list[int]
    damaged: list[int]


def number_of(step: Any) -> int:
    """The step as an int, also from a number of NumPy or a tensor. ``ValueError``: it is negative,
    which no name of a folder can have; ``TypeError``: it is no whole number.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step must be a whole number, not {step!r}") from None
    if number < 0:
        raise ValueError(f"step must be at least 0, not {number}")
    return number


def folder_of(directory: AnyPath, step: int) -> AnyPath:
    return directory / f"step-{number_of(step):06d}"


def read_steps(directory: AnyPath) -> Steps:
    """The checkpoints of a directory. Local. Those without a number count as the oldest; of equal
    numbers, the one that the file ``latest`` names comes first, then the higher step.
    """
    named, numbers = named_latest(directory), _numbers(directory)
    order = sorted(
        ((number, step == named, step) for step, number in numbers.items() if number is not None),
        reverse=True,
    )
    found = Steps([], [], sorted(step for step, number in numbers.items() if number is None))
    for _, _, step in order:
        is_live = not found.live or step < found.live[-1]
        (found.live if is_live else found.abandoned).append(step)
    return found


def read_metrics(directory: AnyPath, steps: Iterable[int]) -> dict[int, float]:
    """The metrics of the steps that have one and whose manifest is whole. Local."""
    found = {}
    for step in steps:
        try:
            text = (folder_of(directory, step) / _manifest.NAME).read_bytes()
        except OSError:
            continue
        match = _METRIC.search(text)
        if match and _manifest.is_whole(text):
            found[step] = float(match[1])
    return found


def named_latest(directory: AnyPath) -> int | None:
    """The step that the file ``latest`` names. Local."""
    try:
        match = _NAME.fullmatch((directory / LATEST).read_text().strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None


def next_number(target: AnyPath) -> int | None:
    """The number of a step that is about to be published; ``None``: the folder is no step's."""
    if not _NAME.fullmatch(target.name):
        return None
    return 1 + max((number or 0 for number in _numbers(target.parent).values()), default=0)


def _numbers(directory: AnyPath) -> dict[int, int | None]:
    if not directory.is_dir():
        return {}
    numbers = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match and path.holds_checkpoint():
            number = _number(path)
            if number is not None or path.holds_checkpoint():  # else removed between the two looks
                numbers[int(match[1])] = number
    return numbers


def incomplete(directory: AnyPath) -> list[AnyPath]:
    """Folders of steps in object storage that are no checkpoints: of saves that have failed, or are
    going on. Local.
    """
    if directory.appears_whole or not directory.is_dir():
        return []
    steps = (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    return [path for path in steps if not path.holds_checkpoint()]


def _number(folder: AnyPath) -> int | None:
    try:
        text = (folder / _manifest.NAME).read_bytes()
    except OSError:
        return None
    match = _NUMBER.search(text)
    return (int(match[1]) if match else 0) if _manifest.is_whole(text) else None

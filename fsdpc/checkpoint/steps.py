"""Folders of steps (``step-000100``), in the order in which they were published.

Each manifest has a number. A new manifest gets a number one higher than the highest number of the
manifests that are already in the directory. The number is needed because, after a run has gone back
to an earlier step, neither the highest step nor the clock tells which step was saved last.
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
    """The steps of the checkpoints in a directory. ``live`` and ``abandoned`` begin with the step
    that was published last. A step is abandoned if a lower step was published after it: the run
    has then gone back to an earlier step. ``damaged`` has the steps whose place in this order is
    unknown, because their manifests are damaged or missing.
    """

    live: list[int]
    abandoned: list[int]
    damaged: list[int]


def number_of(step: Any) -> int:
    """Return the step as an int, also if it is a number of NumPy or a tensor. Raises ``ValueError``
    if the step is negative, and ``TypeError`` if the step is not a whole number.
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
    """Return the checkpoints of a directory. Local. Checkpoints without a number count as the
    oldest. If checkpoints have equal numbers, the checkpoint that the file ``latest`` names comes
    first. The others follow, the highest step first.
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
    """Return the metrics of those steps that have a metric and an undamaged manifest. Local."""
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
    """Return the step that the file ``latest`` names. Return None if the file is missing or names
    no step. Local.
    """
    try:
        match = _NAME.fullmatch((directory / LATEST).read_text().strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None


def next_number(target: AnyPath) -> int | None:
    """Return the number for the manifest of a step that is about to be published, or ``None`` if
    ``target`` is not the folder of a step.
    """
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
            if number is not None or path.holds_checkpoint():  # else it was removed
                numbers[int(match[1])] = number
    return numbers


def incomplete(directory: AnyPath) -> list[AnyPath]:
    """Return the folders of steps in object storage that are not checkpoints, because a save has
    failed or is still running. Local.
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

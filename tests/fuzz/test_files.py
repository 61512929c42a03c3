"""A bounded part of fuzz_files.py, and that it finds planted faults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpc.checkpoint import loading, steps, verify

sys.path.insert(0, str(Path(__file__).parent))
import fuzz_files  # noqa: E402

SECONDS = 6.0
MOST_LIVES = 200


def lives_until_a_fault() -> str:
    torch.set_num_threads(1)
    for number in range(MOST_LIVES):
        try:
            fuzz_files.run_case(2, number, lambda text: None)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_random_lives_of_folders():
    lives, done, faults = fuzz_files.run(1, SECONDS)
    assert not faults, "\n".join(faults)
    assert lives > 2 and done["resume"] > 0, done


def highest_step(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def found(directory: Path) -> Any:
        every = read(directory)
        return steps.Steps(sorted(every.live + every.abandoned, reverse=True), [], [])

    return found


FAULTS = {
    "the highest step wins": (steps, "read_steps", highest_step, "Wrong"),
    "verify reads nothing": (
        verify, "digest_of", lambda own: lambda file, place: None, "Wrong|Error"
    ),
    "no digests are compared": (
        loading, "_compare", lambda own: lambda *args, **options: None, "other values than|mixed"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_planted_faults_are_found(what: str, monkeypatch: pytest.MonkeyPatch):
    module, name, wrapped, text = FAULTS[what]
    monkeypatch.setattr(module, name, wrapped(getattr(module, name)))
    found = lives_until_a_fault()
    assert any(one in found for one in text.split("|")), found

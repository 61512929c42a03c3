"""Tests that run a bounded number of lives of fuzz_files.py, and that check that planted faults are
found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpc.checkpoint import loading, steps
from fsdpc.checkpoint.verify import Report

sys.path.insert(0, str(Path(__file__).parent))
import fuzz_files  # noqa: E402

SECONDS, SEED = 4.0, 2
MOST_LIVES = 60


def fault_of(number: int) -> str:
    try:
        fuzz_files.run_case(SEED, number, lambda text: None)
    except fuzz_files.Wrong as error:
        return str(error)
    return ""


@pytest.mark.long
def test_random_lives_of_folders():
    lives, done, faults = fuzz_files.run(1, SECONDS)
    assert not faults, "\n".join(faults)
    assert lives > 0 and done["resume"] > 0, done


def highest_step(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def found(directory: Path) -> Any:
        every = read(directory)
        return steps.Steps(sorted(every.live + every.abandoned, reverse=True), [], [])

    return found


# For each fault: the module and the name that are replaced, the replacement, a text that is in the
# report of a life that finds the fault, and the number of the first such life.
FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], str, int]] = {
    "the highest step wins": (steps, "read_steps", highest_step, "went on from step", 33),
    "verify finds nothing": (
        fuzz_files, "verify", lambda own: lambda path: Report(1, 1, True, []), "verify of", 2
    ),
    "no digests are compared": (
        loading, "_compare", lambda own: lambda *args, **options: None, "other values than", 131
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_planted_faults_are_found(what: str, monkeypatch: pytest.MonkeyPatch):
    """A life finds each planted fault, and passes without the fault."""
    module, name, wrapped, text, first = FAULTS[what]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, wrapped(getattr(module, name)))
        lives = range(first, first + MOST_LIVES)
        number, found = next((n, fault) for n in lives if (fault := fault_of(n)))
    assert text in found, found
    assert fault_of(number) == ""

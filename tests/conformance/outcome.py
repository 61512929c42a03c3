"""The outcome that a case must have, and the outcome that it had on one rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.torch_version import TorchVersion


@dataclasses.dataclass(frozen=True)
class Expected:
    """The outcome that a case must have. `kind` is value, raises, wrong, hangs or dies."""

    kind: str
    error: str = ""
    words: str = ""


def any_of(*expected: Expected) -> tuple[Expected, ...]:
    """Allow several outcomes, for faults whose symptom depends on the contents of memory."""
    return expected


WORKS = Expected("value")
HANGS = Expected("hangs")


def raises(error: type[BaseException], words: str = "") -> Expected:
    """Expect that the case raises an exception of this type or a subtype on every rank."""
    return Expected("raises", error.__name__, words)


def wrong(words: str = "") -> Expected:
    """Expect that the library raises nothing, but that an assertion of the case itself fails."""
    return Expected("wrong", "AssertionError", words)


def dies(signal: str) -> Expected:
    """Expect that a signal ends a rank."""
    return Expected("dies", signal)


# torch before 2.14 "offloads" tensors that are on the CPU to memory that it then frees.
OFFLOADS_ON_THE_CPU = (
    any_of(WORKS)
    if TorchVersion(torch.__version__) >= "2.14"
    else any_of(raises(RuntimeError, "storage"), dies("SIGSEGV"), wrong())
)

# torch before 2.15 keeps the gradients that were made before a backward failed.
AFTER_A_FAILED_BACKWARD = (
    any_of(WORKS)
    if TorchVersion(torch.__version__) >= "2.15"
    else any_of(wrong("gradient of norm"))
)


@dataclasses.dataclass
class Record:
    """The outcome of a case on one rank."""

    kind: str = "value"
    value: Any = None
    errors: tuple[str, ...] = ()  # names of the exception's class and of its bases
    text: str = ""
    story: str = ""
    ours: bool = False  # True: an assertion of the case failed; the library raised nothing

    def meets(self, expected: Expected) -> bool:
        if expected.kind == "dies":
            return self.kind == "dies" and expected.error == self.text
        if expected.kind in ("hangs", "value"):
            return self.kind == expected.kind
        same = self.kind == "raises" and expected.error in self.errors
        return (
            same
            and self.ours == (expected.kind == "wrong")
            and expected.words.lower() in self.text.lower()
        )

    def short(self) -> str:
        """Return the outcome in a few words, for the table."""
        if self.kind == "raises":
            line = (self.text.strip().splitlines() or [""])[0]
            return f"wrong: {line}" if self.ours else f"{self.errors[0]}: {line}"
        return {"value": "works", "hangs": "hangs", "dies": f"dies of {self.text}"}[self.kind]

    def full(self) -> str:
        return f"{self.short()}\n{self.story}"

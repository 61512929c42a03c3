"""How a case must end, and how it ended on one rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.torch_version import TorchVersion


@dataclasses.dataclass(frozen=True)
class Expected:
    """How a case must end under one library. `kind`: value, raises, wrong, hangs or dies."""

    kind: str
    error: str = ""
    words: str = ""


def any_of(*expected: Expected) -> tuple[Expected, ...]:
    """One of several endings: faults whose symptom depends on what memory holds."""
    return expected


WORKS = Expected("value")
HANGS = Expected("hangs")


def raises(error: type[BaseException], words: str = "") -> Expected:
    """An exception of this type (or one derived from it) leaves the case on every rank."""
    return Expected("raises", error.__name__, words)


def wrong(words: str = "") -> Expected:
    """No exception from the library, but values that the case's own assertions refute."""
    return Expected("wrong", "AssertionError", words)


def dies(signal: str) -> Expected:
    """A signal ends a rank."""
    return Expected("dies", signal)


# torch before 2.14 "offloads" tensors that are on the CPU to memory that it then frees.
OFFLOADS_ON_THE_CPU = (
    any_of(WORKS)
    if TorchVersion(torch.__version__) >= "2.14"
    else any_of(raises(RuntimeError, "storage"), dies("SIGSEGV"), wrong())
)

# torch before 2.15 keeps the gradients that a failed backward has left.
AFTER_A_FAILED_BACKWARD = (
    any_of(WORKS)
    if TorchVersion(torch.__version__) >= "2.15"
    else any_of(wrong("gradient of norm"))
)


@dataclasses.dataclass
class Record:
    """How a case ended on one rank."""

    kind: str = "value"
    value: Any = None
    errors: tuple[str, ...] = ()  # the exception's class and its bases
    text: str = ""
    story: str = ""
    ours: bool = False  # an assertion of the case itself, not of the library

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
        """The ending in a few words, for the table."""
        if self.kind == "raises":
            line = (self.text.strip().splitlines() or [""])[0]
            return f"wrong: {line}" if self.ours else f"{self.errors[0]}: {line}"
        return {"value": "works", "hangs": "hangs", "dies": f"dies of {self.text}"}[self.kind]

    def full(self) -> str:
        return f"{self.short()}\n{self.story}"

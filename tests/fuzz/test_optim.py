"""Tests that run a bounded part of fuzz_optim.py, and that check that a planted fault is found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import fuzz_optim  # noqa: E402


@pytest.mark.long
def test_random_optimizers_follow_their_formulas():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for seed in range(60):
        fuzz_optim.check(seed)
    torch.set_num_threads(before)


def test_a_wrong_formula_is_found(monkeypatch):
    step = fuzz_optim.Reference.step

    def wrong(self: fuzz_optim.Reference, grad: torch.Tensor) -> None:
        step(self, grad)
        self.p = self.p + 0.1

    monkeypatch.setattr(fuzz_optim.Reference, "step", wrong)
    seed = next(
        s
        for s in range(100)
        if fuzz_optim.draw(s).kind == "AdamW"
        and fuzz_optim.draw(s).dtype is torch.float32
        and fuzz_optim.draw(s).special is None
        and min(fuzz_optim.draw(s).sizes) > 0
        and fuzz_optim.draw(s).options["lr"] == 1e-3
    )
    with pytest.raises(AssertionError, match="not the formula's value"):
        fuzz_optim.check(seed)

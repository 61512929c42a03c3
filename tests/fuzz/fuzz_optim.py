"""Random optimizers and gradients on plain tensors, against the formulas in float64.

python tests/fuzz/fuzz_optim.py --cases 10000 --seed 1
python tests/fuzz/fuzz_optim.py --seed 1 --only 77        # one case, and its description

A case draws an optimizer with its flags, the sizes of parameters, the number of steps, and a step
after which the optimizer is resumed from a state dict. The sizes are 0, 1, and sizes near multiples
of 256. Gradients may be missing, not contiguous, huge, zero or not finite. Each case runs on every
instruction set.

Parameters must stay within rounding of the reference, and be finite where the reference is finite.
They must be bitwise equal on every instruction set, and in steps without a table
(fsdpc/optim/_table.py). Two further runs clip gradients, with a gradient scale and copies of the
parameters: one with a table and one without. The results of both must be bitwise equal.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdpc import _C, optim

SIZES = (0, 1, 2, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 5003)
KINDS = ("AdamW", "Adam", "SGD", "Lion", "AdamWBF16")
DTYPES = (torch.float32, torch.float32, torch.bfloat16)
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}


@dataclass
class Case:
    """A case that is drawn from a seed."""

    seed: int
    kind: str = ""
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    steps: int = 1
    resume: int = -1
    special: float | None = None


def draw(seed: int) -> Case:
    """Draws the case of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    options: dict[str, Any] = {
        "lr": rng.choice((1e-3, 0.1, 0.0)),
        "weight_decay": rng.choice((0.0, 0.1)),
        "maximize": rng.random() < 0.3,
    }
    if kind == "SGD":
        options["momentum"] = rng.choice((0.0, 0.9))
        options["nesterov"] = options["momentum"] > 0 and rng.random() < 0.5
        if not options["nesterov"]:
            options["dampening"] = rng.choice((0.0, 0.5))
    else:
        options["betas"] = rng.choice(((0.9, 0.99), (0.4, 0.5), (0.0, 0.9)))
    if kind in ("Adam", "AdamW"):
        options["amsgrad"] = rng.random() < 0.4
    if kind not in ("SGD", "Lion"):
        options["eps"] = rng.choice((1e-8, 1e-3))
    return Case(
        seed,
        kind,
        rng.choice(DTYPES),
        options,
        [rng.choice(SIZES) for _ in range(rng.randint(1, 3))],
        rng.randint(1, 6),
        rng.choice((-1, 1, 2, 4)),
        rng.choice((None, None, None, math.inf, -math.inf, math.nan)),
    )


def gradient(case: Case, step: int, number: int, size: int) -> Tensor | None:
    """The gradient of one parameter in one step, or None."""
    rng = random.Random(case.seed * 1009 + step * 31 + number)
    if rng.random() < 0.1:
        return None
    drawn = torch.randn(2 * size, generator=torch.Generator().manual_seed(rng.getrandbits(40)))
    drawn = drawn * rng.choice((1.0, 1e-6, 1e6, 0.0))
    if case.special is not None and size and rng.random() < 0.5:
        drawn[rng.randrange(2 * size)] = case.special
    drawn = drawn.to(case.dtype)
    return drawn[::2] if rng.random() < 0.2 else drawn[:size].clone()


class Reference:
    """One parameter in float64, which is stepped by the formulas of docs/optimizers.md."""

    def __init__(self, case: Case, value: Tensor) -> None:
        self.case, self.p, self.t = case, value.double(), 0
        self.m, self.v, self.x = (torch.zeros_like(self.p) for _ in range(3))
        self.most = 0.0  # the largest magnitude of the values that SGD has added up

    def step(self, grad: Tensor) -> None:
        """Takes one step."""
        o, g = self.case.options, grad.double()
        g = -g if o["maximize"] else g
        self.t += 1
        if self.case.kind in ("SGD", "Adam"):
            g = g + o["weight_decay"] * self.p if o["weight_decay"] else g
        else:
            self.p = self.p * (1 - o["lr"] * o["weight_decay"])
        if self.case.kind == "SGD":
            self._sgd(g)
            return
        beta1, beta2 = o["betas"]
        if self.case.kind == "Lion":
            towards = beta1 * self.m + (1 - beta1) * g
            self.p = self.p - o["lr"] * torch.where(towards.isnan(), towards, towards.sign())
            self.m = beta2 * self.m + (1 - beta2) * g
            return
        self.m = self.m + (1 - beta1) * (g - self.m)
        self.v = beta2 * self.v + (1 - beta2) * g * g
        self.x = torch.maximum(self.x, self.v) if o.get("amsgrad") else self.v
        root = self.x.sqrt() / math.sqrt(1 - beta2**self.t) + o["eps"]
        self.p = self.p - o["lr"] / (1 - beta1**self.t) * self.m / root

    def _sgd(self, g: Tensor) -> None:
        o = self.case.options
        if o["momentum"]:
            dampened = (1 - o.get("dampening", 0.0)) * g
            self.m = g if self.t == 1 else o["momentum"] * self.m + dampened
            g = g + o["momentum"] * self.m if o["nesterov"] else self.m
        self.p = self.p - o["lr"] * g
        self.most = float(torch.cat([torch.tensor([self.most]), g.abs(), self.m.abs()]).max())


def run(
    case: Case, simd: str, *, table: bool = True, clip: bool = False
) -> tuple[list[Tensor], list[Reference]]:
    """Run a case with an instruction set. Return the parameters, followed by any copies, and the
    references."""
    os.environ["FSDPC_SIMD"] = simd
    values = [
        torch.randn(n, generator=torch.Generator().manual_seed(i)).to(case.dtype)
        for i, n in enumerate(case.sizes)
    ]
    params = [nn.Parameter(value.clone()) for value in values]
    references = [Reference(case, value) for value in values]
    optimizer = getattr(optim, case.kind)(params, **case.options)
    copies = {}
    if clip and case.dtype is torch.float32:
        copies = {param: torch.empty_like(param, dtype=torch.bfloat16) for param in params}
    for step in range(case.steps):
        if not table:
            optimizer._make_table = lambda: None
        if step == 0 or step == case.resume:
            optimizer.write_copies(copies)
        for i, param in enumerate(params):
            param.grad = gradient(case, step, i, param.numel())
            if param.grad is not None:
                references[i].step(param.grad)
        if clip:
            optimizer.grad_scale = torch.tensor(4.0 if case.seed % 2 else 3.0)
        optimizer.step(max_norm=0.5 if clip else None)
        if step + 1 == case.resume:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = getattr(optim, case.kind)(params, **case.options)
            optimizer.load_state_dict(saved)
    return [param.detach() for param in [*params, *copies.values()]], references


def judge(case: Case, found: Tensor, reference: Reference) -> None:
    """Raise ``AssertionError`` if a parameter does not have the formula's value within rounding."""
    expected = reference.p
    if case.special is not None or case.options["lr"] == 0:
        low = expected.to(case.dtype)
        if case.options["lr"] == 0 and case.options["weight_decay"] == 0:
            good = low.isfinite() & found.isfinite()
            assert torch.equal(found[good], low[good])
        assert bool((found.isfinite() | ~low.isfinite()).all()), "not finite where it should be"
        return
    # Each step rounds the parameter. It also rounds the update, with an error in proportion to the
    # learning rate.
    low = case.dtype is torch.bfloat16 or case.kind == "AdamWBF16"
    limit = (1 + expected.abs()) * ULP[case.dtype] * 8 * case.steps
    if case.kind == "SGD":
        limit = limit + reference.most * case.options["lr"] * case.steps * (4e-2 if low else 1e-5)
    elif case.kind == "Lion":  # rounding may flip the sign of an update
        limit = limit + 2 * case.options["lr"] * case.steps
    else:
        limit = limit + case.options["lr"] * case.steps * (1.0 if low else 1e-3)
    assert bool(((found.double() - expected).abs() <= limit).all()), "not the formula's value"


def check(seed: int) -> None:
    """Run and judge one case."""
    case = draw(seed)
    before = os.environ.get("FSDPC_SIMD")
    try:
        runs = [run(case, simd) for simd in _C.kernel_names()]
        last = _C.kernel_names()[-1]
        runs.append(run(case, last, table=False))
        clipped = [run(case, last, table=table, clip=True)[0] for table in (True, False)]
    finally:
        os.environ.pop("FSDPC_SIMD", None)
        if before is not None:
            os.environ["FSDPC_SIMD"] = before
    for found, reference in zip(*runs[0], strict=True):
        judge(case, found, reference)
    for found, _ in runs[1:]:
        for mine, first in zip(found, runs[0][0], strict=True):
            assert same(mine, first), "instruction sets differ, or steps with a table"
    assert all(map(same, *clipped)), "clipped steps with a table differ"


def same(mine: Tensor, other: Tensor) -> bool:
    """Whether all elements are equal; NaN counts as equal to NaN."""
    return bool(((mine == other) | (mine.isnan() & other.isnan())).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, default=-1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers = [options.only] if options.only >= 0 else range(options.cases)
    failed = 0
    for number in numbers:
        try:
            check(options.seed * 1_000_000 + number)
        except AssertionError as error:
            failed += 1
            print(f"case {number}: {error}: {draw(options.seed * 1_000_000 + number)}")
    print(f"{len(numbers)} cases, {failed} wrong")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()

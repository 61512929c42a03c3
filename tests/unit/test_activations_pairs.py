"""Every two features of activations together: gradients equal to those without, within a bound
where a feature loses bits, or an error that names what cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import combinations, permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_activations import Block, Model, batch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fsdpc.activations import checkpoint, compress, offload, offloading


class Reentrant(nn.Module):
    """torch's reentrant checkpoint around a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(self.block, x, use_reentrant=True)


def reentrant(model: Model) -> None:
    model.blocks = nn.ModuleList(Reentrant(block) for block in model.blocks)


def compiled(model: Model) -> None:
    torch._dynamo.reset()
    model.blocks[0] = torch.compile(model.blocks[0], backend="aot_eager")


WRAPS: dict[str, Callable[[Model], Any]] = {
    "checkpoint": lambda model: checkpoint(model, ratio="1/2", blocks=Block),
    "matmul": lambda model: checkpoint(model, policy="matmul", blocks=Block),
    "reentrant": reentrant,
    "compiled": compiled,
}
CONTEXTS: dict[str, Callable[[Model], AbstractContextManager[Any]]] = {
    "int8": lambda model: compress(model, "int8"),
    "bf16": lambda model: compress(model, "bf16"),
    "offload": offload,
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "dropout": lambda model: nullcontext(),
}
LOSSY = {"int8": 0.02, "bf16": 0.01}
# Pairs, in the order in which they are applied, that raise, and with what.
REFUSED = {
    ("checkpoint", "matmul"): "is checkpointed already",
    ("matmul", "checkpoint"): "is checkpointed already",
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(offloading, "_said", ["said"])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(features: tuple[str, ...]) -> torch.Tensor:
    """All gradients of a step with the features, behind one another."""
    model = Model(blocks=2, dropout=0.2 if "dropout" in features else 0.0)
    params = list(model.parameters())
    for name in features:
        if name in WRAPS:
            WRAPS[name](model)
    x = batch().requires_grad_()  # torch's reentrant checkpoint needs one
    torch.manual_seed(7)
    with ExitStack() as stack:
        for name in features:
            if name in CONTEXTS:
                stack.enter_context(CONTEXTS[name](model))
        loss = model(x).float().square().mean()
    torch.randn(100)  # another state of the generator than in the forward
    loss.backward()
    return torch.cat([p.grad.reshape(-1) for p in params])


def bases(features: tuple[str, ...]) -> tuple[str, ...]:
    """What changes the values that are computed, not how they are kept."""
    return tuple(f for f in features if f in ("autocast", "dropout"))


@pytest.mark.parametrize("pair", list(combinations([*WRAPS, *CONTEXTS], 2)), ids="+".join)
def test_pairs(pair: tuple[str, str]):
    kinds = [name in WRAPS for name in pair]
    for features in permutations(pair) if kinds[0] == kinds[1] else [pair]:
        if features in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[features]):
                gradients(features)
            continue
        expected, found = gradients(bases(features)), gradients(features)
        allowed = sum(LOSSY.get(name, 0.0) for name in features)
        if "compiled" in features and "autocast" in features:
            allowed += 0.02  # bfloat16 in another order
        error = float((found - expected).norm() / expected.norm())
        assert error <= allowed, (features, error)


def test_offload_costs_nothing_on_the_host_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offloading, "_said", [])
    model, packed = Model(blocks=1), 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal packed
        packed += 1
        return tensor

    with pytest.warns(UserWarning, match="in host memory.*nothing is copied"), offload(model):
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            kept = model(batch())
        saved = packed
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t), offload(model):  # no warning
        other = model(batch())
    assert torch.equal(kept, other) and packed == 2 * saved  # the outer hooks still run
    with pytest.raises(NotImplementedError, match="where parameter 'weight' is"):
        with offload(Elsewhere()):
            pass


class Elsewhere(nn.Module):
    """A parameter that says it is on a device that fsdpc does not know."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        yield "weight", SimpleNamespace(device=torch.device("xpu", 0))

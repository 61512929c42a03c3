"""Tests of every pair of features: of activations, of sharding and of training steps.

Gradients equal those of an unsharded model that has only the features of the pair that are meant to
change values, such as autocast or dropout. If a feature loses bits, gradients may differ within a
bound. Pairs that cannot work together raise an error that names the reason.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from toys import full_gradients, no_sync_if, shard_blocks, wrap_blocks

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc.activations import checkpoint, compress, offload, offloading

LOADED_BY_RANKS = ["torch._inductor.compile_fx"]  # imported once before the ranks are forked
WIDTH = 64  # large enough that compress() packs an activation of shape (2, 32, WIDTH)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down, self.drop = nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(self.drop(functional.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, features: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(0.2 * ("dropout" in features)) for _ in range(2))
        if "frozen" in features:
            self.blocks[0].requires_grad_(False)
            self.blocks[1].up.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Reentrant(nn.Module):
    """torch's reentrant checkpoint around a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(self.block, x, use_reentrant=True)


def blocks_of(model: Any) -> nn.ModuleList:
    return (model.module if isinstance(model, FSDP) else model).blocks


def replaced(model: Any, count: int, by: Callable[[nn.Module], Any]) -> Any:
    blocks = blocks_of(model)
    for i in range(count):
        blocks[i] = by(blocks[i])
    return model


def ours(model: Any, **options: Any) -> Any:
    checkpoint(model, blocks=Block, **options)
    return model


DOORS: dict[str, Callable[[Any], Any]] = {
    "FSDP": lambda model: wrap_blocks("fsdpc", model, Block, use_orig_params=True),
    "fully_shard": shard_blocks,
}
WRAPS: dict[str, Callable[[Any], Any]] = {
    "checkpoint": lambda model: ours(model, ratio="1/2"),
    "matmul": lambda model: ours(model, policy="matmul"),
    "reentrant": lambda model: replaced(model, 2, Reentrant),
    "compiled": lambda model: replaced(
        model, 1, lambda block: torch.compile(block, backend="aot_eager")
    ),
    **DOORS,
}
CONTEXTS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "int8": lambda model: compress(model, "int8"),
    "bf16": lambda model: compress(model, "bf16"),
    "offload": offload,
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
}
STEPS = ("dropout", "frozen", "accumulation")
LOSSY = {"int8": 0.02, "bf16": 0.01}
# Pair of features that raises, in the order in which they are applied -> the error.
REFUSED = {
    ("checkpoint", "matmul"): (ValueError, "is checkpointed already"),
    ("matmul", "checkpoint"): (ValueError, "is checkpointed already"),
    ("FSDP", "fully_shard"): (ValueError, "by FullyShardedDataParallel already.*not both"),
    ("fully_shard", "FSDP"): (ValueError, "by fully_shard already.*not both"),
}


def gradients(features: tuple[str, ...], rank: int) -> dict[str, torch.Tensor]:
    """Return all gradients of a step with the features, reduced if FSDP or fully_shard is used."""
    model: Any = Model(features)
    for name in features:
        model = WRAPS[name](model) if name in WRAPS else model
    micro_batches = 2 if "accumulation" in features else 1
    torch.manual_seed(7 + rank)
    for micro in range(micro_batches):
        generator = torch.Generator().manual_seed(10 * micro + rank)
        x = torch.randn(2, 32, WIDTH, generator=generator)
        x.requires_grad_()  # torch's reentrant checkpoint needs an input that requires a gradient
        with ExitStack() as stack:
            for name in features:
                if name in CONTEXTS:
                    stack.enter_context(CONTEXTS[name](model))
            stack.enter_context(unsynchronised(model, micro + 1 < micro_batches))
            loss = model(x).float().square().mean()
            torch.randn(100)  # changes the generator's state between forward and backward
            loss.backward()
    return {
        re.sub(r"_orig_mod\.|\bblock\.|_\w+_wrapped_module\.", "", name): grad
        for name, grad in values_of(model).items()
    }


def unsynchronised(model: Any, condition: bool) -> AbstractContextManager[Any]:
    if isinstance(model, FSDP):
        return no_sync_if(model, condition)
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(not condition)
    return nullcontext()


def values_of(model: Any) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        return full_gradients(model)
    found = {}
    for name, param in model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).detach()
    return found


def expected_of(features: tuple[str, ...], rank: int, world: int) -> dict[str, torch.Tensor]:
    """Return the gradients of an unsharded model with only those features that change values."""
    kept = tuple(f for f in features if f in ("autocast", *STEPS))
    return unsharded(kept, rank, world if any(name in DOORS for name in features) else 1)


@functools.cache  # many pairs need the same reference
def unsharded(features: tuple[str, ...], rank: int, world: int) -> dict[str, torch.Tensor]:
    found = gradients(features, rank)
    if world > 1:
        for grad in found.values():
            dist.all_reduce(grad)
            grad /= world
    return found


def check(features: tuple[str, ...], rank: int, world: int) -> str | None:
    """Return what is wrong with the features together, or None."""
    if features in REFUSED:
        kind, text = REFUSED[features]
        try:
            gradients(features, rank)
        except kind as error:
            return None if re.search(text, str(error)) else f"another error: {error}"
        return f"no {kind.__name__}"
    expected, found = expected_of(features, rank, world), gradients(features, rank)
    if expected.keys() != found.keys():
        return f"other names: {sorted(found)}"
    allowed = sum(LOSSY.get(name, 0.0) for name in features)
    if "compiled" in features and "autocast" in features:
        allowed += 0.02  # compiled code computes bfloat16 in another order
    gap = sum(float((found[n] - expected[n]).norm()) ** 2 for n in found) ** 0.5
    norm = sum(float(grad.norm()) ** 2 for grad in expected.values()) ** 0.5
    return None if 0 < norm and gap <= allowed * norm else f"error {gap / norm:.4f} of {allowed}"


def orders(pair: tuple[str, str]) -> list[tuple[str, ...]]:
    """Return both orders if the features are of one kind (wraps or contexts), else the pair."""
    same_kind = any(set(pair) <= kind.keys() for kind in (WRAPS, CONTEXTS))
    return list(permutations(pair)) if same_kind else [pair]


@pytest.mark.long
@ranks(1, 2)
def test_pairs(rank: int, world: int):
    """On one rank the test runs the pairs without sharding, on two ranks those with sharding."""
    torch.set_num_threads(1)
    offloading._said[:] = ["said"]
    wrong = {}
    for pair in combinations([*WRAPS, *CONTEXTS, *STEPS], 2):
        if any(name in DOORS for name in pair) != (world > 1):
            continue
        for features in orders(pair):
            torch._dynamo.reset()
            fault = check(features, rank, world)
            if fault:
                wrong[features] = fault
    assert not wrong, wrong

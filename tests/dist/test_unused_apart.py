"""Tests of ranks that leave different parameters unused, over communicators that match collectives
by their order alone: those of the simulated GPU and of a wire.

The results must equal the unsharded model's. No unit may need spare memory, which is private memory
that the engine maps in place of a slot.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import env
import pytest
import torch
from combinations import subset
from harness import ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.utils.checkpoint import checkpoint
from toys import (
    Block,
    check_equal,
    full_gradients,
    full_parameters,
    none_gradients,
    wrap,
    wrap_blocks,
)

import fsdpc

WIDTH, UNITS = 6, 7
WIRES = {"wire": {"FSDPC_COLLECTIVES": "wire"}}
if env.missing() is None:
    WIRES["sim"] = env.environment()
DOORS = ["FSDP", "fully_shard"]
KINDS = ["parameter", "gate", "depth", "none", "experts", "frozen", "nested"]


class Layer(nn.Module):
    """A unit. If `left` is true, a rank leaves parameters of the unit unused; `kind` determines
    which ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(WIDTH, 9)
        self.experts = nn.ModuleList(nn.Linear(9, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        if kind == "frozen":
            self.experts[0].requires_grad_(False)

    def forward(self, x: Tensor, left: bool, rank: int) -> Tensor:
        if left and self.kind == "depth":
            return x
        if left and self.kind == "none":
            return x * 0.5
        hidden = torch.tanh(self.first(x))
        if left and self.kind == "gate":
            return x + hidden[..., :WIDTH]
        chosen = [self.experts[rank % 2]] if left and self.kind == "experts" else self.experts
        out = x + sum(expert(hidden) for expert in chosen)
        return out if left and self.kind in ("parameter", "frozen", "nested") else out * self.scale


class Stack(nn.Module):
    def __init__(self, kind: str, reentrant: bool | None = None) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(UNITS))
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor, left: set[int], rank: int) -> Tensor:
        x = self.enter(x)
        for i, layer in enumerate(self.layers):
            if self.reentrant is None:
                x = layer(x, rank=rank, left=i in left) if i % 2 else layer(x, i in left, rank)
            else:
                x = checkpoint(layer, x, i in left, rank, use_reentrant=self.reentrant)
        return self.leave(x)


def stack(kind: str, reentrant: bool | None = None) -> Stack:
    torch.manual_seed(0)
    return Stack(kind, reentrant)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return the loss of a forward. In step 0, rank 0 leaves parameters of unit 2 unused, and rank
    1 leaves parameters of unit 4 unused. In later steps, these are other units."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    left = {(2 + 2 * rank + step) % UNITS} | ({UNITS - 1} if step == 2 and rank else set())
    return model(torch.randn(3, WIDTH, generator=generator), left, rank).square().mean()


def shard(door: str, model: Stack, **options) -> nn.Module:
    nested = [layer.first for layer in model.layers if layer.kind == "nested"]
    if door == "fully_shard":
        for module in (*nested, *model.layers, model):
            fsdpc.fully_shard(module, **options)
        return model
    for layer in model.layers:
        if layer.kind == "nested":
            layer.first = wrap("fsdpc", layer.first, use_orig_params=True, **options)
    layers = [wrap("fsdpc", layer, use_orig_params=True, **options) for layer in model.layers]
    model.layers = nn.ModuleList(layers)
    return wrap("fsdpc", model, use_orig_params=True, **options)


# --- programs: backwards of one step -----------------------------------------------------------


def plainly(model: nn.Module, rank: int, step: int, scale: float) -> None:
    (scale * loss_of(model, rank, step)).backward()


def in_one_backward(model: nn.Module, rank: int, step: int, scale: float) -> None:
    """Run one backward for the sum of the losses of two forwards."""
    (scale * (loss_of(model, rank, step) + loss_of(model, rank, step + 10))).backward()


def in_micro_batches(model: nn.Module, rank: int, step: int, scale: float) -> None:
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        if isinstance(model, fsdpc.FSDPModule):
            model.set_requires_gradient_sync(False)
        (scale * loss_of(model, rank, step)).backward()
    if isinstance(model, fsdpc.FSDPModule):
        model.set_requires_gradient_sync(True)
    (scale * loss_of(model, rank, step + 10)).backward()


def twice(model: nn.Module, rank: int, step: int, scale: float) -> None:
    loss = scale * loss_of(model, rank, step)
    loss.backward(retain_graph=True)
    loss.backward()


def after_a_forward_without_backward(model: nn.Module, rank: int, step: int, scale: float) -> None:
    loss_of(model, rank, step + 20)
    plainly(model, rank, step, scale)


def compare(model: nn.Module, reference: nn.Module, step: int) -> None:
    expected = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in reference.named_parameters()
    }
    without = {name for name, p in reference.named_parameters() if p.grad is None}
    if isinstance(model, fsdpc.FSDPModule):
        params = dict(model.named_parameters())
        got = {
            name: torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
            for name, p in params.items()
        }
        assert {name for name, p in params.items() if p.grad is None} == without
        values = {name: p.detach().full_tensor() for name, p in params.items()}
    else:
        got, values = full_gradients(model), full_parameters(model)
        assert none_gradients(model) == without
    check_equal(got, expected, f"gradients of step {step}", rtol=1e-5, atol=1e-6)
    want = {name: p.detach() for name, p in reference.named_parameters()}
    check_equal(values, want, f"parameters before step {step}", rtol=1e-5, atol=1e-6)


def train(
    rank: int,
    world: int,
    kind: str,
    door: str = "FSDP",
    program: Callable[..., None] = plainly,
    reentrant: bool | None = None,
    **options,
) -> list[tuple[str, int]]:
    model, reference = shard(door, stack(kind, reentrant), **options), stack(kind, reentrant)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference)]
    for step in range(3):
        program(model, rank, step, 1.0)
        for each in range(world):
            program(reference, each, step, 1.0 / world)
        compare(model, reference, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    tree = (model._fsdpc_state if door == "fully_shard" else model)._tree
    return [(entry["op"], entry["unit"]) for entry in tree.core.trace()]


@pytest.mark.parametrize(
    ("world", "wire", "door", "kind"), subset(itertools.product([2, 3], WIRES, DOORS, KINDS))
)
def test_units_that_ranks_use_in_part(world: int, wire: str, door: str, kind: str):
    """No unit uses spare memory, and all ranks gather and reduce the units in the same order."""
    traces = run_ranks(train, world, env=WIRES[wire], kind=kind, door=door)
    for trace in traces:
        assert "spare" not in {op for op, _ in trace}
        for turn in ("pack", "reduce"):
            assert [e for e in trace if e[0] == turn] == [e for e in traces[0] if e[0] == turn]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_under_checkpointing(wire: str, reentrant: bool):
    run_ranks(train, 2, env=WIRES[wire], kind="parameter", reentrant=reentrant)


PROGRAMS = [in_one_backward, in_micro_batches, twice, after_a_forward_without_backward]


@pytest.mark.parametrize(
    ("wire", "door", "program"),
    subset(itertools.product(WIRES, DOORS, PROGRAMS)),
)
def test_programs(wire: str, door: str, program: Callable[..., None]):
    run_ranks(train, 2, env=WIRES[wire], kind="parameter", door=door, program=program)


OPTIONS: dict[str, dict[str, object]] = {
    "post": {"backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "none": {"backward_prefetch": None},
    "forward": {"forward_prefetch": True},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
}


@pytest.mark.parametrize(
    ("wire", "options", "poison"), subset(itertools.product(WIRES, OPTIONS, ["0", "1"]))
)
def test_options(wire: str, options: str, poison: str):
    environment = WIRES[wire] | {"FSDPC_POISON": poison}
    run_ranks(train, 2, env=environment, kind="experts", **OPTIONS[options])


class Spare(Block):
    """A block with a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))


@ranks(1, 2)
def test_gradients_beside_an_unused_parameter_are_summed_before_the_end(rank, world):
    """From the second backward on, a unit's gradients are summed before backward ends, although one
    of its parameters is never used."""
    model = wrap_blocks("fsdpc", nn.Sequential(Spare(), Spare()), Spare, use_orig_params=True)
    last, seen = model.module[1]._unit, []
    for step in range(5):
        x = torch.randn(2, 6, generator=torch.manual_seed(2 * step + rank), requires_grad=True)
        x.register_hook(lambda grad: seen.append(all(full.grad is None for full in last.full)))
        model(x).sum().backward()
        model.zero_grad()
    assert seen == [False, True, True, True, True]

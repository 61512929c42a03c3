"""Tests of Muon on shards: steps equal unsharded steps to the bit, on any number of ranks."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks
from torch import nn
from toys import full_parameters, wrap

import fsdpc
from fsdpc import optim
from fsdpc.optim import _owned
from fsdpc.optim._places import local_of

# Flat and tall matrices: shard boundaries lie between their rows and inside their rows. There are
# also a matrix with fewer rows than ranks, a fused matrix, experts, an embedding and a vector.
SHAPES = {
    "embed": (16, 12),
    "qkv": (36, 12),
    "up": (37, 12),
    "down": (12, 37),
    "tiny": (1, 5),
    "experts": (3, 6, 10),
    "bias": (7,),
    "conv": (4, 3, 3, 3),
}
OPTIONS: dict[str, Any] = {
    "lr": 0.02,
    "adamw_lr": 0.003,
    "split": {"qkv": [12, 16, 8], "experts": (1, [2, 8])},
    "matrices": lambda name, shape: False if name.endswith("conv") else None,
}
STEPS = 3


class Model(nn.Module):
    """A model with given gradients: multiples of 2^-10, so that the mean over ranks is exact."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            self.register_parameter(name, nn.Parameter(values.to(dtype)))

    def forward(self, step: int, without: str = "") -> torch.Tensor:
        params = {name: getattr(self, name) for name in SHAPES if name != without}
        return sum((p * wanted(name, step).to(p)).sum() for name, p in params.items())


def wanted(name: str, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + len(name))
    return torch.randint(-512, 512, SHAPES[name], generator=generator).float() / 1024


def make(model: nn.Module, **more: Any) -> optim.Muon:
    return optim.Muon(model.named_parameters(), **{**OPTIONS, **more})


def train(model: nn.Module, optimizer: Any, steps: range, clip: bool = False) -> list[float]:
    norms = []
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        norms.append(float(optimizer.step_and_clip(1.0)) if clip else optimizer.step())
    return norms


def alone(clip: bool = False, dtype: torch.dtype = torch.float32, **more: Any) -> nn.Module:
    model = Model(dtype)
    train(model, make(model, **more), range(STEPS), clip)
    return model


def states_of(optimizer: Any) -> dict[Any, torch.Tensor]:
    """Return copies of all states on this rank."""
    return {
        (number, name): local_of(value).clone()
        for number, state in enumerate(optimizer.state.values())
        for name, value in state.items()
    }


def scaled_steps(model: nn.Module, optimizer: Any, rank: int) -> None:
    """Run three steps with a loss scale; an infinity on rank 1 makes all ranks skip
    the second step.
    """
    from fsdpc.sharded_grad_scaler import ShardedGradScaler

    sharded = isinstance(model, (fsdpc.FullyShardedDataParallel, fsdpc.FSDPModule))
    scaler = (ShardedGradScaler if sharded else torch.amp.GradScaler)("cpu", init_scale=4.0)
    for step, factor in ((4, 1.0), (5, float("inf") if rank == 1 else 1.0), (6, 1.0)):
        optimizer.zero_grad()
        (scaler.scale(model(step)) * factor).backward()
        before = states_of(optimizer)
        scaler.step(optimizer)
        scaler.update()
        kept = states_of(optimizer)
        same = all(torch.equal(value, kept[key]) for key, value in before.items())
        assert (same and before.keys() == kept.keys()) == (step == 5), step
    assert scaler.get_scale() == 2.0


def check(model: nn.Module, expected: nn.Module) -> None:
    values = dict(expected.named_parameters())
    for key, value in full_parameters(model).items():
        assert torch.equal(value, values[key].detach()), key


@ranks(2, 3, 4)
def test_shards_of_fsdp(rank, world):
    _owned.ROUND = 100  # small, so that a step takes several rounds
    for use_orig_params in (True, False):
        for more in ({}, {"ns_dtype": torch.float32, "nesterov": False}):
            model = wrap("fsdpc", Model(), use_orig_params=use_orig_params)
            optimizer = make(model, **more)
            train(model, optimizer, range(STEPS))
            check(model, alone(**more))
            assert len(optimizer._routes[0].rounds) > 1


@ranks(2, 3, 4)
def test_rows_of_dtensors(rank, world):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (world,))
    for shard in (fully_shard, fsdpc.fully_shard):
        model = Model()
        shard(model, mesh=mesh)
        train(model, make(model), range(STEPS))
        for (name, found), value in zip(
            model.named_parameters(), alone().parameters(), strict=True
        ):
            assert torch.equal(found.full_tensor(), value), (shard, name)


@ranks(4)
def test_replicas(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = fsdpc.ShardingStrategy.HYBRID_SHARD
    model = wrap("fsdpc", Model(), device_mesh=mesh, sharding_strategy=hybrid)
    train(model, make(model), range(STEPS))
    expected = alone()
    check(model, expected)
    model = fsdpc.fully_shard(Model(), mesh=mesh)
    train(model, make(model), range(STEPS))
    for found, value in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), value)


@ranks(2)
def test_steps_with_and_without(rank, world):
    """Steps equal unsharded steps with clipping, accumulated gradients, a parameter without a
    gradient, a scheduler, a closure and a loss scale. If one rank has an infinite gradient, all
    ranks skip the step.
    """

    def run(model: nn.Module, sharded: bool) -> optim.Muon:
        optimizer = make(model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model(0, "down").backward()
        optimizer.step()
        assert not any(optimizer.state[p] for p in model.parameters() if p.grad is None)
        schedule.step()
        optimizer.zero_grad()
        with model.no_sync() if sharded else contextlib.nullcontext():
            model(1).backward()
        model(2).backward()
        optimizer.step()
        optimizer.zero_grad()
        closed: list[torch.Tensor] = []

        def closure() -> torch.Tensor:
            closed.append(model(3))
            closed[0].backward()
            return closed[0]

        assert optimizer.step(closure) is closed[0]
        scaled_steps(model, optimizer, rank if sharded else 1)
        return optimizer

    expected = Model()
    run(expected, False)
    model = wrap("fsdpc", Model(), use_orig_params=True)
    run(model, True)
    check(model, expected)
    clipped = wrap("fsdpc", Model(), use_orig_params=True)
    norms = train(clipped, make(clipped), range(STEPS), clip=True)
    other = Model()
    torch.testing.assert_close(
        norms, train(other, make(other), range(STEPS), True), rtol=1e-12, atol=0
    )
    for key, value in full_parameters(clipped).items():
        torch.testing.assert_close(value, dict(other.named_parameters())[key].detach())


@ranks(2, 3)
def test_state_dicts(rank, world):
    """The full state dict of a sharded Muon equals that of an unsharded Muon,
    and both resume equally from it.
    """
    FSDP = fsdpc.FullyShardedDataParallel
    expected = Model()
    whole = make(expected)
    train(expected, whole, range(STEPS))
    for use_orig_params in (True, False):
        model = wrap("fsdpc", Model(), use_orig_params=use_orig_params)
        optimizer = make(model)
        train(model, optimizer, range(STEPS))
        saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        for name, state in saved["state"].items():
            for key, value in whole.state[getattr(expected, name)].items():
                assert torch.equal(state[key], value), (name, key)
        resumed = make(model, lr=1.0)
        resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, saved))
        other, single = copy.deepcopy(expected), None
        single = make(other, lr=1.0)
        single.load_state_dict(
            FSDP.rekey_optim_state_dict(saved, fsdpc.OptimStateKeyType.PARAM_ID, other)
        )
        train(model, resumed, range(STEPS, STEPS + 1))
        train(other, single, range(STEPS, STEPS + 1))
        check(model, other)


@ranks(2)
def test_what_others_do_on_shards_is_said(rank, world):
    """fsdpc warns about torch's Muon, which runs on DTensors with other results, and about torch's
    Adafactor, which raises an error.
    """
    model = fsdpc.fully_shard(nn.Sequential(nn.Linear(12, 33, bias=False)))
    said = []
    for kind in (optim.Muon, torch.optim.Muon, torch.optim.Muon):
        optimizer = kind(model.parameters())
        model(torch.ones(2, 12)).sum().backward()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            optimizer.step()
        said.append([str(each.message) for each in found])
    assert not said[0] and "fsdpc.optim.Muon has the rule" in said[1][0]
    assert not said[2], "said once"
    prodigy = type("Prodigy", (torch.optim.SGD,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (model, wrap("fsdpc", nn.Linear(8, 16))):
            prodigy([{"params": each.parameters(), "fsdp_in_use": True}], lr=0.1).step()
    with pytest.warns(UserWarning, match="sums over whole parameters.*fsdpc.optim.AdamW has"):
        prodigy(model.parameters(), lr=0.1).step()
    with pytest.warns(UserWarning, match="fsdpc.optim.Adafactor has"), pytest.raises(RuntimeError):
        torch.optim.Adafactor(model.parameters()).step()


def leave_before_the_step(rank: int, world: int, door: str) -> None:
    model = wrap("fsdpc", Model()) if door == "FSDP" else fsdpc.fully_shard(Model())
    optimizer = make(model)
    train(model, optimizer, range(1))
    model(1).backward()
    if rank == 1:
        raise KeyError("lost")
    optimizer.step()


@pytest.mark.parametrize("door", ["FSDP", "fully_shard"])
def test_a_rank_that_does_not_come_is_named(door):
    first, _ = run_ranks(leave_before_the_step, 2, faults=True, door=door)
    assert first.error is not None and "PeerError" in first.error_types, first
    assert "matrices to their owners" in first.error and "rank 1" in first.error

"""Tests of fsdpc.optim.Average.

Averages equal, to the bit, those that the tests compute from whole parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from toys import by_door, full_parameters, loss_of, tokens, toy

import fsdpc
from fsdpc import checkpoint, optim
from fsdpc.optim import Average
from fsdpc.optim import average as average_module
from fsdpc.optim.average import average_of
from fsdpc.sharded_grad_scaler import ShardedGradScaler

STEPS = 4
MAKERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, eps=1e-3),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9),
    "AdamW8bit": lambda p: optim.AdamW8bit(p, lr=1e-2),
    "AdamMini": lambda p: optim.AdamMini(p, lr=1e-2, block=lambda name, shape: shape[-1]),
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole values of a model under any kind of sharding."""
    if isinstance(model, fsdpc.FullyShardedDataParallel):
        return {name: value.clone() for name, value in full_parameters(model).items()}
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p.detach()).clone()
        for name, p in model.named_parameters()
    }


class ByHand:
    """An exponential average of whole values."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def take(self, model: nn.Module, decay: float) -> None:
        for name, value in values_of(model).items():
            if name in self.values:
                self.values[name].lerp_(value.float(), 1 - decay)
            else:
                self.values[name] = value.float()


def step(model: nn.Module, optimizer: Any, rank: int, number: int) -> None:
    loss_of(model, tokens(rank, number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(value.float(), wanted[name].to(value.dtype).float()), name


@ranks(1, 2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
@pytest.mark.parametrize("kind", list(MAKERS))
def test_equals_an_average_by_hand(rank, world, door, kind):
    """Inside `applied` the model has the averages; then its values return, also after an error."""
    model = by_door(door, toy())
    optimizer = MAKERS[kind](list(model.parameters()))
    average, by_hand = Average(optimizer, 0.75), ByHand()
    for number in range(STEPS):
        step(model, optimizer, rank, number)
        by_hand.take(model, 0.75)
    values = values_of(model)
    with pytest.raises(ZeroDivisionError), average.applied(model):
        same(values_of(model), by_hand.values)
        with torch.no_grad():
            loss_of(model, tokens(0, 0))
        with pytest.raises(RuntimeError, match="parameters have their averages there"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="averages already"), average.applied(model):
            pass
        _ = 1 // 0
    same(values_of(model), values)
    step(model, optimizer, rank, STEPS)
    by_hand.take(model, 0.75)
    with average.applied(model):
        same(values_of(model), by_hand.values)


PASSES: dict[str, Callable[[Any], Any]] = {
    **{kind: make for kind, make in MAKERS.items() if kind != "torch"},
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "plain SGD": lambda p: optim.SGD(p, lr=0.1),
    "Lion": lambda p: optim.Lion(p),
    "AdamWBF16": lambda p: optim.AdamWBF16(p),
}


@pytest.mark.parametrize("kind", list(PASSES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_pass_of_the_step_takes_the_values(kind, dtype, monkeypatch):
    """Each step after the first averages the new values of the parameters inside its own pass.

    The averages equal those of torch's lerp to the bit. One group has its own decay, and one
    parameter gets no gradient in one step.
    """
    if dtype == torch.float64 and kind in ("AdamW8bit", "AdamMini", "AdamWBF16"):
        pytest.skip("float32 and narrower")
    params = [nn.Parameter(torch.randn(n).to(dtype)) for n in (5000, 77, 1300)]
    groups = [{"params": params[:2]}, {"params": params[2:], "average_decay": 0.3}]
    optimizer = PASSES[kind](groups)
    average, wanted = Average(optimizer, 0.9), {}
    seconds: list[int] = []
    plain = average_module.foreach_lerp
    monkeypatch.setattr(
        average_module,
        "foreach_lerp",
        lambda averages, *rest: (seconds.append(len(averages)), plain(averages, *rest)),
    )
    for number in range(5):
        for param in params:
            rests = param is params[1] and number == 3
            param.grad = None if rests else torch.randn(param.shape).to(dtype)
        optimizer.step()
        for param in params:
            value = param.detach().to(average.of(param).dtype)
            decay = 0.3 if param is params[2] else 0.9
            wanted.setdefault(param, value.clone()).lerp_(value, 1 - decay)
            assert torch.equal(average.of(param), wanted[param])
    assert seconds == [1]  # foreach_lerp ran only for the parameter without a gradient


def test_values_that_a_hook_changes_behind_the_step():
    param = nn.Parameter(torch.ones(4))
    optimizer = optim.SGD([param], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: param.data.clamp_(min=0.95))
    average = Average(optimizer, 0.5)
    for _ in range(3):
        param.grad = torch.ones(4)
        optimizer.step()
    assert torch.equal(param, average.of(param))


@ranks(1, 2)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_training_does_not_see_evaluations_of_averages(rank, world, door):
    models = [by_door(door, toy()) for _ in range(2)]
    optimizers = [MAKERS["AdamW"](list(model.parameters())) for model in models]
    average = Average(optimizers[0], 0.5)
    for number in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, rank, number)
        with average.applied(models[0]), torch.no_grad():
            loss_of(models[0], tokens(0, 0))
    same(values_of(models[0]), values_of(models[1]))


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "torch", "plain SGD"])
def test_a_parameter_that_is_used_late(kind):
    first, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    make = MAKERS.get(kind, lambda p: optim.SGD(p, lr=0.1))
    optimizer = make([first, late])
    average = Average(optimizer, 0.5)
    for number in range(3):
        first.grad = torch.ones(3)
        late.grad = torch.ones(3) if number == 2 else None
        optimizer.step()
    assert torch.equal(average.of(late), late) and not torch.equal(average.of(first), first)


def test_loading_through_torchs_state_dict_functions():
    """To load states, torch's functions first run a step that creates the optimizer's states."""

    def made(steps):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = made(2)
    saved = get_optimizer_state_dict(model, optimizer)
    again, second = made(0)
    average = Average(second, 0.5)
    set_optimizer_state_dict(again, second, saved)
    with pytest.raises(KeyError):
        average.of(again.weight)
    assert "averaged" not in second.param_groups[0]


def test_rules_of_torch():
    """Average equals torch's AveragedModel with its exponential and its uniform rule.

    The average is taken in steps 2, 4 and 6.
    """
    for decay, rule in (
        (0.9, torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)),
        (None, torch.optim.swa_utils.get_swa_multi_avg_fn()),
    ):
        model = toy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        theirs = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=rule)
        average = Average(optimizer, decay, every=2, after=2)
        for number in range(8):
            step(model, optimizer, 0, number)
            if number in (2, 4, 6):
                theirs.update_parameters(model)
        wanted = dict(theirs.module.named_parameters())
        for name, param in model.named_parameters():
            torch.testing.assert_close(average.of(param), wanted[name].detach(), rtol=1e-6, atol=0)


def test_a_groups_own_decay_and_warm_up():
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    groups = [{"params": [first], "average_decay": 0.0}, {"params": [second]}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    average = Average(optimizer, Average.warm_up(0.9))
    for _ in range(3):
        first.grad, second.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
    assert torch.equal(average.of(first), first)
    wanted = torch.zeros(3).lerp(torch.full((3,), -1.0), 1 - 2 / 11)
    assert torch.equal(average.of(second), wanted.lerp(torch.full((3,), -2.0), 1 - 3 / 12))


@ranks(2)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_narrow_parameters_have_wide_averages(rank, world, door):
    model = by_door(door, toy(dtype=torch.bfloat16))
    optimizer = optim.AdamWBF16(model.parameters(), lr=1e-3)
    average, by_hand = Average(optimizer, 0.99), ByHand()
    for number in range(STEPS):
        step(model, optimizer, rank, number)
        by_hand.take(model, 0.99)
    values = values_of(model)
    with average.applied(model):
        same(values_of(model), by_hand.values)
    same(values_of(model), values)
    assert all(average.of(p).dtype == torch.float32 for p in model.parameters())


def trained(rank: int, door: str, kind: str = "AdamW") -> tuple[nn.Module, Any, Average]:
    model = by_door(door, toy())
    optimizer = MAKERS[kind](list(model.parameters()))
    return model, optimizer, Average(optimizer, 0.5)


def save(rank, world, door, path, kind):
    model, optimizer, average = trained(rank, door, kind)
    for number in range(STEPS):
        step(model, optimizer, 0, number)
    checkpoint.save(f"{path}/both", model, optimizer)
    with average.applied(model):
        checkpoint.save(f"{path}/averages", model)
        if rank == 0:
            torch.save(values_of(model), f"{path}/values")
        else:
            values_of(model)
        with pytest.raises(RuntimeError, match="averages there instead of their values"):
            checkpoint.save(f"{path}/mixed", model, optimizer)


def load(rank, world, door, path, kind):
    model, optimizer, average = trained(rank, door, kind)
    checkpoint.load(f"{path}/both", model, optimizer)
    assert all(group["averaged"] == STEPS for group in optimizer.param_groups)
    wanted = torch.load(f"{path}/values")
    with average.applied(model):
        same(values_of(model), wanted)
    step(model, optimizer, 0, STEPS)
    alone, _, _ = trained(rank, door)
    checkpoint.load(f"{path}/averages", alone)
    same(values_of(alone), wanted)


@pytest.mark.parametrize("kind", ["AdamW", "AdamW8bit", "AdamMini"])
@pytest.mark.parametrize("doors", [("orig", "fully_shard"), ("fully_shard", "flat")])
def test_checkpoints_keep_averages(doors, kind, tmp_path):
    """Checkpoints keep averages, also for optimizers whose states belong to whole parameters."""
    run_ranks(save, 3, door=doors[0], path=str(tmp_path), kind=kind)
    run_ranks(load, 2, door=doors[1], path=str(tmp_path), kind=kind)


@ranks(2)
def test_optimizer_state_dicts_of_fsdp_keep_averages(rank, world):
    def whole(model, optimizer):
        return fsdpc.FullyShardedDataParallel.optim_state_dict(model, optimizer)

    model, optimizer, _ = trained(rank, "orig")
    for number in range(STEPS):
        step(model, optimizer, rank, number)
    saved = whole(model, optimizer)
    again, second, average = trained(rank, "flat")
    F = fsdpc.FullyShardedDataParallel
    second.load_state_dict(F.optim_state_dict_to_load(again, second, saved))
    found = whole(again, second)["state"]
    for name, state in saved["state"].items():
        assert torch.equal(state["average"], found[name]["average"]), name
    for param in again.parameters():
        assert average.of(param).shape == param.shape


@pytest.mark.parametrize("way", ["state dict", "checkpoint"])
def test_a_loaded_average_keeps_its_dtype(way, tmp_path):
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([param], lr=0.1)
    average = Average(optimizer, 0.999)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
    other = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    second = torch.optim.SGD([other], lr=0.1)
    loaded = Average(second, 0.999)
    if way == "checkpoint":
        checkpoint.save(tmp_path / "c", nn.ParameterList([param]), optimizer)
        checkpoint.load(tmp_path / "c", nn.ParameterList([other]), second)
    else:
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(loaded.of(other), average.of(param))
    assert second.param_groups[0]["averaged"] == 3


@pytest.mark.parametrize("scalers", [torch.amp.GradScaler, ShardedGradScaler])
def test_a_skipped_step_is_not_taken(scalers):
    param = nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([param], lr=0.1)
    average = Average(optimizer, 0.5)
    scaler = scalers("cpu", init_scale=2.0)
    for infinite in (False, True, False):
        scaler.scale((param * (float("inf") if infinite else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["averaged"] == 2 and average.of(param).isfinite().all()


@ranks(2)
def test_units_that_step_in_backward(rank, world):
    model = by_door("fully_shard", toy())
    optimizer = optim.in_backward(model, MAKERS["AdamW"])
    average, by_hand = Average(optimizer, 0.75), ByHand()
    for number in range(STEPS):
        loss_of(model, tokens(rank, number)).backward()
        optimizer.step()
        by_hand.take(model, 0.75)
    with average.applied(model):
        same(values_of(model), by_hand.values)


@ranks(1, 2)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_a_backward_that_steps_units_in_a_block(rank, world, door):
    """A backward inside `applied` raises before it steps a unit; later training is unaffected."""
    models = [by_door(door, toy()) for _ in range(2)]
    optimizers = [optim.in_backward(model, MAKERS["AdamW"]) for model in models]
    averages = [Average(optimizer, 0.5) for optimizer in optimizers]
    for number in range(3):
        if number:
            with pytest.raises(RuntimeError, match=r"steps unit blocks.1 inside Average.applied"):
                with averages[0].applied(models[0]):
                    loss_of(models[0], tokens(rank, 9)).backward()
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, tokens(rank, number)).backward()
            optimizer.step()
    same(values_of(models[0]), values_of(models[1]))
    with averages[0].applied(models[0]), averages[1].applied(models[1]):
        same(values_of(models[0]), values_of(models[1]))


@ranks(1, 2)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_what_is_written_in_a_block_is_said(rank, world, door, tmp_path):
    model, optimizer, average = trained(rank, door)
    step(model, optimizer, rank, 0)
    checkpoint.save(tmp_path / "saved", model)
    values, zeros = values_of(model), {k: 0 * v for k, v in model.state_dict().items()}
    for write in (
        lambda: checkpoint.load(tmp_path / "saved", model),
        lambda: model.load_state_dict(zeros),
        torch.optim.SGD(model.parameters(), lr=1.0).step,
    ):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with pytest.raises(RuntimeError, match=r"written inside Average.applied\(\), by a load"):
            with average.applied(model):
                write()
        same(values_of(model), values)


@ranks(1, 2)
def test_no_block_for_gathered_parameters(rank, world):
    """Average.applied raises if parameters are gathered.

    Gathered parameters would not show the averages. After a forward the root of ``fully_shard`` is
    gathered. Inside ``summon_full_params`` all units are gathered.
    """
    match = "gathered parameters in place of its own"
    for door in ("orig", "flat", "fully_shard"):
        model, optimizer, average = trained(rank, door)
        step(model, optimizer, rank, 0)
        if door == "fully_shard":
            loss = loss_of(model, tokens(rank, 1))
            with pytest.raises(RuntimeError, match=match), average.applied(model):
                pass
            loss.backward()
        else:
            with fsdpc.FullyShardedDataParallel.summon_full_params(model):
                with pytest.raises(RuntimeError, match=match), average.applied(model):
                    pass
        step(model, optimizer, rank, 1)


@pytest.mark.parametrize("where", ["disk", "ram"])
def test_states_that_are_offloaded(where, tmp_path):
    model = toy()
    away = optim.Disk(tmp_path) if where == "disk" else None
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, offload=away)
    average, by_hand = Average(optimizer, 0.75), ByHand()
    for number in range(STEPS):
        step(model, optimizer, 0, number)
        by_hand.take(model, 0.75)
    with average.applied(model):
        same(values_of(model), by_hand.values)


def test_low_copies_follow():
    param = nn.Parameter(torch.ones(4))
    low = torch.ones(4, dtype=torch.bfloat16)
    optimizer = optim.AdamW([param], lr=0.5)
    optimizer.write_copies({param: low})
    average = Average(optimizer, 0.5)
    for _ in range(2):
        param.grad = torch.ones(4)
        optimizer.step()
    value = low.clone()
    model = nn.ParameterList([param])
    with average.applied(model):
        assert torch.equal(low, param.bfloat16()) and not torch.equal(low, value)
    assert torch.equal(low, value)


def test_bad_numbers_and_second_averages_are_refused():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for bad in ({"decay": 1.5}, {"every": 0}, {"after": -1}):
        with pytest.raises(ValueError, match=r"decay|every"):
            Average(optimizer, **bad)
    with pytest.raises(TypeError, match="calls no hooks"):
        Average(type("Wrapper", (), {})())
    Average(optimizer)
    with pytest.raises(NotImplementedError, match="has an average"):
        Average(optimizer)
    with pytest.raises(KeyError, match="no step of the optimizer"):
        average_of(optimizer).of(optimizer.param_groups[0]["params"][0])

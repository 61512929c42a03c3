"""Tests of small parameters that torch's optimizers step as one tensor. The results must be bitwise
equal to those of torch's fully_shard.
"""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

import fsdpc
from fsdpc._companions import runs as engine_runs
from fsdpc._companions.runs import Runs
from fsdpc._torch import INIT_GROUP

STEPS = 5


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 3)
        self.down = nn.Linear(2 * width + 3, width)
        self.gate = nn.Parameter(torch.full((3, width), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate.sum(0) * self.down(torch.tanh(self.up(self.norm(x))))


class Training:
    """A sharded model with its optimizer."""

    def __init__(self, shard, make, dim=None, layers=2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Layer(6) for _ in range(layers)], nn.Linear(6, 5))
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        options = {}
        if dim is not None:
            even = mesh.size()
            options["shard_placement_fn"] = lambda p: (
                Shard(dim) if p.dim() > dim and p.shape[dim] % even == 0 else None
            )
        for layer in self.model[:layers]:
            shard(layer, mesh=mesh, **options)
        shard(self.model, mesh=mesh, **options)
        self.optimizer = make(list(self.model.parameters()))

    def backward(self, step: int) -> None:
        made = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
        self.model(torch.randn(4, 6, generator=made)).square().sum().backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[torch.Tensor]:
        found = list(self.model.parameters())
        for param in found[:]:
            found += self.optimizer.state.get(param, {}).values()
        return [local(tensor).detach().clone() for tensor in found]

    def runs(self) -> int:
        """Return how many runs the plans of all parameter groups have, or 0 if there are no plans.
        A run is several small parameters that are stepped as one tensor."""
        collect = self.optimizer.__dict__.get(INIT_GROUP)
        made = None if collect is None else collect.args[1]
        return sum(len(plan.runs) for plan in made._plans.values()) if made else 0


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def adamw(**options):
    return lambda params: torch.optim.AdamW(params, **{"lr": 0.01, "eps": 1e-3, **options})


def adam(**options):
    return lambda params: torch.optim.Adam(params, **{"lr": 0.01, "weight_decay": 0.1, **options})


def halves(params):
    return torch.optim.AdamW(
        [{"params": params[:3], "lr": 0.02}, {"params": params[3:], "weight_decay": 0.3}]
    )


# --- programs: what happens before a step ---------------------------------------------------------


def nothing(one, step):
    pass


def freezing(one, step):
    if step == 3:
        for param in list(one.model.parameters())[2:5]:
            param.requires_grad_(False)


def keeping_gradients(one, step):
    one.optimizer.zero_grad(set_to_none=step % 2 == 0)
    one.backward(step + 100)


def dropping_gradients(one, step):
    dropped = {2: slice(0, 3), 3: slice(4, 5), 4: slice(3, 9)}.get(step)
    if dropped:
        one.backward(step + 50)
        one.optimizer.zero_grad()
        one.backward(step + 60)
        for param in list(one.model.parameters())[dropped]:
            param.grad = None
        one.optimizer.step()
        one.optimizer.zero_grad()


def replacing_gradients(one, step):
    one.backward(step + 30)
    for param in list(one.model.parameters())[step : step + 2]:
        param.grad = param.grad * 3 + 1
    one.optimizer.step()
    one.optimizer.zero_grad()


def loading(one, step):
    if step in (1, 4):
        state = copy.deepcopy(one.optimizer.state_dict())
        one.step(step + 70)
        one.optimizer.load_state_dict(state)


def loading_by_names(one, step):
    if step in (1, 4):
        state = get_optimizer_state_dict(one.model, one.optimizer)
        state = copy.deepcopy(state)
        one.step(step + 70)
        set_optimizer_state_dict(one.model, one.optimizer, state)


def saving(one, step):
    if step in (1, 4):
        file = io.BytesIO()
        torch.save(one.optimizer.state_dict(), file)
        one.step(step + 70)
        file.seek(0)
        one.optimizer.load_state_dict(torch.load(file, weights_only=False))


def copying_the_optimizer(one, step):
    if step == 3:
        state = one.optimizer.state_dict()
        one.optimizer = type(one.optimizer)(one.model.parameters(), lr=0.5)
        one.optimizer.load_state_dict(state)


def scheduling(one, step):
    if step == 1:
        one.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(one.optimizer, 4)
    if step > 0:
        one.optimizer.step()  # without gradients
        one.schedule.step()


def adding_a_group(one, step):
    groups = one.optimizer.param_groups
    if step == 2:
        last = [groups[0]["params"].pop() for _ in range(3)]
        for param in last:
            one.optimizer.state.pop(param, None)
        one.optimizer.add_param_group({"params": last, "lr": 0.1})


def moving_states(one, step):
    for state in one.optimizer.state.values():
        if step % 2:
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].clone()
        else:
            state["step"] = state["step"].clone()


def writing_states(one, step):
    for index, state in enumerate(one.optimizer.state.values()):
        if step == 3 and index == 4:
            state["step"].fill_(1)
            state["exp_avg"].mul_(0.5)


def switching_amsgrad(one, step):
    if step == 2:
        for state in one.optimizer.state.values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        one.optimizer.param_groups[0]["amsgrad"] = True


def loading_parameters(one, step):
    if step == 3:
        state = one.model.state_dict()
        values = {name: value.detach() * 2 for name, value in state.items()}
        one.model.load_state_dict(values)


PROGRAMS = [
    (adamw(), nothing),
    (adamw(foreach=True), nothing),
    (adamw(amsgrad=True, maximize=True), nothing),
    (adamw(lr=torch.tensor(0.01)), nothing),
    (adam(), scheduling),
    (adam(foreach=True, amsgrad=True), loading),
    (halves, nothing),
    (halves, dropping_gradients),
    (adamw(), freezing),
    (adamw(), keeping_gradients),
    (adamw(), dropping_gradients),
    (adamw(), replacing_gradients),
    (adamw(), loading),
    (adamw(), loading_by_names),
    (adamw(), saving),
    (adamw(), copying_the_optimizer),
    (adamw(), adding_a_group),
    (adamw(), moving_states),
    (adamw(), writing_states),
    (adamw(), switching_amsgrad),
    (adamw(), loading_parameters),
]


def outcome(shard, make, before, dim=None, layers=2):
    one = Training(shard, make, dim, layers)
    results = []
    for step in range(STEPS):
        before(one, step)
        one.step(step)
        results.append(one.values())
    return one, results


def assert_same(results, others, what):
    for step, (values, wanted) in enumerate(zip(results, others, strict=True)):
        assert len(values) == len(wanted), (what, step)
        for index, (value, want) in enumerate(zip(values, wanted, strict=True)):
            assert torch.equal(value, want), (what, step, index, value, want)


def without_runs(make, before, dim=None, layers=2):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_runs, "_CLASSES", ())
        one, results = outcome(fsdpc.fully_shard, make, before, dim, layers)
    assert one.runs() == 0
    return results


@ranks(2, 3)
def test_programs(rank, world):
    for number, (make, before) in list(enumerate(PROGRAMS))[:: 1 if world == 2 else 3]:
        what = f"program {number} ({before.__name__})"
        one, results = outcome(fsdpc.fully_shard, make, before, layers=1)
        assert one.runs() > 0, what
        if world == 2:  # torch adds the gradients of three ranks in another order
            _, others = outcome(torch_fully_shard, make, before, layers=1)
            assert_same(results, others, what)
        else:
            assert_same(results, without_runs(make, before, layers=1), what)


@ranks(2)
def test_parameters_cut_along_a_later_dimension(rank, world):
    one, results = outcome(fsdpc.fully_shard, adamw(), nothing, 1)
    assert one.runs() > 0
    assert_same(results, without_runs(adamw(), nothing, 1), "dimension 1")


@ranks(2)
def test_objects_and_versions(rank, world):
    one = Training(fsdpc.fully_shard, adamw())
    one.step(0)
    params = list(one.model.parameters())
    before = [
        (param, list(one.optimizer.state[param].values()), param._version, local(param)._version)
        for param in params
    ]
    used = (params[0] * params[0]).sum()
    one.step(1)
    assert one.runs() == 3
    for param, states, version, inner in before:
        assert all(a is b for a, b in zip(one.optimizer.state[param].values(), states, strict=True))
        assert param._version > version and local(param)._version > inner
        assert all(local(t).untyped_storage().nbytes() == local(t).nbytes for t in states)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()


@ranks(2)
def test_states_that_a_program_moves_each_time_are_moved_seldom(rank, world):
    one = Training(fsdpc.fully_shard, adamw())
    moved = []
    move = engine_runs._move
    engine_runs._move = lambda *args: (moved.append(None), move(*args))
    counts = []
    for step in range(40):
        for state in one.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                local(state[name]).data = local(state[name]).clone()
        one.step(step)
        counts.append(len(moved))
    assert 0 < counts[-1] == counts[20]


@ranks(2)
def test_padding_stays_zero_and_memory_goes_with_the_states(rank, world):
    one = Training(fsdpc.fully_shard, adamw())
    for step in range(3):
        one.step(step)
    plan = next(iter(one.optimizer.__dict__[INIT_GROUP].args[1]._plans.values()))
    covered = sum(local(param).numel() for param in one.model.parameters())
    for column in list(zip(*plan.runs, strict=True))[:-1]:
        assert sum(int(torch.count_nonzero(flat)) for flat in column) <= covered
    assert sum(flat.nbytes for flat in plan.flats) < 3 * 4 * (covered + 64 * len(plan.flats) * 8)
    one.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    flats = len(plan.flats)
    del plan, column
    gc.collect()
    one.step(9)
    plan = next(iter(one.optimizer.__dict__[INIT_GROUP].args[1]._plans.values()))
    assert len(plan.flats) == flats


@ranks(2)
def test_what_has_no_runs(rank, world):
    for options in ({"fused": True}, {"eps": 0.0}):
        one = Training(fsdpc.fully_shard, adamw(**options))
        one.step(0)
        one.step(1)
        assert one.runs() == 0, options
    assert isinstance(one.optimizer.__dict__[INIT_GROUP].args[1], Runs)

"""Tests of ``copy.deepcopy`` of sharded models: averaged weights, target networks, teachers and
snapshots. Each test is a program as users write it, compared with the same program on an unsharded
model.
"""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from checkpoints import mixed
from checkpoints import same as whole_values_equal
from flags import Pair, both_ways, every_strategy, sharded
from harness import ranks, run_ranks, shorten_deadlines
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toys import (
    Reference,
    check_equal,
    check_gradients,
    full_parameters,
    loss_of,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)


def same(model, plain, what, rtol=1e-6):
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    check_equal(full_parameters(model), expected, what, rtol=rtol)


def same_output(model, plain, rank, step=7):
    with torch.no_grad():
        got, expected = model(tokens(rank, step)), plain(tokens(rank, step))
    check_equal({"output": got}, {"output": expected}, "output", rtol=1e-5)


# --- averages ------------------------------------------------------------------------------------


@ranks(1, 2, 3)
@both_ways
@pytest.mark.parametrize("average", ["mean", "ema"])
def test_averaged_model(rank, world, use_orig_params, average):
    pair = Pair(rank, use_orig_params=use_orig_params)
    how = {"multi_avg_fn": get_ema_multi_avg_fn(0.7)} if average == "ema" else {}
    averages = [AveragedModel(m, **how) for m in pair.models]
    for _ in range(4):
        pair.step()
        for averaged, model in zip(averages, pair.models, strict=True):
            averaged.update_parameters(model)
    sharded, plain = (averaged.module for averaged in averages)
    same(pair.model, pair.plain, "the model itself")
    same(sharded, plain, "the average")
    same_output(averages[0], averages[1], rank)
    state = averages[0].state_dict()
    assert list(state) == list(averages[1].state_dict())
    check_equal(state, averages[1].state_dict(), "state dict", rtol=1e-6)
    again = AveragedModel(wrap_blocks("fsdpc", toy(seed=3), use_orig_params=use_orig_params))
    again.load_state_dict(state)
    same(again.module, plain, "a loaded average")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.lin(x))))


@ranks(2)
@both_ways
def test_averages_of_buffers(rank, world, use_orig_params):
    torch.manual_seed(0)
    plain = Normed()
    model = wrap_blocks("fsdpc", copy.deepcopy(plain), nn.Linear, use_orig_params=use_orig_params)
    how = {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": True}
    averages = [AveragedModel(m, **how) for m in (model, plain)]
    batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        for averaged, m in zip(averages, (model, plain), strict=True):
            m(batch).sum()
            averaged.update_parameters(m)
    buffers = [dict(a.module.state_dict()) for a in averages]
    check_equal(buffers[0], buffers[1], "buffers", rtol=1e-6)


@ranks(2, 3)
@both_ways
def test_ema_by_hand_over_parameters(rank, world, use_orig_params):
    pair = Pair(rank, use_orig_params=use_orig_params)
    emas = [copy.deepcopy(m).eval().requires_grad_(False) for m in pair.models]
    for _ in range(3):
        pair.step()
        for ema, model in zip(emas, pair.models, strict=True):
            with torch.no_grad():
                for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
    same(emas[0], emas[1], "the average")
    same_output(*emas, rank)
    assert not any(p.requires_grad for p in emas[0].parameters())
    assert all(p.requires_grad for p in pair.model.parameters())


@ranks(2)
@both_ways
def test_shadow_parameters_stored_and_restored(rank, world, use_orig_params):
    """Averages are kept as clones of the parameters and put into the model for evaluation."""
    pair = Pair(rank, use_orig_params=use_orig_params)
    models = pair.models
    shadows = [[p.clone().detach() for p in m.parameters()] for m in models]
    for _ in range(3):
        pair.step()
        for shadow, model in zip(shadows, models, strict=True):
            for s, p in zip(shadow, model.parameters(), strict=True):
                s.sub_(0.25 * (s - p.detach()))
    stored = [[p.detach().clone() for p in m.parameters()] for m in models]
    for shadow, model in zip(shadows, models, strict=True):
        for s, p in zip(shadow, model.parameters(), strict=True):
            p.data.copy_(s)
    same_output(*models, rank)
    same(*models, "the average")
    for kept, model in zip(stored, models, strict=True):
        for s, p in zip(kept, model.parameters(), strict=True):
            p.data.copy_(s)
    pair.step()
    same(*models, "after it is restored")


# --- targets, teachers, snapshots ----------------------------------------------------------------


@ranks(2)
@both_ways
def test_target_network(rank, world, use_orig_params):
    """A target network gets hard updates by state dicts and soft updates by its parameters; its
    outputs are the goals of the loss.
    """
    pair = Pair(rank, use_orig_params=use_orig_params)
    targets = [copy.deepcopy(m) for m in pair.models]
    for number in range(4):
        batch = tokens(rank, number)
        for target, model in zip(targets, (pair.model, pair.reference.compute), strict=True):
            if model is pair.reference.compute:
                pair.reference.loss_of = lambda m, b, t=target: (
                    (m(b) - t(b).detach() * 0.9).square().mean()
                )
                pair.reference.backward(batch)
            else:
                with torch.no_grad():
                    goal = target(batch) * 0.9
                (model(batch) - goal).square().mean().backward()
        check_gradients("fsdpc-rounded", pair.model, pair.reference, f"of step {number}")
        for optimizer in pair.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for target, model in zip(targets, pair.models, strict=True):
            if number % 2:
                target.load_state_dict(model.state_dict())
            else:
                for t, p in zip(target.parameters(), model.parameters(), strict=True):
                    t.data.mul_(0.5).add_(p.data, alpha=0.5)
        same(*targets, f"target after step {number}")


@ranks(1, 2, 3)
@both_ways
@every_strategy
def test_copy_trains_alone(rank, world, use_orig_params, strategy):
    """A model is copied before its first forward, after it and after a step; then the copy and the
    original train independently.
    """
    pair = Pair(rank, use_orig_params=use_orig_params, **sharded(strategy, world))
    for moment in range(3):
        if moment == 1:
            with torch.no_grad():
                pair.model(tokens(rank, 0))
        if moment == 2:
            pair.step()
        before = full_parameters(pair.model)
        twin = copy.deepcopy(pair.model)
        assert type(twin) is type(pair.model) and twin.training
        assert not {p.data_ptr() for p in twin.parameters() if p.numel()} & {
            p.data_ptr() for p in pair.model.parameters() if p.numel()
        }
        reference = Reference(pair.plain)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (twin, reference.master)]
        for number in range(2):
            loss_of(twin, tokens(rank, number)).backward()
            reference.backward(tokens(rank, number))
            check_gradients("fsdpc", twin, reference, f"of the copy {moment}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        check_equal(full_parameters(pair.model), before, "the original")
    pair.step()
    same(pair.model, pair.plain, "the original, trained on")


@ranks(4)
@both_ways
def test_hybrid_copy(rank, world, use_orig_params):
    options = sharded(ShardingStrategy.HYBRID_SHARD, world)
    groups = options.pop("groups")
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params, **options)
    loss_of(model, tokens(rank, 0)).backward()
    twin = copy.deepcopy(model)
    assert all(p.grad is None for p in twin.parameters())
    check_equal(full_parameters(twin), full_parameters(model), "the copy")
    reference = Reference(toy(), groups=groups)
    loss_of(twin, tokens(rank, 1)).backward()
    reference.backward(tokens(rank, 1))
    check_gradients("fsdpc", twin, reference, "of the copy")
    with type(twin).state_dict_type(twin, StateDictType.SHARDED_STATE_DICT):
        assert hasattr(twin.state_dict()["head.bias"], "device_mesh")


@ranks(2)
@both_ways
def test_low_precision_frozen_offloaded(rank, world, use_orig_params):
    model = toy()
    model.embed.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(False)
    model.register_buffer("scale", torch.ones(3))
    model = wrap_blocks(
        "fsdpc",
        model,
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload_params=True),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    )
    loss_of(model, tokens(rank, 0)).backward()
    if use_orig_params:
        model.head.weight.requires_grad_(False)  # after wrapping
    twin = copy.deepcopy(model)
    assert [p.requires_grad for p in twin.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]
    assert twin.mixed_precision is model.mixed_precision
    states = model.state_dict(), twin.state_dict()
    check_equal(states[1], states[0], "state dicts")
    assert states[1]["scale"].dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(twin(tokens(rank, 1)), model(tokens(rank, 1)))
    assert twin.embed.weight.dtype == torch.float32 or not use_orig_params


@ranks(2, 3)
@both_ways
def test_parameters_of_every_kind(rank, world, use_orig_params):
    """A copy keeps 0-dim, bfloat16, integer and tied parameters, extra state,
    and a module that is at two places.
    """
    model = wrap_blocks("fsdpc", mixed(seed=1), use_orig_params=use_orig_params)
    twin = copy.deepcopy(model)
    state = twin.state_dict()
    assert list(state) == list(model.state_dict())
    whole_values_equal(state, mixed(seed=1).state_dict())
    assert twin.module.again is twin.module.stage[0]
    assert [p.dtype for p in twin.parameters()] == [p.dtype for p in model.parameters()]
    twin.load_state_dict(mixed(seed=2).state_dict())
    whole_values_equal(twin.state_dict(), mixed(seed=2).state_dict())
    whole_values_equal(model.state_dict(), mixed(seed=1).state_dict())


@ranks(2)
@both_ways
def test_part_of_a_model(rank, world, use_orig_params):
    """A plain module that contains units can be copied, and so can a unit that is not the root."""
    pair = Pair(rank, use_orig_params=use_orig_params)
    pair.step()
    for part, plain in ((pair.model.blocks, pair.plain.blocks), (pair.model.blocks[1],) * 2):
        if part is plain:
            plain = pair.plain.blocks[1]
        twin = copy.deepcopy(part)
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
        first = twin[0] if isinstance(twin, nn.ModuleList) else twin
        expected = plain[0] if isinstance(plain, nn.ModuleList) else plain
        check_equal({"y": first(x).detach()}, {"y": expected(x).detach()}, "output", rtol=1e-5)
    pair.step()
    same(pair.model, pair.plain, "the whole")


@ranks(2)
@both_ways
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_with_its_optimizer(rank, world, use_orig_params, first):
    """A model and its optimizer are copied as a snapshot, from which training can go on."""
    pair = Pair(rank, use_orig_params=use_orig_params)
    pair.step()
    if first == "optimizer" and not use_orig_params:
        with pytest.raises(TypeError, match="copy the model first"):
            copy.deepcopy((pair.optimizers[0], pair.model))
        return
    both = (pair.model, pair.optimizers[0])
    if first == "optimizer":
        optimizer, model = copy.deepcopy(both[::-1])
    else:
        model, optimizer = copy.deepcopy(both)
    pair.step()
    after = full_parameters(pair.model)
    loss_of(model, tokens(rank, 1)).backward()
    optimizer.step()
    check_equal(full_parameters(model), after, "the snapshot, stepped on")
    states = [type(model).optim_state_dict(m, o) for m, o in ((model, optimizer), both)]
    names = states[0]["state"].keys()
    assert names == states[1]["state"].keys() and len(names) == len(after)
    for name in names:
        check_equal(states[0]["state"][name], states[1]["state"][name], name)


@ranks(2)
@both_ways
def test_either_may_be_deleted(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    loss_of(model, tokens(rank, 0)).backward()
    for keep in ("copy", "original"):
        twin = copy.deepcopy(model)
        loss_of(twin, tokens(rank, 0)).backward()
        gone = weakref.ref(twin if keep == "original" else model)
        units = [weakref.ref(m._handle) for m in type(twin).fsdp_modules(gone())]
        model = model if keep == "original" else twin
        del twin
        gc.collect()
        assert gone() is None and all(unit() is None for unit in units), keep
        model.zero_grad()
        loss_of(model, tokens(rank, 1)).backward()
        same(model, toy(), "values")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.table = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.table.weight
        self.seen = []
        self.first.register_forward_hook(self.count)

    def count(self, module, args, output):
        self.seen.append(len(args))

    def forward(self, x):
        return self.out(self.again(torch.tanh(self.first(self.table(x)))))


@ranks(2)
@both_ways
def test_ties_hooks_and_ignored_parameters(rank, world, use_orig_params):
    torch.manual_seed(0)
    plain = Tied()
    model = copy.deepcopy(plain)
    options = {"use_orig_params": use_orig_params, "ignored_states": [model.first.bias]}
    model = wrap("fsdpc", model, **options)
    twin = copy.deepcopy(model)
    inner = twin.module
    assert inner.again is inner.first and inner.first is not model.module.first
    assert inner.first.bias in twin._ignored.params
    assert inner.first.bias is not model.module.first.bias
    x = tokens(rank, 0, vocabulary=6)
    check_equal({"y": twin(x).detach()}, {"y": plain(x).detach()}, "output", rtol=1e-6)
    assert len(inner.seen) == 2 and not model.module.seen
    assert list(twin.state_dict()) == list(model.state_dict())


def experts(rank, world):
    import fsdpc

    model = fsdpc.mark_data_dependent(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model = wrap_blocks("fsdpc", model, nn.Linear, use_orig_params=True)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(rank))
    model(x).sum().backward()
    twin = copy.deepcopy(model)
    twin(x).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (p.numel() == 0)
        assert p.grad is None or torch.equal(p.grad, q.grad)


def test_marked_modules_over_a_wire():
    run_ranks(experts, 2, env={"FSDPC_COLLECTIVES": "wire"})


# --- refused -------------------------------------------------------------------------------------


@ranks(2)
def test_pickles_and_shallow_copies_are_refused(rank, world):
    model = wrap_blocks("fsdpc", toy())
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be pickled.*state_dict"):
            attempt(model)


@ranks(2)
@both_ways
def test_copies_are_made_between_steps(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)

    def attempt(*args):
        with pytest.raises(RuntimeError, match=r"cannot be copied .*between steps"):
            copy.deepcopy(model)

    handles = [
        model.blocks[0].register_forward_pre_hook(attempt),
        model.head.register_full_backward_hook(attempt),
    ]
    loss = loss_of(model, tokens(rank, 0))
    loss.backward()
    for handle in handles:
        handle.remove()
    with type(model).summon_full_params(model):
        attempt()
    twin = copy.deepcopy(model)
    same(twin, toy(), "the copy")


def alone(rank, world):
    model = wrap_blocks("fsdpc", toy())
    shorten_deadlines()
    if rank == 0:
        copy.deepcopy(model)
    else:
        model(tokens(rank, 0))


def test_a_copy_on_one_rank_only_is_an_error():
    outcomes = run_ranks(alone, 2, faults=True)
    assert any(o.error and "construction of unit" in o.error for o in outcomes), outcomes
    assert not any(o.returned for o in outcomes)

"""Communication hooks, torch's own and a user's: their calls, and the gradients that they leave."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks, shorten_deadlines
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.utils.checkpoint import checkpoint
from toys import (
    PRECISIONS,
    Block,
    Reference,
    check_equal,
    check_gradients,
    full_gradients,
    loss_of,
    none_gradients,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

import fsdpc

SHARDED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
ALL = [*SHARDED, ShardingStrategy.NO_SHARD]
STRATEGIES = pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
BOTH = pytest.mark.parametrize("use_orig_params", [True, False])
C10D = {"FSDPC_COLLECTIVES": "wire"}


class Calls:
    """A hook that records its arguments and averages over the ranks in rank order."""

    def __init__(self):
        self.seen = []

    def __call__(self, state, grad, output=None):
        self.seen.append((state, grad.shape, grad.dtype, None if output is None else output.shape))
        everyone = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, grad)
        total = everyone[0].clone()
        for other in everyone[1:]:
            total += other
        total *= 1.0 / len(everyone)
        if output is None:
            grad.copy_(total)
        else:
            output.copy_(total.view(len(everyone), -1)[dist.get_rank()])


def default_hook(strategy):
    if strategy is ShardingStrategy.NO_SHARD:
        return default_hooks.allreduce_hook
    return default_hooks.reduce_scatter_hook


def state_of(low=False):
    kind = default_hooks.LowPrecisionState if low else default_hooks.DefaultState
    return kind(dist.group.WORLD)


@ranks(1, 2, 3)
@STRATEGIES
@BOTH
def test_default_hooks_equal_the_engines_own_sum(rank, world, engine, strategy, use_orig_params):
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    model = wrap_blocks(engine, toy(), **options)
    plain = wrap_blocks(engine, toy(), **options)
    model.register_comm_hook(state_of(), default_hook(model.sharding_strategy))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(m, tokens(rank, step)).backward()
        check_equal(full_gradients(model), full_gradients(plain), f"step {step}", rtol=1e-5)
        for optimizer in optimizers:
            optimizer.step()


def calls_match(rank, world, engine, strategy, use_orig_params):
    model = toy()
    model = wrap_blocks(engine, model, sharding_strategy=strategy, use_orig_params=use_orig_params)
    hook, state = Calls(), object()
    model.register_comm_hook(state, hook)
    units = type(model).fsdp_modules(model)
    assert all(unit._comm_hook is hook and unit._comm_hook_state is state for unit in units)
    reference = Reference(toy())
    for step in range(2):
        loss_of(model, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        assert len(hook.seen) == 3 * (step + 1)
    check_gradients(engine, model, reference, "by the hook")
    for seen, grad, dtype, output in hook.seen:
        assert seen is state and len(grad) == 1 and dtype == torch.float32
        if strategy is ShardingStrategy.NO_SHARD:
            assert output is None
        else:
            assert output == (grad[0] // world,) and grad[0] % world == 0
    sizes = [grad[0] for _, grad, _, _ in hook.seen]
    assert sizes[0] == sizes[1] == sizes[3] and sizes[2] == sizes[5]
    assert sizes[2] >= sum(p.numel() for n, p in toy().named_parameters() if "blocks" not in n)


@ranks(2, 3)
@STRATEGIES
@BOTH
def test_a_users_hook(rank, world, engine, strategy, use_orig_params):
    calls_match(rank, world, engine, strategy, use_orig_params)


@ranks(2, env=C10D)
@STRATEGIES
def test_a_users_hook_over_a_wire(rank, world, strategy):
    calls_match(rank, world, "fsdpc", strategy, True)


def accumulate(rank, world, engine, strategy, synced):
    """Train two steps of three micro-batches. All micro-batches are synchronized if `synced`,
    else only the last of each step.
    """
    model = wrap_blocks(engine, toy(), sharding_strategy=strategy, use_orig_params=True)
    hook = Calls()
    model.register_comm_hook(None, hook)
    reference = Reference(toy())
    for step in range(2):
        for micro in range(3):
            sync = synced or micro == 2
            with contextlib.nullcontext() if sync else model.no_sync():
                loss_of(model, tokens(rank, step, micro)).backward()
            reference.backward(tokens(rank, step, micro), sync=sync)
        check_gradients(engine, model, reference, f"step {step}")
        assert len(hook.seen) == (9 if synced else 3) * (step + 1)
        model.zero_grad()
        reference.master.zero_grad()


@ranks(2)
@STRATEGIES
@pytest.mark.parametrize("synced", [True, False])
def test_accumulation(rank, world, strategy, synced):
    accumulate(rank, world, "fsdpc", strategy, synced)


@ranks(2, env=C10D)
def test_accumulation_over_a_wire(rank, world):
    accumulate(rank, world, "fsdpc", ShardingStrategy.FULL_SHARD, False)


@ranks(2)
@STRATEGIES
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_compressing_hooks(rank, world, strategy, low):
    """torch's fp16 and bf16 hooks leave the mean of rounded gradients, in the parameters' dtype."""
    hook = {
        torch.float16: default_hooks.fp16_compress_hook,
        torch.bfloat16: default_hooks.bf16_compress_hook,
    }[low]
    model = wrap_blocks("fsdpc", toy(), sharding_strategy=strategy)
    model.register_comm_hook(state_of(low=True), hook)
    loss_of(model, tokens(rank, 0)).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    plain = toy()
    loss_of(plain, tokens(rank, 0)).backward()
    expected = {}
    for name, p in plain.named_parameters():
        half = p.grad.to(low)
        dist.all_reduce(half)
        expected[name] = half.div_(2).float()
    check_equal(full_gradients(model), expected, "compressed", rtol=torch.finfo(low).eps)


@ranks(2)
def test_sums_in_half_precision_as_torch_rounds_them(rank, world):
    """A default hook adds in reduce_dtype, as torch's FSDP does; on two ranks, the sums equal
    torch's to the bit. The engine's own sums add the rounded gradients exactly, and its sums over
    replicas are not rounded.
    """
    for strategy in ALL:
        options = {
            "sharding_strategy": strategy,
            "use_orig_params": True,
            "mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16),
        }
        theirs, hooked, own = (
            wrap_blocks(engine, toy(), **options)
            for engine in ("torch.distributed.fsdp", "fsdpc", "fsdpc")
        )
        hooked.register_comm_hook(state_of(), default_hook(strategy))
        for model in (theirs, hooked, own):
            loss_of(model, tokens(rank, 0)).backward()
        expected = full_gradients(theirs)
        check_equal(full_gradients(hooked), expected, strategy.name)
        plain = toy()
        loss_of(plain, tokens(rank, 0)).backward()
        finer = 0
        for (name, p), got in zip(
            plain.named_parameters(), full_gradients(own).values(), strict=True
        ):
            exact = (p.grad.bfloat16() if strategy in SHARDED else p.grad).double()
            dist.all_reduce(exact)
            assert torch.equal(got.double(), (exact / world).float().double()), name
            finer += not torch.equal(got, expected[name])
        assert finer


@ranks(2)
@BOTH
def test_reduce_dtype_of_mixed_precision(rank, world, use_orig_params):
    for precision in PRECISIONS[1:3]:
        model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params, **precision.options())
        hook = Calls()
        model.register_comm_hook(None, hook)
        loss_of(model, tokens(rank, 0)).backward()
        assert {dtype for _, _, dtype, _ in hook.seen} == {precision.wire}
        reference = Reference(toy(), precision)
        reference.backward(tokens(rank, 0))
        check_gradients("fsdpc", model, reference, precision.name)


@ranks(2)
def test_a_unit_of_two_dtypes_calls_once_for_each(rank, world):
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2).double())
    model[0].register_forward_hook(lambda module, args, out: out.double())
    model = wrap("fsdpc", model, use_orig_params=True)
    hook = Calls()
    model.register_comm_hook(None, hook)
    model(torch.ones(2, 5) * (rank + 1)).sum().backward()
    assert {dtype for _, _, dtype, _ in hook.seen} == {torch.float32, torch.float64}
    assert len(hook.seen) == 2


@ranks(2)
def test_another_dtype_in_data(rank, world):
    """A hook may replace the output's data by a tensor of another dtype, as torch's hooks do."""

    def quantise(state, grad, output):
        grad.data = grad.data.to(torch.bfloat16)
        everyone = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(everyone, grad)
        output.data = sum(e.double() for e in everyone).view(2, -1)[dist.get_rank()]

    model = wrap_blocks("fsdpc", toy())
    model.register_comm_hook(None, quantise)
    loss_of(model, tokens(0, 0)).backward()
    plain = toy()
    loss_of(plain, tokens(0, 0)).backward()
    expected = {n: 2 * p.grad.bfloat16().float() for n, p in plain.named_parameters()}
    check_equal(full_gradients(model), expected, "quantised")


@ranks(2)
def test_what_does_not_fit_is_refused(rank, world):
    def shrink(state, grad, output):
        output.data = output.data[:3]

    model = wrap_blocks("fsdpc", toy())
    model.register_comm_hook(None, shrink)
    with pytest.raises(ValueError, match=r"unit blocks\.1 left a gradient that does not fit.* 3"):
        loss_of(model, tokens(rank, 0)).backward()


@ranks(2)
def test_an_exception_of_the_hook_comes_out_and_the_model_goes_on(rank, world):
    failing = True

    def fail(state, grad, output):
        if failing:
            raise KeyError("mine")
        default_hooks.reduce_scatter_hook(state, grad, output)

    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    model.register_comm_hook(state_of(), fail)
    with pytest.raises(KeyError, match="mine"):
        loss_of(model, tokens(rank, 0)).backward()
    failing = False
    model.zero_grad()
    loss_of(model, tokens(rank, 1)).backward()
    reference = Reference(toy())
    reference.backward(tokens(rank, 1))
    expected = reference.gradients()
    check_equal(full_gradients(model), expected, "after an exception", rtol=1e-5)


class Experts(nn.Module):
    """A model whose input chooses the experts and their order. The last expert never runs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inlet = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, batch):
        x, picked = batch
        x = self.inlet(x)
        for i in picked:
            x = torch.tanh(self.experts[i](x))
        return x


def batch_of(rank, step):
    picks = [[[0, 1], [1, 0]], [[0], [0, 2]], [[2, 1], []], [[0, 1], [0, 1]], [[1, 1, 0], [0]]]
    torch.manual_seed(10 * step + rank)
    return torch.randn(2, 4), picks[step][rank]


def experts_loss(model, batch):
    return model(batch).square().sum()


@ranks(2)
@STRATEGIES
def test_units_that_run_by_data(rank, world, strategy):
    """Ranks may run different units, no unit, or a unit twice: nothing hangs,
    and gradients equal those of the reference.
    """
    model = Experts()
    for i in range(4):
        model.experts[i] = wrap(
            "fsdpc", model.experts[i], sharding_strategy=strategy, use_orig_params=True
        )
    model = wrap("fsdpc", model, sharding_strategy=strategy, use_orig_params=True)
    hook = Calls()
    model.register_comm_hook(None, hook)
    reference = Reference(Experts(), loss_of=experts_loss)
    for step in range(5):
        before = len(hook.seen)
        experts_loss(model, batch_of(rank, step)).backward()
        reference.backward(batch_of(rank, step))
        assert none_gradients(model) == reference.none_gradients()
        assert len(hook.seen) - before <= 4, "a unit that no rank ran makes no call"
        check_equal(full_gradients(model), reference.gradients(), f"step {step}", rtol=1e-6)
        model.zero_grad()
        reference.master.zero_grad()


@ranks(2, env=C10D)
def test_a_gather_that_meets_a_hook(rank, world):
    """gloo ends the process if a message meets a message of another length. Both ranks must raise
    an error before they send such messages.
    """
    options = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True}
    model = wrap("fsdpc", toy(), **options)
    model.register_comm_hook(None, Calls())
    loss = loss_of(model, tokens(rank, 0))
    words = (
        "rank 0 is at the communication hook of Toy while rank 1 is at the gather of unit Toy",
        "rank 1 is at the gather of unit Toy while rank 0 is at a communication hook",
    )[rank]
    with pytest.raises(fsdpc.MismatchError, match=words):
        loss.backward() if rank == 0 else loss_of(model, tokens(rank, 1))


@ranks(2)
def test_no_shard_beside_sharded_units(rank, world):
    model = toy()
    model.blocks[0] = wrap(
        "fsdpc", model.blocks[0], sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True
    )
    model = wrap("fsdpc", model, use_orig_params=True)
    hook = Calls()
    model.register_comm_hook(None, hook)
    reference = Reference(toy())
    loss_of(model, tokens(rank, 0)).backward()
    reference.backward(tokens(rank, 0))
    check_gradients("fsdpc", model, reference, "mixed strategies")
    assert [output is None for _, _, _, output in hook.seen] == [True, False]


@ranks(2)
def test_the_hook_survives_a_conversion(rank, world):
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    hook = Calls()
    model.register_comm_hook(None, hook)
    loss_of(model, tokens(rank, 0)).backward()
    model.double()
    model.zero_grad()
    loss_of(model, tokens(rank, 0)).backward()
    assert [dtype for _, _, dtype, _ in hook.seen] == [torch.float32] * 3 + [torch.float64] * 3


@ranks(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_not_with_replicas(rank, world, strategy):
    shard, replicate = dist.new_subgroups(2)[0], None
    for index in range(2):
        group = dist.new_group([index, index + 2])
        replicate = group if rank % 2 == index else replicate
    model = wrap(
        "fsdpc",
        toy(),
        process_group=(shard, replicate),
        sharding_strategy=ShardingStrategy[strategy],
    )
    with pytest.raises(AssertionError, match="not supported for hybrid"):
        model.register_comm_hook(None, default_hooks.reduce_scatter_hook)


def one_stays_away(rank, world):
    model = wrap_blocks("fsdpc", toy())
    model.register_comm_hook(None, Calls())
    loss = loss_of(model, tokens(rank, 0))
    shorten_deadlines(here=rank == 0)
    if rank == 0:
        loss.backward()
    else:
        dist.barrier()  # rank 1 waits here, and runs no backward


def test_a_rank_that_does_not_come_is_named():
    outcomes = run_ranks(one_stays_away, 2, faults=True)
    assert not outcomes[0].returned
    assert "communication hook of blocks.1" in outcomes[0].error and "rank 1" in outcomes[0].error


@ranks(2)
def test_frozen_units_make_no_call(rank, world):
    model = toy()
    model.blocks[0].requires_grad_(False)
    model = wrap_blocks("fsdpc", model, use_orig_params=True)
    hook = Calls()
    model.register_comm_hook(None, hook)
    loss_of(model, tokens(rank, 0)).backward()
    assert len(hook.seen) == 2


@ranks(2)
def test_keep_low_precision_grads(rank, world):
    mixed = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    for strategy in ALL:
        model = wrap_blocks("fsdpc", toy(), mixed_precision=mixed, sharding_strategy=strategy)
        model.register_comm_hook(None, Calls())
        loss_of(model, tokens(rank, 0)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert grads and all(grad.dtype == torch.bfloat16 for grad in grads)


class Twice(nn.Module):
    """A model that checkpoints both uses of its block,
    so that the block's gradients are complete twice in a backward.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


@ranks(2)
def test_a_unit_complete_twice_in_a_backward(rank, world):
    """Gradients that arrive after the unit was reduced are reduced at the end of backward."""
    torch.manual_seed(rank)
    x = torch.randn(3, 6, requires_grad=True)
    model = Twice()
    model.block = wrap("fsdpc", model.block, use_orig_params=True)
    model = wrap("fsdpc", model, use_orig_params=True)
    hook = Calls()
    model.register_comm_hook(None, hook)
    reference = Reference(Twice(), loss_of=lambda model, x: model(x).square().sum())
    model(x).square().sum().backward()
    reference.backward(x)
    assert len(hook.seen) == 2
    check_equal(full_gradients(model), reference.gradients(), "used twice", rtol=1e-5)


@ranks(1)
def test_in_a_fake_process_group(rank, world):
    """Nothing is sent in a fake process group, but hooks are called as in a real group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    model = wrap_blocks("fsdpc", toy(), use_orig_params=True)
    sizes = []
    model.register_comm_hook(sizes, lambda state, grad, output: state.append(len(grad)))
    loss_of(model, tokens(0, 0)).backward()
    assert len(sizes) == 3 and all(size % 4 == 0 for size in sizes)

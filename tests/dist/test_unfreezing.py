"""Parameters that were frozen when they were wrapped and are trained later (gradual unfreezing),
against the unsharded model over several optimizer steps.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from flags import Pair, adam, both_ways, every_strategy, params_of, sharded
from harness import ranks
from torch.distributed.fsdp import CPUOffload, ShardingStrategy, StateDictType
from toys import (
    PRECISIONS,
    Precision,
    check_equal,
    full_gradients,
    loss_of,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

BODY = ("embed", "blocks", "norm")


def blocks_frozen(rank, use_orig_params=True, **options):
    return Pair(rank, frozen=("blocks",), use_orig_params=use_orig_params, **options)


def unfreeze(pair, *paths):
    """One part after the other, two steps with each."""
    pair.step()
    for path in paths:
        pair.set(path, True)
        pair.step()
        pair.step()


def gradual(pair):
    """The head first, then one part more every other step, from the top."""
    unfreeze(pair, "blocks.1", "blocks.0", "norm", "embed")


@ranks(1, 2, 3)
@both_ways
@every_strategy
def test_gradual_unfreezing(rank, world, use_orig_params, strategy):
    pair = blocks_frozen(rank, use_orig_params, **sharded(strategy, world))
    unfreeze(pair, "blocks.1", "blocks.0")


@ranks(1, 2, 3)
@pytest.mark.parametrize("wrapped", [wrap_blocks, wrap], ids=lambda w: w.__name__)
def test_gradual_unfreezing_of_single_parameters(rank, world, wrapped):
    pair = Pair(rank, frozen=BODY, use_orig_params=True, wrapped=wrapped)
    gradual(pair)


@ranks(2)
@pytest.mark.parametrize(
    "precision",
    [*PRECISIONS[1:], Precision("bf16 model", model=torch.bfloat16)],
    ids=lambda p: p.name,
)
def test_unfreezing_under_mixed_precision(rank, world, precision):
    plain = toy(dtype=precision.model)
    pair = Pair(rank, plain=plain, frozen=BODY, use_orig_params=True, precision=precision)
    gradual(pair)


@ranks(4)
@both_ways
def test_unfreezing_over_replicas(rank, world, use_orig_params):
    pair = blocks_frozen(
        rank,
        use_orig_params,
        **sharded(ShardingStrategy.HYBRID_SHARD, world),
    )
    unfreeze(pair, "blocks.0")


@ranks(2)
@both_ways
def test_unfreezing_with_offloaded_parameters(rank, world, use_orig_params):
    pair = blocks_frozen(
        rank,
        use_orig_params,
        cpu_offload=CPUOffload(offload_params=True),
    )
    pair.step()
    pair.set("blocks.0", True)
    pair.step()


@ranks(2, env={"FSDPC_COLLECTIVES": "c10d"})
@both_ways
def test_unfreezing_over_torchs_collectives(rank, world, use_orig_params):
    pair = blocks_frozen(rank, use_orig_params)
    unfreeze(pair, "blocks.0")


@ranks(2)
@both_ways
def test_a_model_that_is_frozen_as_a_whole(rank, world, use_orig_params):
    pair = Pair(rank, frozen=("",), use_orig_params=use_orig_params)
    assert not loss_of(pair.model, tokens(rank, 0)).requires_grad
    pair.set("blocks.1", True)
    pair.step()
    pair.set("", True)
    pair.step()


@ranks(2)
@both_ways
def test_unfrozen_before_the_first_forward(rank, world, use_orig_params):
    pair = blocks_frozen(rank, use_orig_params)
    pair.set("blocks", True)
    pair.step()
    pair.step()


@ranks(2)
@both_ways
def test_unfrozen_frozen_and_unfrozen(rank, world, use_orig_params):
    pair = blocks_frozen(rank, use_orig_params)
    for flag in (True, False, True, False, False, True):
        pair.set("blocks.0", flag)
        pair.step()


@ranks(2)
@both_ways
def test_unfrozen_between_forward_and_backward(rank, world, use_orig_params):
    """It takes effect with the next forward, as without sharding."""
    pair = blocks_frozen(rank, use_orig_params)
    pair.step()
    pair.step(lambda: pair.set("blocks.1", True))
    pair.step()


@ranks(1, 2, 3)
@both_ways
def test_unfrozen_while_gradients_accumulate(rank, world, use_orig_params):
    """What waits for other parameters of the unit is kept."""
    pair = Pair(rank, frozen=("blocks.0",), use_orig_params=use_orig_params)
    pair.accumulate(1)
    pair.set("blocks.0", True)
    pair.accumulate(2)
    pair.step()
    pair.step()


@ranks(2, 3)
def test_unfrozen_beside_gradients_that_wait(rank, world):
    pair = Pair(rank, frozen=("blocks.0.up",), use_orig_params=True)
    pair.step(zero=False)
    pair.accumulate(1)
    pair.set("blocks.0.up.weight", True)
    pair.accumulate(2)
    pair.step(zero=False)
    pair.set("blocks.0.up.bias", True)
    pair.step()


@ranks(2)
def test_gradients_that_wait_are_still_zeroed(rank, world):
    """zero_grad(set_to_none=False) before the forward that makes memory."""
    pair = Pair(rank, frozen=("blocks.0.up",), use_orig_params=True)
    pair.step()
    pair.accumulate(1)
    for model in pair.models:
        model.zero_grad(set_to_none=False)
    pair.reference.pending = [None] * len(pair.reference.pending)
    for p in pair.plain.parameters():
        p.grad = None
    pair.set("blocks.0.up.weight", True)
    loss_of(pair.model, pair.batch()).backward()
    pair.reference.backward(pair.batch())
    from toys import check_gradients

    check_gradients("fsdpc", pair.model, pair.reference, "after zeroing")


@ranks(2)
@both_ways
def test_the_optimizer_gets_groups_later(rank, world, use_orig_params):
    def trained_only(params):
        return adam([p for p in params if p.requires_grad])

    pair = blocks_frozen(
        rank,
        use_orig_params,
        optimizer_of=trained_only,
    )
    pair.step()
    for path in ("blocks.1", "blocks.0"):
        pair.set(path, True)
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            optimizer.add_param_group({"params": params_of(model, path), "lr": 3e-3})
        pair.step()
        pair.step()


@ranks(2, 3)
def test_objects_memory_and_gradients_stay(rank, world):
    pair = Pair(rank, frozen=("blocks.0.up",), use_orig_params=True)
    pair.step(zero=False)
    before = {n: (id(p), p.data_ptr(), p.shape) for n, p in pair.model.named_parameters()}
    grads = {n: p.grad.clone() for n, p in pair.model.named_parameters() if p.grad is not None}
    kept = [p.grad for p in pair.model.parameters() if p.grad is not None]
    values = [g.clone() for g in kept]
    pair.set("blocks.0.up", True)
    with torch.no_grad():
        pair.model(pair.batch())
    after = {n: (id(p), p.data_ptr(), p.shape) for n, p in pair.model.named_parameters()}
    assert before == after
    for name, p in pair.model.named_parameters():
        if name in grads:
            check_equal({name: p.grad}, {name: grads[name]}, "gradients after unfreezing")
        else:
            assert p.grad is None
    for old, value in zip(kept, values, strict=True):
        assert torch.equal(old, value)


@ranks(2)
@both_ways
def test_clipping_after_unfreezing(rank, world, use_orig_params):
    pair = blocks_frozen(rank, use_orig_params)
    pair.step()
    pair.set("blocks.0", True)
    for clip in ("model", "utils"):
        pair.backward()
        expected = torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01)
        if clip == "model":
            got = pair.model.clip_grad_norm_(0.01)
        else:
            got = torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 0.01)
        check_equal({"norm": got}, {"norm": expected}, clip, rtol=1e-6)
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        pair.step()


@ranks(2)
@both_ways
def test_state_dicts_after_unfreezing(rank, world, use_orig_params):
    """A run that is loaded into a model wrapped with everything trainable goes on alike."""
    pair = blocks_frozen(rank, use_orig_params)
    pair.step()
    pair.set("blocks", True)
    pair.step()
    kind = type(pair.model)
    state = pair.model.state_dict()
    optim = kind.full_optim_state_dict(pair.model, pair.optimizers[0], rank0_only=False)
    other = wrap_blocks("fsdpc", toy(3), use_orig_params=use_orig_params)
    other.load_state_dict(state)
    optimizer = adam(list(other.parameters()))
    shard = kind.shard_full_optim_state_dict(optim, other, optim=optimizer)
    optimizer.load_state_dict(shard)
    pair.model, pair.optimizers[0] = other, optimizer
    pair.step()
    pair.step()


@ranks(2)
@both_ways
def test_sharded_state_dicts_after_unfreezing(rank, world, use_orig_params):
    pair = blocks_frozen(rank, use_orig_params)
    kind = type(pair.model)
    pair.step()
    pair.set("blocks", True)
    pair.step()
    with kind.state_dict_type(pair.model, StateDictType.SHARDED_STATE_DICT):
        state = pair.model.state_dict()
        optim = kind.optim_state_dict(pair.model, pair.optimizers[0])
        pair.model.load_state_dict(state)
        loaded = kind.optim_state_dict_to_load(pair.model, pair.optimizers[0], optim)
    pair.optimizers[0].load_state_dict(loaded)
    pair.step()


@ranks(2)
def test_unfreezing_inside_summon(rank, world):
    pair = blocks_frozen(rank)
    pair.step()
    with type(pair.model).summon_full_params(pair.model):
        pair.set("blocks.0", True)
    pair.step()


@ranks(2)
def test_an_evaluation_first(rank, world):
    pair = blocks_frozen(rank)
    pair.step()
    pair.set("blocks.0", True)
    with torch.no_grad():
        pair.model(pair.batch())
    pair.step()


@ranks(2)
def test_other_units_hooks_stay(rank, world):
    """A communication hook sums the gradients of the unfrozen unit, too."""
    from torch.distributed.algorithms._comm_hooks import default_hooks

    pair = blocks_frozen(rank)
    state = default_hooks.DefaultState(process_group=torch.distributed.group.WORLD)
    pair.model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    pair.reference.world = world
    unfreeze(pair, "blocks.0")


@ranks(2, 3)
def test_unfreezing_other_parameters_on_a_rank(rank, world):
    """All ranks raise, and the parameter is named."""
    pair = blocks_frozen(rank)
    pair.step()
    for path in ("blocks.0.up",) if rank == 0 else ("blocks.0.up", "blocks.1.down"):
        for p in params_of(pair.model, path):
            p.requires_grad_(True)
    with pytest.raises(Exception, match="down.weight of unit blocks.1") as raised:
        pair.model(pair.batch())
    assert type(raised.value).__name__ == "MismatchError", raised.value


def one_sided(rank, world, use_orig_params, unfreezes):
    pair = blocks_frozen(rank, use_orig_params)
    pair.step()
    if rank == unfreezes:
        for p in params_of(pair.model, "blocks.1"):
            p.requires_grad_(True)
    with pytest.raises(Exception, match="unit blocks.1") as raised:
        loss_of(pair.model, pair.batch()).backward()
    kind, text = type(raised.value).__name__, str(raised.value)
    kinds = [None] * world
    torch.distributed.all_gather_object(kinds, kind)  # PeerError: quotes the first to notice
    assert "MismatchError" in kinds
    assert "has unfrozen parameter" in text and "norm.weight" in text, text
    assert "order of modules differs across ranks" in text
    assert kind in ("MismatchError", "PeerError"), kind


@ranks(2, 3)
@both_ways
@pytest.mark.parametrize("unfreezes", [0, 1])
def test_unfreezing_on_one_rank_only(rank, world, use_orig_params, unfreezes):
    """No wait until the deadline: the ranks that go on notice the one that waits for them."""
    one_sided(rank, world, use_orig_params, unfreezes)


@ranks(2, env={"FSDPC_COLLECTIVES": "c10d"})
@both_ways
@pytest.mark.parametrize("unfreezes", [0, 1])
def test_unfreezing_on_one_rank_only_over_torchs_collectives(
    rank, world, use_orig_params, unfreezes
):
    one_sided(rank, world, use_orig_params, unfreezes)


class Adapter(torch.nn.Module):
    """A frozen layer beside trainable ones, as LoRA has it."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = torch.nn.Linear(6, 2), torch.nn.Linear(2, 6)

    def forward(self, x):
        return torch.tanh(self.base(torch.tanh(x))) + self.up(self.down(x))


class Shift(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        return x + self.bias


@ranks(2, 3)
@both_ways
@pytest.mark.parametrize("before", [1, 2])
def test_graphs_from_before_the_unfreezing(rank, world, use_orig_params, before):
    """A backward through them, after backwards of either tree, keeps units while they are used."""

    def batch(number):
        generator = torch.Generator().manual_seed(10 * number + rank)
        return torch.randn(4, 6, generator=generator)

    def program(model, unfreeze):
        first = model(batch(0)).square().mean()
        for _ in range(before):
            first.backward(retain_graph=True)
        for number in range(before):
            model.zero_grad()
            if number == 0:
                unfreeze(model)
            loss = model(batch(number + 1)).square().mean()
            (loss + first if number == before - 1 else loss).backward()

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 6), Adapter(), Adapter(), Shift())
    reference = copy.deepcopy(plain)
    model = wrap_blocks("fsdpc", plain, Adapter, Shift, use_orig_params=use_orig_params)

    def unfreeze(model):
        for module in model.modules():
            if isinstance(module, Shift):
                for p in module.parameters():
                    p.requires_grad_()

    program(model, unfreeze)
    program(reference, unfreeze)
    for p in reference.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= world
    expected = {
        n: torch.zeros_like(p) if p.grad is None else p.grad
        for n, p in reference.named_parameters()
    }
    check_equal(full_gradients(model), expected, "gradients", rtol=1e-5, atol=1e-7)

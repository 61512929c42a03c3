"""Tests of parameters that are frozen or unfrozen after they were wrapped, as programs do it
(adversarial training, adapters, gradual unfreezing). The models are compared with unsharded models
over several optimizer steps.
"""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from flags import Pair, adam, both_ways, every_strategy, params_of, sharded
from harness import ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy, StateDictType
from toys import (
    PRECISIONS,
    Precision,
    Toy,
    check_equal,
    check_gradients,
    full_gradients,
    loss_of,
    summon,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc import fully_shard

BODY = ("embed", "blocks", "norm")


def blocks_frozen(rank, use_orig_params=True, **options):
    return Pair(rank, frozen=("blocks",), use_orig_params=use_orig_params, **options)


def gradually(*paths):
    """Return steps that unfreeze the parts one after the other, with two steps each."""
    return "", *(text for path in paths for text in (f"+{path}", ""))


FROM_THE_TOP = gradually("blocks.1", "blocks.0", "norm", "embed")

# --- whole units: either value of use_orig_params ------------------------------------------------

# Each program: the parts that are frozen when the model is wrapped, then the steps for
# `Pair.follow`.
PROGRAMS = {
    "frozen after a step and trained later": ((), "", "-blocks.1", "", "+blocks.1", ""),
    "everything frozen for a pass": ((), "", "-all none", "+all"),
    "trained alternately": (((),) + ("+blocks.0 -blocks.1", "+blocks.1 -blocks.0") * 2),
    "frozen between forward and backward": ((), "", "| -blocks.0", "", "+blocks.0"),
    "adapters are off for a pass between forward and backward": (
        (),
        *(
            step
            for path in ("all", "blocks.0", "blocks.1")
            for step in (f"| -{path} eval +{path}", "")
        ),
    ),
    "frozen while gradients accumulate": (
        (),
        "1 -blocks.0 2",
        "+blocks.0 1 -blocks.0 2",
        "+blocks.0",
    ),
    "a gradient of before stays": ((), "keep", "-blocks.0 keep", "+blocks.0"),
    "wrapped frozen as a whole": (("",), "none", "+blocks.1", "+all"),
    "trained before the first forward": (("blocks",), "+blocks", ""),
    "trained, frozen and trained": (
        ("blocks",),
        "+blocks.0",
        "-blocks.0",
        "+blocks.0",
        "-blocks.0",
        "",
        "+blocks.0",
    ),
    # A changed flag takes effect in the next forward, as it does without sharding.
    "trained between forward and backward": (("blocks",), "", "| +blocks.1", ""),
    # Unfreezing keeps the accumulated gradients of other units, which wait for their sum.
    "trained while gradients accumulate": (("blocks.0",), "1 +blocks.0 2", ""),
}


def follow(rank, use_orig_params, program):
    frozen, *steps = PROGRAMS[program]
    Pair(rank, frozen=frozen, use_orig_params=use_orig_params).follow(*steps)


@ranks(2)
@both_ways
@pytest.mark.parametrize("program", PROGRAMS)
def test_units_are_frozen_and_trained(rank, world, use_orig_params, program):
    follow(rank, use_orig_params, program)


@ranks(1, 3)
@both_ways
@pytest.mark.parametrize("program", ["trained alternately", "trained while gradients accumulate"])
def test_on_other_numbers_of_ranks(rank, world, use_orig_params, program):
    follow(rank, use_orig_params, program)


@ranks(1, 2, 3)
@both_ways
@every_strategy
@pytest.mark.parametrize("at_first", ["frozen", "trained"])
def test_under_every_strategy(rank, world, use_orig_params, strategy, at_first):
    frozen = ("blocks",) if at_first == "frozen" else ()
    steps = gradually("blocks.1", "blocks.0") if frozen else ("-blocks.0", "", "")
    pair = Pair(rank, frozen=frozen, use_orig_params=use_orig_params, **sharded(strategy, world))
    pair.follow(*steps)


@ranks(4)
@both_ways
def test_over_replicas(rank, world, use_orig_params):
    options = sharded(ShardingStrategy.HYBRID_SHARD, world)
    blocks_frozen(rank, use_orig_params, **options).follow(*gradually("blocks.0"))
    if use_orig_params:
        pair = Pair(rank, use_orig_params=True, **options)
        pair.follow("", "-blocks.0 -head", "+blocks.0 +head")


@ranks(2)
@both_ways
def test_with_offloaded_parameters(rank, world, use_orig_params):
    offload = CPUOffload(offload_params=True)
    blocks_frozen(rank, use_orig_params, cpu_offload=offload).follow("", "+blocks.0")


@ranks(2, env={"FSDPC_COLLECTIVES": "wire"})
@both_ways
def test_over_torchs_collectives(rank, world, use_orig_params):
    blocks_frozen(rank, use_orig_params).follow(*gradually("blocks.0"))


class Adapters(nn.Module):
    """Two adapters in the root, one of which is used and trained, before a frozen head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.base, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2).requires_grad_(False)
        self.use("a")

    def use(self, name):
        self.name = name
        self.a.requires_grad_(name == "a")
        self.b.requires_grad_(name == "b")

    def forward(self, x):
        return self.head(torch.tanh(self.base(x) + getattr(self, self.name)(x)))


def switch_adapters(model, inner, x, way):
    output = model(x)
    if way == "by tensors":  # set flags on the tensors that modules show after forward
        held = list(inner.a.parameters())
        for trained in (False, True):
            for param in held:
                param.requires_grad_(trained)
            with torch.no_grad():
                other = model(x)
            output = output + other
    elif way != "no pass":
        inner.use("b")
        with torch.set_grad_enabled(way == "with a graph"):
            other = model(x).detach()
        output = output + other
    inner.use("b" if way == "no pass" else "a")
    output.square().mean().backward()
    inner.use("a")


@ranks(2)
@pytest.mark.parametrize("way", ["no graph", "with a graph", "no pass", "by tensors"])
@pytest.mark.parametrize("interface", ["class", "fully_shard"])
def test_adapters_are_switched_between_forward_and_backward(rank, world, interface, way):
    """After the forward, the root of fully_shard shows gathered tensors. Flags that are set on the
    gathered tensors also apply to the sharded parameters. Earlier writes to a parameter that is
    trained for the first time do not count as an optimizer's step.
    """
    inner, reference = Adapters(), Adapters()
    if interface == "class":
        model = FSDP(inner, use_orig_params=True)
    else:
        fully_shard(inner.base)
        model = fully_shard(inner)
    theirs = list(reference.parameters())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for number in range(3):
        batches = [torch.randn(3, 4, generator=torch.manual_seed(7 * number + r)) for r in (0, 1)]
        switch_adapters(model, inner, batches[rank], way)
        for batch in batches:
            switch_adapters(reference, reference, batch, way)
        for ours, param in zip(model.parameters(), theirs, strict=True):
            # The class shards by elements, so that a rank may hold no elements of a parameter.
            assert (ours.grad is None) == (param.grad is None) or interface == "class"
            if param.grad is not None:
                param.grad /= world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with summon(model) if interface == "class" else nullcontext():
        ours = [p if interface == "class" else p.full_tensor() for p in model.parameters()]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


# --- single parameters: use_orig_params=True -----------------------------------------------------

NORMS = "-blocks.0.norm -blocks.1.norm -norm"
SINGLE = {
    "norms from the start": ((), NORMS, "", "", ""),
    "norms after a step": ((), "", NORMS, "", ""),
    "between forward and backward": (
        (),
        *(
            step
            for path in ("blocks.0.norm.weight", "blocks.1.down.weight", "head.bias")
            for step in (f"| -{path}", "")
        ),
    ),
    "beside gradients that wait": (
        ("blocks.0.up",),
        "keep",
        "1 +blocks.0.up.weight 2 keep",
        "+blocks.0.up.bias",
    ),
    "an evaluation first": (("blocks",), "", "+blocks.0 eval"),
}


@ranks(2, 3)
@pytest.mark.parametrize("program", SINGLE)
def test_single_parameters_are_frozen_and_trained(rank, world, program):
    frozen, *steps = SINGLE[program]
    Pair(rank, frozen=frozen, use_orig_params=True).follow(*steps)


@ranks(1, 2, 3)
@pytest.mark.parametrize("wrapped", [wrap_blocks, wrap], ids=lambda w: w.__name__)
@pytest.mark.parametrize("at_first", ["frozen", "trained"])
def test_all_but_the_head(rank, world, wrapped, at_first):
    """All parts but the head are frozen after wrapping,
    or are frozen before it and then unfrozen one by one.
    """
    frozen = BODY if at_first == "frozen" else ()
    pair = Pair(rank, frozen=frozen, use_orig_params=True, wrapped=wrapped)
    pair.follow(*FROM_THE_TOP if frozen else ("-all +head", "", ""))


@ranks(2)
@pytest.mark.parametrize(
    "path",
    ["embed", "blocks.0.norm", "blocks.0.norm.weight", "blocks.0.up.bias", "head.bias"],
)
@pytest.mark.parametrize("step", [0, 1])
def test_one_parameter_is_frozen_and_trained(rank, world, path, step):
    steps = ["", f"-{path}", "", f"+{path}", "", ""][1 - step :][:5]
    Pair(rank, use_orig_params=True).follow(*steps)


@ranks(2)
@every_strategy
def test_another_parameter_every_step(rank, world, strategy):
    pair = Pair(rank, use_orig_params=True, **sharded(strategy, world))
    names = [name for name, _ in toy().named_parameters() if name != "head.weight"]
    for number in range(2 * len(names)):
        pair.set(names[number % len(names)], number >= len(names))
        pair.step(zero=number % 3 != 0)


class Branches(nn.Module):
    """A module with two branches. `chosen`, which is set from outside, selects the branch that
    runs; the other branch is unused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.chosen = 0

    def forward(self, x):
        return x + (self.first, self.second)[self.chosen](x)


def branching() -> Toy:
    model = toy()
    torch.manual_seed(5)
    model.blocks = nn.ModuleList(Branches() for _ in range(2))
    return model


@ranks(2)
@pytest.mark.parametrize("frozen", ["first", "second", "first.weight", "second.bias"])
def test_some_are_frozen_and_others_unused(rank, world, frozen):
    def wrapped(engine, module, **options):
        return wrap_blocks(engine, module, Branches, **options)

    pair = Pair(rank, plain=branching(), use_orig_params=True, wrapped=wrapped)
    pair.step()
    pair.set(f"blocks.0.{frozen}", False)
    for number in range(4):
        for model in (pair.model, pair.reference.master, pair.reference.compute):
            for module in model.modules():
                if isinstance(module, Branches):
                    module.chosen = number % 2
        pair.step()


@ranks(2)
def test_a_tied_weight(rank, world):
    plain = toy()
    plain.head.weight = plain.embed.weight
    Pair(rank, plain=plain, use_orig_params=True).follow("", "-embed.weight", "+embed.weight")


@ranks(2)
@pytest.mark.parametrize(
    "precision",
    [*PRECISIONS[1:], Precision("bf16 model", model=torch.bfloat16)],
    ids=lambda p: p.name,
)
def test_under_mixed_precision(rank, world, precision):
    plain = toy(dtype=precision.model)
    pair = Pair(rank, plain=plain, frozen=BODY, use_orig_params=True, precision=precision)
    pair.follow(*FROM_THE_TOP)
    if precision in PRECISIONS[1:3]:
        pair = Pair(rank, use_orig_params=True, precision=precision)
        pair.follow("", "-blocks.0 -norm", "+blocks.0 +norm")


@ranks(2)
def test_gathered_tensors_have_the_flags(rank, world):
    """In forward, gathered tensors have the requires_grad flags that were set on the parameters."""
    pair = Pair(rank, use_orig_params=True)
    seen = []
    block = pair.model.module.blocks[0].module
    block.up.register_forward_pre_hook(lambda m, a: seen.append(m.weight.requires_grad))
    for flag in (True, False, True):
        for p in params_of(pair.model, "blocks.0.up.weight"):
            p.requires_grad_(flag)
        loss_of(pair.model, tokens(rank, 0)).backward()
    assert seen == [True, False, True]


@ranks(2)
def test_parameters_frozen_after_wrapping_are_seen_frozen_in_summon(rank, world):
    for use_orig_params in (True, False):
        model = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
        for p in model.module.blocks[0].parameters():
            p.requires_grad_(False)
        for writeback in (True, False):
            with summon(model, writeback=writeback):
                for name, p in model.named_parameters():
                    assert p.requires_grad == ("blocks.0" not in name), name


# --- what else there is when parameters are trained later ----------------------------------------


@ranks(2)
def test_gradients_that_wait_are_still_zeroed(rank, world):
    """zero_grad(set_to_none=False) zeroes gradients that wait for their sum. They stay zeroed if a
    parameter is then unfrozen and the next forward allocates memory for its gradient.
    """
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
    """A state saved after unfreezing is loaded into a model that was wrapped with everything
    trainable; both models train on equally.
    """
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
def test_other_units_hooks_stay(rank, world):
    """A communication hook also sums the gradients of a unit that is unfrozen later."""
    from torch.distributed.algorithms._comm_hooks import default_hooks

    pair = blocks_frozen(rank)
    state = default_hooks.DefaultState(process_group=torch.distributed.group.WORLD)
    pair.model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    pair.reference.world = world
    pair.follow(*gradually("blocks.0"))


@ranks(2, 3)
def test_unfreezing_other_parameters_on_a_rank(rank, world):
    """All ranks raise an error that names the parameter."""
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
    # A PeerError quotes the error of the rank that noticed the mismatch first.
    torch.distributed.all_gather_object(kinds, kind)
    assert "MismatchError" in kinds
    assert "has unfrozen parameter" in text and "norm.weight" in text, text
    assert "order of modules differs across ranks" in text
    assert kind in ("MismatchError", "PeerError"), kind


@ranks(2, 3)
@both_ways
@pytest.mark.parametrize("unfreezes", [0, 1])
def test_unfreezing_on_one_rank_only(rank, world, use_orig_params, unfreezes):
    """No rank waits until the deadline: ranks that go on notice the rank that waits for them."""
    one_sided(rank, world, use_orig_params, unfreezes)


@ranks(2, env={"FSDPC_COLLECTIVES": "wire"})
@both_ways
@pytest.mark.parametrize("unfreezes", [0, 1])
def test_unfreezing_on_one_rank_only_over_torchs_collectives(
    rank, world, use_orig_params, unfreezes
):
    one_sided(rank, world, use_orig_params, unfreezes)


@ranks(2, 3)
@both_ways
@pytest.mark.parametrize("batches", [0, 1])
def test_unfreezing_while_another_rank_still_evaluates(rank, world, use_orig_params, batches):
    """The last rank has more batches and runs them after other ranks have unfrozen parameters."""
    pair = blocks_frozen(rank, use_orig_params)
    pair.step()
    with torch.no_grad():
        for _ in range(batches):
            pair.model(pair.batch())
        for _ in range(3 if rank == world - 1 else 0):
            time.sleep(0.3)
            pair.model(pair.batch())
    pair.follow("+blocks.1", "")


class Adapter(nn.Module):
    """A frozen layer beside trainable layers, as in LoRA."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2), nn.Linear(2, 6)

    def forward(self, x):
        return torch.tanh(self.base(torch.tanh(x))) + self.up(self.down(x))


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x):
        return x + self.bias


@ranks(2, 3)
@both_ways
@pytest.mark.parametrize("before", [1, 2])
def test_graphs_from_before_the_unfreezing(rank, world, use_orig_params, before):
    """A backward through a graph from before the unfreezing does not release units that are still
    in use, even if other backwards ran before and after the unfreezing.
    """

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
    plain = nn.Sequential(nn.Linear(6, 6), Adapter(), Adapter(), Shift())
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

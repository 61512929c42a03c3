"""Values that something reads after its unit could have been released: frozen parameters, second
backwards, outputs that are the unit's own memory, attributes of released modules. Right, or refused.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import fsdpc
import pytest
import torch
import torch.nn.functional as F
from harness import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import ShardingStrategy
from torch.utils.checkpoint import checkpoint
from toys import Reference, check_equal, full_gradients, full_parameters, wrap, wrap_blocks

POISON = {"FSDPC_POISON": "1"}
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])
every_strategy = pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=lambda s: s.name)
both_wires = pytest.mark.parametrize("collectives", ["shm", "c10d"])


def batch(rank, step, width=6):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, width, generator=generator)


def compare(model, sharded, batch_of, *, loss_of, steps=3):
    """Gradients and parameters of SGD steps beside an unsharded copy; sums may have another order,
    as the gradients of an input are added up inside a unit first. Fails on NaN. Collective.
    """
    reference = Reference(model, loss_of=loss_of)
    model = sharded(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, reference.master)]
    for step in range(steps):
        loss_of(model, batch_of(step)).backward()
        reference.backward(batch_of(step))
        check_equal(
            full_gradients(model),
            reference.gradients(),
            f"gradients of step {step}",
            rtol=1e-5,
            atol=1e-6,
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_equal(
            full_parameters(model),
            reference.parameters(),
            f"parameters of step {step}",
            rtol=1e-5,
            atol=1e-6,
        )
    return model


def squares(model, x):
    out = model(x)
    return sum(t.pow(2).mean() for t in _tensors(out) if t.requires_grad)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    items = value.values() if isinstance(value, dict) else value
    return (
        [t for item in items for t in _tensors(item)]
        if isinstance(items, (list, tuple)) or (isinstance(value, dict))
        else []
    )


def slow_backward(rank, seconds):
    """Delays what comes after it in a backward, on one rank."""

    def wait(grad):
        time.sleep(seconds if rank == 1 else 0)

    return wait


# --- frozen parameters ---------------------------------------------------------------------------


class LoRA(nn.Module):
    def __init__(self, width=6, rank=None, inner=2):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(inner, width, bias=False)
        self.rank = rank

    def forward(self, x):
        frozen = self.base(torch.tanh(x))
        if frozen.requires_grad and self.rank is not None:
            frozen.register_hook(slow_backward(self.rank, 0.05))
        return frozen + self.up(self.down(x))


class Stack(nn.Module):
    def __init__(self, *blocks, memory=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(blocks)
        self.memory = memory

    def forward(self, x):
        x = memory = self.first(x)
        for block in self.blocks:
            x = x + (block(x, memory) if self.memory else block(x))
        return x


@ranks(2, 3, env=POISON)
@both_ways
@every_strategy
@both_wires
def test_frozen_linear_beside_low_rank_ones(rank, world, strategy, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    torch.manual_seed(0)
    compare(
        Stack(*[LoRA(rank=rank) for _ in range(4)]),
        lambda m: wrap_blocks(
            "fsdpc", m, LoRA, sharding_strategy=strategy, use_orig_params=use_orig_params
        ),
        lambda step: batch(rank, step),
        steps=2,
        loss_of=squares,
    )


class Cross(nn.Module):
    """Frozen attention-like mixing of an input that every block gets, and a trainable adapter."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(6, 6).requires_grad_(False)
        self.query = nn.Linear(6, 6).requires_grad_(False)
        self.adapter = nn.Linear(6, 6)

    def forward(self, x, memory):
        return torch.sigmoid(self.query(x)) * self.key(memory) + self.adapter(x.detach())


@ranks(2, env=POISON)
@both_ways
def test_a_frozen_unit_with_an_input_that_all_units_share(rank, world, use_orig_params):
    torch.manual_seed(0)
    model = compare(
        Stack(*[Cross() for _ in range(4)], memory=True),
        lambda m: wrap_blocks("fsdpc", m, Cross, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=squares,
    )
    # The shared input's own gradient comes last of all: no unit may wait for that.
    assert fsdpc.memory_stats(model)["spare_count"] == 0


class Nested(nn.Module):
    """A unit with frozen parameters around a trainable unit, which comes before them."""

    def __init__(self, rank):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 6)
        self.rank = rank

    def forward(self, x):
        hidden = torch.tanh(self.frozen(torch.tanh(self.inner(x))))
        if hidden.requires_grad:
            hidden.register_hook(slow_backward(self.rank, 0.05))
        return self.head(hidden)


@ranks(2, env=POISON)
@both_ways
@every_strategy
def test_frozen_parameters_around_a_nested_unit(rank, world, strategy, use_orig_params):
    torch.manual_seed(0)
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}

    def sharded(model):
        for i, nested in enumerate(model.blocks):
            nested.inner = wrap("fsdpc", nested.inner, **options)
            model.blocks[i] = wrap("fsdpc", nested, **options)
        return wrap("fsdpc", model, **options)

    compare(
        Stack(*[Nested(rank) for _ in range(3)]),
        sharded,
        lambda step: batch(rank, step),
        steps=2,
        loss_of=squares,
    )


class Passing(nn.Module):
    """Frozen; hands one of its inputs through and takes several."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 6).requires_grad_(False)
        self.right = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x, *, other):
        return self.left(x) * torch.tanh(self.right(other)), other


class PassingStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Passing() for _ in range(3))

    def forward(self, x):
        left, right = self.first(x), self.second(x)
        for block in self.blocks:
            left, right = block(left, other=right)
            right = torch.tanh(right)
        return left + right


@ranks(2, env=POISON)
@both_ways
def test_frozen_units_between_trainable_ones(rank, world, use_orig_params):
    torch.manual_seed(0)
    compare(
        PassingStack(),
        lambda m: wrap_blocks("fsdpc", m, Passing, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=squares,
    )


@ranks(2, env=POISON)
@both_ways
@pytest.mark.parametrize("kind", list(CheckpointImpl), ids=lambda k: k.name)
def test_frozen_parameters_under_checkpointing(rank, world, kind, use_orig_params):
    torch.manual_seed(0)

    def sharded(model):
        for i, block in enumerate(model.blocks):
            block = wrap("fsdpc", block, use_orig_params=use_orig_params)
            model.blocks[i] = checkpoint_wrapper(block, checkpoint_impl=kind)
        return wrap("fsdpc", model, use_orig_params=use_orig_params)

    compare(
        Stack(*[LoRA(rank=rank) for _ in range(3)]),
        sharded,
        lambda step: batch(rank, step),
        steps=2,
        loss_of=squares,
    )


class Detached(nn.Module):
    """Trainable, but one use of the weight makes no gradient of it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        straight = F.linear(torch.tanh(x), self.linear.weight.detach())
        return torch.tanh(straight) + self.linear(x.detach())


@ranks(2, env=POISON)
def test_a_detached_use_is_refused_when_it_comes_late(rank, world):
    model = wrap_blocks("fsdpc", Stack(*[Detached() for _ in range(4)]), Detached)
    try:
        squares(model, batch(rank, 0)).backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
    else:
        for p in model.parameters():
            assert p.grad is None or not p.grad.isnan().any()


class Index(nn.Module):
    """An integer parameter that the backward needs."""

    def __init__(self):
        super().__init__()
        self.index = nn.Parameter(torch.tensor([5, 0, 3, 3, 1, 2]), requires_grad=False)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(torch.tanh(x[:, self.index]))


@ranks(2, env=POISON)
@both_ways
def test_integer_parameters_that_a_backward_needs(rank, world, use_orig_params):
    torch.manual_seed(0)
    compare(
        Stack(*[Index() for _ in range(4)]),
        lambda m: wrap_blocks("fsdpc", m, Index, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=squares,
    )


# --- second backwards ----------------------------------------------------------------------------


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def smooth_stack():
    torch.manual_seed(0)
    return Stack(*[Smooth() for _ in range(4)])


def penalty(model, x):
    """The gradient penalty of WGAN-GP beside two ordinary terms."""
    real, fake = model(x).mean(), model(x + 1).mean()
    between = (x + 0.5).requires_grad_()
    (grad,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return real - fake + ((grad.norm(2, dim=1) - 1) ** 2).mean()


@ranks(2, 3, env=POISON)
@both_ways
@every_strategy
@both_wires
def test_gradient_penalty(rank, world, strategy, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    compare(
        smooth_stack(),
        lambda m: wrap_blocks(
            "fsdpc", m, Smooth, sharding_strategy=strategy, use_orig_params=use_orig_params
        ),
        lambda step: batch(rank, step),
        loss_of=penalty,
    )


class Force(nn.Module):
    """Returns an energy and its gradient by the positions, as potentials do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.net = smooth_stack()

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.net(x * self.scale).sum(-1)
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy * self.scale, force * self.scale


@ranks(2, env=POISON)
@both_ways
@both_wires
def test_autograd_grad_inside_forward(rank, world, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    model = compare(
        Force(),
        lambda m: wrap_blocks("fsdpc", m, Smooth, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=squares,
    )
    model.eval()
    with torch.no_grad():
        energy, force = model(batch(rank, 9))
    assert not energy.isnan().any() and not force.isnan().any()


@ranks(2, env=POISON)
def test_a_second_backward_after_another_pass_is_refused(rank, world):
    model = wrap_blocks("fsdpc", smooth_stack(), Smooth)
    x = batch(rank, 0).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model(batch(rank, 1))  # releases what the second backward needs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad.pow(2).sum().backward()
    for p in model.parameters():
        p.grad = None
    compare(
        smooth_stack(),
        lambda m: wrap_blocks("fsdpc", m, Smooth),
        lambda step: batch(rank, step),
        loss_of=squares,
    )
    squares(model, batch(rank, 2)).backward()
    assert all(not p.grad.isnan().any() for p in model.parameters() if p.grad is not None)


@ranks(2, env=POISON)
@both_ways
def test_a_graph_from_before_the_optimizer_step_is_refused(rank, world, use_orig_params):
    model = wrap_blocks("fsdpc", smooth_stack(), Smooth, use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        first = squares(model, batch(rank, 0))
        first.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            first.backward()
        optimizer.zero_grad()


@ranks(2, env=POISON)
def test_a_step_of_one_part_leaves_the_graph_of_another(rank, world):
    """Two heads in one unit, each with its optimizer and loss."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.a(x).pow(2).mean(), self.b(x).pow(2).mean()

    torch.manual_seed(0)
    model = wrap("fsdpc", Heads(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.1)
    for step in range(3):
        one, two = model(batch(rank, step))
        one.backward()
        optimizer.step()
        two.backward()
        model.zero_grad()


# --- outputs that are the unit's own memory -------------------------------------------------------


@dataclasses.dataclass
class Out:
    table: torch.Tensor
    ring: object = None


class Position(nn.Module):
    def __init__(self, form, frozen):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6), requires_grad=not frozen)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=not frozen)
        self.form = form

    def forward(self, n):
        if self.form == "view":
            return self.table[:n]
        if self.form == "parameter":
            return self.table, self.scale
        if self.form == "dict":
            return {"scale": self.scale, "more": [self.table.t()]}
        out = Out(self.table[:n])
        out.ring = [out]
        return out


class Positions(nn.Module):
    def __init__(self, form, frozen):
        super().__init__()
        self.position = Position(form, frozen)
        self.blocks = nn.ModuleList(Smooth() for _ in range(3))

    def forward(self, x):
        out = self.position(x.shape[0])
        for block in self.blocks:
            x = block(x)
        if isinstance(out, torch.Tensor):
            return x + out
        if isinstance(out, tuple):
            return x * out[1] + out[0][: x.shape[0]]
        if isinstance(out, dict):
            return x * out["scale"] + out["more"][0].t()[: x.shape[0]]
        assert out.ring[0] is out
        return x + out.table


@ranks(2, env=POISON)
@both_ways
@pytest.mark.parametrize("form", ["view", "parameter", "dict", "dataclass"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_unit_that_returns_its_parameters(rank, world, form, frozen, use_orig_params):
    torch.manual_seed(0)
    model = compare(
        Positions(form, frozen),
        lambda m: wrap_blocks("fsdpc", m, Smooth, Position, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=squares,
    )
    with torch.no_grad():
        assert not model(batch(rank, 9)).isnan().any()


class Temperature(nn.Module):
    """A contrastive model returns its scale, whole, in a dict."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 6)
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return {"x": self.net(x), "scale": self.logit_scale}


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x):
        return {"x": x.tanh(), "scale": self.scale}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), Holder()

    def forward(self, x):
        out = self.inner(self.first(x))
        return out["x"] * out["scale"]


@ranks(1, 2)
@both_ways
@pytest.mark.parametrize(
    "strategy", [FULL, GRAD_OP, ShardingStrategy.NO_SHARD], ids=lambda s: s.name
)
def test_a_returned_parameter_in_a_further_backward(rank, world, strategy, use_orig_params):
    """Its gradient is the first that is there, also where its values are the shard itself."""
    torch.manual_seed(0)
    plain = Scaled()
    reference = Reference(plain, loss_of=squares)
    model = wrap_blocks(
        "fsdpc", plain, Holder, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    loss = squares(model, batch(rank, 0))
    loss.backward(retain_graph=True)
    loss.backward()
    reference.backward(batch(rank, 0), times=2)
    check_equal(full_gradients(model), reference.gradients(), "gradients", rtol=1e-5, atol=1e-6)


@ranks(1, 2, env=POISON)
@both_ways
@pytest.mark.parametrize(
    "strategy", [FULL, GRAD_OP, ShardingStrategy.NO_SHARD], ids=lambda s: s.name
)
def test_a_root_that_returns_a_parameter(rank, world, strategy, use_orig_params):
    torch.manual_seed(0)
    compare(
        Temperature(),
        lambda m: wrap("fsdpc", m, sharding_strategy=strategy, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=lambda m, x: (lambda out: (out["x"] * out["scale"].exp()).pow(2).mean())(m(x)),
    )


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(2):
            x = self.linear(x)
            yield x


@ranks(2, env=POISON)
@both_ways
def test_a_forward_that_is_a_generator_is_refused(rank, world, use_orig_params):
    model = wrap("fsdpc", Generator(), use_orig_params=use_orig_params)
    for _ in range(2):
        with pytest.raises(fsdpc.StateError, match="unit Generator returned a generator"):
            model(batch(rank, 0))


# --- attributes of released modules --------------------------------------------------------------


class TiedByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(6, 6, bias=False)
        self.block = Smooth()

    def forward(self, x):
        return F.linear(self.block(self.emb(x)), self.emb.weight)


@ranks(2, env=POISON)
def test_the_weight_of_a_released_module_cannot_be_read(rank, world):
    model = wrap_blocks("fsdpc", TiedByHand(), nn.Linear, Smooth)
    with pytest.raises(fsdpc.StateError, match=r"parameter 'weight' of unit 'emb' is not gathered"):
        model(batch(rank, 0))
    weight = model.emb.weight
    assert weight.shape == (6, 6) and weight.dtype == torch.float32 and weight.requires_grad
    for read in (lambda: weight + 1, weight.tolist, weight.numpy, lambda: weight[0].sum()):
        with pytest.raises(fsdpc.StateError, match="summon_full_params"):
            read()
    with fsdpc.FullyShardedDataParallel.summon_full_params(model):
        assert model.emb.weight.sum() != 0
    with pytest.raises(fsdpc.StateError):
        model.emb.weight.sum()


NO_SHARD = ShardingStrategy.NO_SHARD
all_strategies = pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NO_SHARD], ids=lambda s: s.name)


@ranks(2, env=POISON)
@all_strategies
@pytest.mark.parametrize("read", ["linear", "view", "frozen", "no_grad", "reentrant"])
def test_the_sharded_weight_of_another_unit_is_not_computed_with(rank, world, strategy, read):
    class Tied(TiedByHand):
        def forward(self, x):
            x = self.block(self.emb(x))
            if read == "reentrant":
                return checkpoint(lambda y: y @ self.emb.weight.t(), x, use_reentrant=True)
            return x @ self.emb.weight.t() if read == "view" else F.linear(x, self.emb.weight)

    plain = Tied()
    plain.emb.weight.requires_grad_(read != "frozen")
    model = wrap_blocks(
        "fsdpc", plain, nn.Linear, Smooth, sharding_strategy=strategy, use_orig_params=True
    )
    own = model.emb.weight
    for _ in range(2):
        with pytest.raises(fsdpc.StateError, match=r"'weight' of unit 'emb' is not gathered here"):
            with torch.set_grad_enabled(read != "no_grad"):
                model(batch(rank, 0))
        assert model.emb.weight is own and own in set(model.parameters())


class Momentum(nn.Module):
    """A momentum encoder that the training forward moves itself: BYOL, MoCo, DINO."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.online, self.target = Smooth(), Smooth()
        self.target.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x):
        pairs = list(zip(self.online.parameters(), self.target.parameters(), strict=True))
        if self.how == "foreach":
            torch._foreach_lerp_([t for _, t in pairs], [o for o, _ in pairs], 0.1)
        for online, target in pairs:
            if self.how == "data":
                target.data = target.data * 0.9 + online.data * 0.1
            elif self.how == "copy":
                target.data.copy_(online.data)
            elif self.how == "in place":
                target.mul_(0.9).add_(online, alpha=0.1)
        return self.online(x) - self.target(x)


@ranks(2, env=POISON)
@all_strategies
@pytest.mark.parametrize("how", ["data", "copy", "in place", "foreach"])
def test_a_forward_cannot_change_the_weights_of_another_unit(rank, world, strategy, how):
    model = wrap_blocks(
        "fsdpc", Momentum(how), Smooth, sharding_strategy=strategy, use_orig_params=True
    )
    with pytest.raises(fsdpc.StateError, match="of unit '(online|target)' is not gathered here"):
        model(batch(rank, 0))


class Inspecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = Smooth(), Smooth()

    def forward(self, x):
        weight = self.head.linear.weight
        assert isinstance(weight, nn.Parameter) and weight.shape == (6, 6)
        assert [p.shape for p in self.head.parameters()] == [(6, 6), (6,)]
        assert next(self.head.parameters()).dtype == x.dtype
        assert weight.device == x.device and weight.is_leaf and weight.grad is None
        self.head.requires_grad_(False)
        assert not weight.requires_grad
        return self.head(self.net(x))


@ranks(2, env=POISON)
@all_strategies
def test_a_forward_inspects_and_freezes_another_unit(rank, world, strategy):
    torch.manual_seed(0)
    model = wrap_blocks(
        "fsdpc", Inspecting(), Smooth, sharding_strategy=strategy, use_orig_params=True
    )
    own = list(model.parameters())
    for step in range(2):
        squares(model, batch(rank, step)).backward()
        assert all(now is then for now, then in zip(model.parameters(), own, strict=True))
        frozen = set(model.head.parameters())
        assert all(p.requires_grad == (p not in frozen) for p in own)
    assert all(p.grad is None for p in frozen)


@ranks(2, env=POISON)
def test_a_weight_tied_by_hand_while_its_unit_stays_gathered(rank, world):
    torch.manual_seed(0)
    compare(
        TiedByHand(),
        lambda m: wrap_blocks("fsdpc", m, nn.Linear, Smooth, sharding_strategy=GRAD_OP),
        lambda step: batch(rank, step),
        loss_of=squares,
    )


@ranks(2, env=POISON)
@both_ways
def test_writing_a_gathered_parameter_is_refused(rank, world, use_orig_params):
    class Clamping(Smooth):
        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    model = wrap("fsdpc", Stack(Clamping()), use_orig_params=use_orig_params)
    with pytest.raises(fsdpc.StateError, match="changed in place during forward"):
        squares(model, batch(rank, 0))


# --- one unit, several forwards ------------------------------------------------------------------


class Rollout(nn.Module):
    """Applied to its own output, with a parameter that some calls leave out."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)

    def forward(self, x, extra=False):
        x = torch.tanh(self.linear(x))
        return x + self.sometimes(x) if extra else x


class Rolling(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.cell = Rollout()

    def forward(self, x):
        x = self.first(x)
        for k in range(4):
            x = self.cell(x, extra=k == 2)
        return x + self.cell(torch.ones_like(x))


@ranks(2, 3, env=POISON)
@both_ways
@both_wires
def test_a_unit_applied_to_its_own_output(rank, world, use_orig_params, collectives):
    fsdpc.set_collectives(collectives)
    torch.manual_seed(0)
    compare(
        Rolling(),
        lambda m: wrap_blocks("fsdpc", m, Rollout, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        steps=4,
        loss_of=squares,
    )


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.a(x), self.b(x)


def in_thread(function, *args):
    result = []
    grad = torch.is_grad_enabled()

    def run():
        with torch.set_grad_enabled(grad):
            result.append(function(*args))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


class Threaded(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(TwoOutputs() for _ in range(3))
        self.reentrant = reentrant

    def one(self, block, x):
        return in_thread(block, x)[0]

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if self.reentrant is None:
                x = self.one(block, x)
            else:
                x = checkpoint(self.one, block, x, use_reentrant=self.reentrant)
        return x


@ranks(2, env=POISON)
@both_ways
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_units_called_in_threads(rank, world, reentrant, use_orig_params):
    torch.manual_seed(0)
    compare(
        Threaded(reentrant),
        lambda m: wrap_blocks("fsdpc", m, TwoOutputs, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        steps=4,
        loss_of=squares,
    )


# --- containers ----------------------------------------------------------------------------------


class Ring(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, ring):
        out = [self.linear(ring[0])]
        out.append(out)
        deep = leaf = []
        for _ in range(2000):
            leaf.append([])
            leaf = leaf[0]
        leaf.append(out)
        return {"deep": deep, "out": out}


class Rings(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.rings = nn.ModuleList(Ring() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for ring in self.rings:
            holder = [x]
            holder.append(holder)
            x = torch.tanh(ring(holder)["out"][0])
        return x


# Without jitter, whose own search for tensors recurses.
@ranks(2, env={**POISON, "FSDPC_TEST_JITTER": ""})
@both_ways
def test_containers_that_hold_themselves(rank, world, use_orig_params):
    torch.manual_seed(0)
    compare(
        Rings(),
        lambda m: wrap_blocks("fsdpc", m, Ring, use_orig_params=use_orig_params),
        lambda step: batch(rank, step),
        loss_of=squares,
    )


@ranks(2, env=POISON)
def test_a_backward_that_broke_off_inside_a_forward(rank, world):
    class Trying(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = smooth_stack()
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x):
            probe = x.detach().requires_grad_()
            out = self.net(probe)
            out.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                torch.autograd.grad(out.sum(), probe)
            return self.net(x) * self.scale

    def fail(grad):
        raise ZeroDivisionError

    torch.manual_seed(0)
    compare(
        Trying(),
        lambda m: wrap_blocks("fsdpc", m, Smooth),
        lambda step: batch(rank, step),
        loss_of=squares,
    )

"""Parameters that torch's FSDP refuses or gets wrong: kinds, dtypes, ties, use and gradients."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import (
    PRECISIONS,
    Block,
    Precision,
    Reference,
    check_equal,
    check_gradients,
    check_parameters,
    compare_training,
    full_parameters,
    loss_of,
    no_sync_if,
    none_gradients,
    sharding_groups,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

import fsdpc
from fsdpc.plan.sources.modules import units_of, units_of_calls

both_ways = pytest.mark.parametrize("use_orig_params", [True, False])
BF16 = PRECISIONS[1]


def vectors(rank, step, rows=4, width=6):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + rank))


def square_loss(model, batch):
    return model(batch).float().square().mean()


def train(engine, model, use_orig_params, rank, **options):
    precision = options.pop("precision", PRECISIONS[0])
    return compare_training(
        engine,
        model,
        lambda m: wrap(engine, m, use_orig_params=use_orig_params, **precision.options()),
        lambda step: vectors(rank, step),
        loss_of=square_loss,
        precision=precision,
        **options,
    )


class Scaled(nn.Module):
    """A module with 0-dim and empty parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.linear = nn.Linear(6, 5)
        self.shift = nn.Parameter(torch.tensor(-0.1))

    def forward(self, x):
        return self.linear(x) * self.gain + self.shift + self.empty.sum()


@ranks(1, 2, 3)
@both_ways
@pytest.mark.parametrize("precision", [PRECISIONS[0], BF16], ids=lambda p: p.name)
def test_scalar_and_empty_parameters(rank, world, engine, use_orig_params, precision):
    torch.manual_seed(0)
    model = train(engine, Scaled(), use_orig_params, rank, precision=precision)
    assert full_parameters(model)["gain"].shape == ()


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(2, 0))

    def forward(self, x):
        return x + self.empty.sum()


@ranks(1, 2)
def test_an_empty_parameter_has_an_empty_gradient(rank, world):
    beside = nn.Sequential(OnlyEmpty(), nn.Linear(6, 5))
    makes = {"rows": fsdpc.fully_shard, "flat": lambda m: wrap("fsdpc", m, use_orig_params=True)}
    for kind, make in makes.items():
        for module in (copy.deepcopy(beside), OnlyEmpty()):
            model = make(module)
            empty = next(p for name, p in model.named_parameters() if name.endswith("empty"))
            for _ in range(3):
                model(vectors(rank, 0).requires_grad_()).sum().backward()
                assert empty.grad is not None and empty.grad.shape == empty.shape, kind
                model.zero_grad()


class OnlyScalar(nn.Module):
    """A unit with one element, which only one rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return x * self.gain


@ranks(2, 4)
@both_ways
def test_a_unit_of_one_element(rank, world, engine, use_orig_params):
    train(engine, OnlyScalar(), use_orig_params, rank)


class SeveralTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 5, dtype=torch.bfloat16)
        self.single = nn.Linear(5, 7)
        self.sixteen = nn.Parameter(torch.randn(7).half())
        self.wide = nn.Linear(7, 3, dtype=torch.float64)

    def forward(self, x):
        x = self.single(self.low(x.bfloat16()).float())
        return self.wide((x * self.sixteen.float()).double())


@ranks(1, 2, 3)
@both_ways
def test_several_types_in_one_unit(rank, world, engine, use_orig_params):
    torch.manual_seed(0)
    train(engine, SeveralTypes(), use_orig_params, rank)


class Quantised(nn.Module):
    """Integer weights with a trainable scale and adapter, as in a quantised base model."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.randint(-128, 128, (6, 5), dtype=torch.int8)
        self.weight = nn.Parameter(draw, requires_grad=False)
        self.packed = nn.Parameter(
            torch.randint(0, 255, (7,), dtype=torch.uint8), requires_grad=False
        )
        self.small = nn.Parameter(torch.randn(5).to(torch.float8_e4m3fn), requires_grad=False)
        self.mask = nn.Parameter(
            torch.tensor([True, False, True, True, False]), requires_grad=False
        )
        self.scale = nn.Parameter(torch.rand(5) / 128)

    def forward(self, x):
        weight = self.weight.to(x.dtype) * self.scale.to(x.dtype)
        return x @ weight * self.small.to(x.dtype) + self.packed.sum() / 1000 * self.mask


@ranks(1, 2, 3)
@both_ways
@pytest.mark.parametrize("precision", [PRECISIONS[0], BF16], ids=lambda p: p.name)
def test_integer_and_quantised_parameters(rank, world, engine, use_orig_params, precision):
    """Integer parameters keep their values to the bit,
    because MixedPrecision casts only floating-point parameters.
    """
    torch.manual_seed(0)
    model = Quantised()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    sharded = wrap(engine, model, use_orig_params=use_orig_params, **precision.options())
    for step in range(2):
        square_loss(sharded, vectors(rank, step)).backward()
    after = full_parameters(sharded)
    for name, value in before.items():
        assert after[name].dtype == value.dtype and after[name].shape == value.shape, name
        assert bytes(after[name].view(torch.uint8).flatten().tolist()) == bytes(
            value.view(torch.uint8).flatten().tolist()
        ), name
    if precision == PRECISIONS[0]:
        torch.manual_seed(0)
        train(engine, Quantised(), use_orig_params, rank)


@ranks(1, 2, 3)
@both_ways
@pytest.mark.parametrize("precision", [PRECISIONS[0], BF16], ids=lambda p: p.name)
def test_frozen_beside_trainable(rank, world, engine, use_orig_params, precision):
    model = toy()
    for name, p in model.named_parameters():
        p.requires_grad = not name.endswith(("up.weight", "embed.weight", "norm.bias"))
    sharded = compare_training(
        engine,
        model,
        lambda m: wrap_blocks(engine, m, use_orig_params=use_orig_params, **precision.options()),
        lambda step: tokens(rank, step),
        precision=precision,
    )
    if use_orig_params:
        assert {p.requires_grad for p in sharded.parameters()} == {True, False}


@ranks(2)
@both_ways
@pytest.mark.parametrize("frozen", ["blocks.0", "embed", "blocks", "all_but_head"])
def test_whole_units_frozen(rank, world, engine, use_orig_params, frozen):
    model = toy()
    for name, p in model.named_parameters():
        p.requires_grad = (
            name.startswith("head") if frozen == "all_but_head" else not name.startswith(frozen)
        )
    compare_training(
        engine,
        model,
        lambda m: wrap_blocks(engine, m, use_orig_params=use_orig_params),
        lambda step: tokens(rank, step),
    )


class Partial(nn.Module):
    """A module with four parameters, of which it uses those that the batch lists."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(3, 6) for _ in range(4))

    def forward(self, batch):
        x, used = batch
        return sum((x @ self.weights[i].t() for i in used), x.new_zeros(()))


@ranks(1, 2, 3)
@both_ways
@pytest.mark.parametrize(
    "strategy",
    [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP],
    ids=lambda s: s.name,
)
def test_unused_parameters_keep_no_gradient(rank, world, engine, use_orig_params, strategy):
    """The gradient of a parameter that no rank used stays None. If some rank used the parameter,
    every rank has its shard of the summed gradient.
    """
    # One flat parameter holds all four; its gradient is None only if none of the four is used.
    if not use_orig_params:
        model = wrap(engine, Partial(), use_orig_params=False, sharding_strategy=strategy)
        assert none_gradients(model) == {f"weights.{i}" for i in range(4)}
        return
    torch.manual_seed(0)
    compare_training(
        engine,
        Partial(),
        lambda m: wrap(engine, m, use_orig_params=True, sharding_strategy=strategy),
        lambda step: (vectors(rank, step), [0] if rank else [0, 1 + step % 2]),
        loss_of=square_loss,
        steps=4,
        groups=sharding_groups(strategy, world),
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.block = Block(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch):
        return self.head(self.block(self.embed(batch)))


@ranks(1, 2, 3)
@both_ways
@pytest.mark.parametrize("nested", [False, True])
def test_tied_weights(rank, world, engine, use_orig_params, nested):
    torch.manual_seed(0)
    sharded = compare_training(
        engine,
        Tied(),
        lambda m: (wrap_blocks if nested else wrap)(engine, m, use_orig_params=use_orig_params),
        lambda step: tokens(rank, step),
    )
    with type(sharded).summon_full_params(sharded):
        assert sharded.module.embed.weight is sharded.module.head.weight


class Strided(nn.Module):
    """A module with parameters that are not contiguous: transposed, sliced or channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.sliced = nn.Parameter(torch.randn(5, 12)[:, ::2])
        self.image = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, x):
        # contiguous() lets the reference add in the same order as the gathered copies.
        x = x.sum(0) * self.turned.contiguous() * self.sliced.contiguous()
        return x.sum() * self.image.contiguous()


@ranks(1, 2, 3)
@both_ways
def test_parameters_that_are_not_contiguous(rank, world, engine, use_orig_params):
    torch.manual_seed(0)
    train(engine, Strided(), use_orig_params, rank)


@ranks(2)
@both_ways
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("no_sync", [False, True])
def test_zero_grad_both_ways(rank, world, engine, use_orig_params, to_none, no_sync):
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(engine, model, use_orig_params=use_orig_params)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (sharded, reference.master)
    ]
    for step in range(4):
        for micro in range(2):
            sync = micro == 1 or not no_sync
            with no_sync_if(sharded, not sync):
                loss_of(sharded, tokens(rank, step, micro)).backward()
            reference.backward(tokens(rank, step, micro), sync=sync)
        check_gradients(engine, sharded, reference, f"of step {step}")
        for optimizer in optimizers:
            optimizer.step()
        if step % 2:
            sharded.zero_grad(set_to_none=to_none)
        else:
            optimizers[0].zero_grad(set_to_none=to_none)
        optimizers[1].zero_grad(set_to_none=to_none)
        if not to_none:
            assert all(
                p.grad is not None and not p.grad.any() for p in sharded.parameters() if p.numel()
            )
        else:
            assert all(p.grad is None for p in sharded.parameters())
        check_parameters(engine, sharded, reference, f"after step {step}")


@ranks(1, 2, 3)
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], ids=lambda s: s.name
)
def test_optimizer_built_before_wrapping(rank, world, engine, strategy):
    model = toy()
    reference = Reference(model, groups=sharding_groups(strategy, world))
    originals = list(model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference.master)]
    sharded = wrap_blocks(engine, model, use_orig_params=True, sharding_strategy=strategy)
    assert {id(p) for p in sharded.parameters()} == {id(p) for p in originals}
    for step in range(3):
        loss_of(sharded, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_parameters(engine, sharded, reference, f"after step {step}")


def replace_by_new_tensor(p, step):
    p.grad = p.grad * 0.5


def change_in_place(p, step):
    p.grad.mul_(0.5)


def replace_data(p, step):
    p.grad.data = p.grad.data * 0.5


def drop_every_second_step(p, step):
    if step % 2:
        p.grad = None


def replace_by_zeros(p, step):
    p.grad = torch.zeros_like(p)


@ranks(2, 3)
@both_ways
@pytest.mark.parametrize(
    "change",
    [
        replace_by_new_tensor,
        change_in_place,
        replace_data,
        drop_every_second_step,
        replace_by_zeros,
    ],
    ids=lambda f: f.__name__,
)
def test_gradients_replaced_by_the_user(rank, world, engine, use_orig_params, change):
    """If the user puts a gradient into p.grad, the optimizer uses this gradient,
    and the next backward adds to it.
    """
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(engine, model, use_orig_params=use_orig_params)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, reference.master)]
    for step in range(4):
        loss_of(sharded, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        for m in (sharded, reference.master):
            for p in m.parameters():
                if p.grad is not None:
                    change(p, step)
        check_gradients(engine, sharded, reference, f"changed after step {step}")
        for optimizer in optimizers:
            optimizer.step()
        if step == 2:
            for optimizer in optimizers:
                optimizer.zero_grad()
        check_parameters(engine, sharded, reference, f"after step {step}")


@ranks(2)
@both_ways
@pytest.mark.parametrize(
    "precision",
    [PRECISIONS[0], BF16, Precision("pure bf16", model=torch.bfloat16)],
    ids=lambda p: p.name,
)
def test_gradients_have_the_parameters_type_and_shape(
    rank, world, engine, use_orig_params, precision
):
    sharded = wrap_blocks(
        engine, toy(dtype=precision.model), use_orig_params=use_orig_params, **precision.options()
    )
    loss_of(sharded, tokens(rank, 0)).backward()
    for name, p in sharded.named_parameters():
        assert p.dtype == precision.model, name
        if p.grad is not None:
            assert p.grad.dtype == p.dtype and p.grad.shape == p.shape, name
        else:
            assert p.numel() == 0, name


@ranks(2, 3)
@both_ways
def test_user_writes_parameters_between_steps(rank, world, engine, use_orig_params):
    """The next forward uses values that the user writes in place into the sharded parameters."""
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(engine, model, use_orig_params=use_orig_params)
    for step in range(3):
        loss = loss_of(sharded, tokens(rank, step))
        check_equal(
            {"loss": loss.detach()},
            {"loss": reference.backward(tokens(rank, step))},
            f"step {step}",
            rtol=0.0 if engine == "fsdpc" else 1e-6,
        )
        loss.backward()
        with torch.no_grad():
            for m in (sharded, reference.master):
                for p in m.parameters():
                    p.mul_(0.9)


@ranks(2, 3)
@pytest.mark.parametrize("late", [0, 1])
def test_user_writes_parameters_after_evaluation(rank, world, engine, late):
    """A rank that has evaluated changes its parameters while another rank still evaluates."""
    model = toy(blocks=4)
    plain = copy.deepcopy(model)
    sharded = wrap_blocks(engine, model, use_orig_params=True)
    if rank == late:
        sharded.module.blocks[1].module.up.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    with torch.no_grad():
        for step in range(3):
            logits = sharded(tokens(rank, step))
            for p in sharded.parameters():
                p.mul_(0.5)
            check_equal(
                {"logits": logits},
                {"logits": plain(tokens(rank, step))},
                f"evaluation {step}",
                rtol=0.0 if engine == "fsdpc" else 1e-6,
            )
            for p in plain.parameters():
                p.mul_(0.5)


class Phases(nn.Module):
    """A module with a complex parameter."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mix(x) * self.turn).real


@ranks(2)
def test_complex_parameters_are_refused_by_name_and_carried_frozen(rank, world):
    ways = [
        lambda m: wrap("fsdpc", m, use_orig_params=True),
        lambda m: wrap("fsdpc", m, use_orig_params=False),
        fsdpc.fully_shard,
        lambda m: units_of_calls(m, fsdpc.fully_shard),
        lambda m: units_of(m, None),
    ]
    for way in ways:
        with pytest.raises(TypeError, match="parameter turn is complex .*view_as_complex"):
            way(Phases(trained=True))
    for way in ways[:3]:
        model = way(Phases(trained=False))
        model(torch.ones(2, 4)).sum().backward()

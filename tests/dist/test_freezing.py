"""Parameters that are frozen after they were wrapped, in the ways in which programs do it, against
the unsharded model over several optimizer steps.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from flags import Pair, both_ways, every_strategy, params_of, sharded
from harness import ranks
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import PRECISIONS, Toy, loss_of, summon, tokens, toy, wrap_blocks

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc import fully_shard

UNITS = ["blocks.0", "blocks.1"]


# --- whole units: either value of use_orig_params ------------------------------------------------


@ranks(1, 2, 3)
@both_ways
@every_strategy
def test_units_are_frozen_after_wrapping(rank, world, use_orig_params, strategy):
    pair = Pair(rank, use_orig_params=use_orig_params, **sharded(strategy, world))
    pair.set("blocks.0", False)
    for _ in range(3):
        pair.step()


@ranks(2)
@both_ways
def test_a_unit_is_frozen_after_the_first_step_and_unfrozen_later(rank, world, use_orig_params):
    pair = Pair(rank, use_orig_params=use_orig_params)
    for flag in (True, False, False, True, True):
        pair.set("blocks.1", flag)
        pair.step()


@ranks(2)
@both_ways
def test_everything_is_frozen_for_one_pass(rank, world, use_orig_params):
    pair = Pair(rank, use_orig_params=use_orig_params)
    pair.step()
    pair.set("", False)
    assert not loss_of(pair.model, pair.batch()).requires_grad
    pair.set("", True)
    pair.step()


@ranks(2, 3)
@both_ways
def test_parts_are_trained_alternately(rank, world, use_orig_params):
    """As a generator and its discriminator, each frozen while the other is trained."""
    pair = Pair(rank, use_orig_params=use_orig_params)
    for step in range(4):
        pair.set(UNITS[step % 2], True)
        pair.set(UNITS[1 - step % 2], False)
        pair.step()


@ranks(2)
@both_ways
def test_a_unit_is_frozen_between_forward_and_backward(rank, world, use_orig_params):
    pair = Pair(rank, use_orig_params=use_orig_params)
    pair.step()
    pair.step(lambda: pair.set("blocks.0", False))
    pair.step()
    pair.set("blocks.0", True)
    pair.step()


@ranks(2)
@both_ways
def test_frozen_for_a_pass_between_forward_and_backward(rank, world, use_orig_params):
    """As peft's adapters are, for the outputs of the model without them (trl's DPO)."""
    pair = Pair(rank, use_orig_params=use_orig_params)

    def another_pass(path):
        pair.set(path, False)
        with torch.no_grad():
            pair.model(pair.batch(1))
        pair.set(path, True)

    for path in ("", "blocks.0", "blocks.1"):
        for between in (lambda path=path: another_pass(path), lambda: None):
            pair.step(between)


class Adapters(nn.Module):
    """Two of which one is used and trained, in the root, before a frozen head."""

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
    if way == "by tensors":  # that were taken where the modules showed them
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
    """The root of fully_shard shows gathered tensors then; what is set on these holds for the
    parameters. A parameter that is trained for the first time was not written to by an optimizer.
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
            # The class cuts at elements: a rank may hold nothing of a parameter.
            assert (ours.grad is None) == (param.grad is None) or interface == "class"
            if param.grad is not None:
                param.grad /= world
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with summon(model) if interface == "class" else nullcontext():
        ours = [p if interface == "class" else p.full_tensor() for p in model.parameters()]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@ranks(2)
@both_ways
def test_a_unit_is_frozen_while_gradients_accumulate(rank, world, use_orig_params):
    pair = Pair(rank, use_orig_params=use_orig_params)
    for _ in range(2):
        pair.accumulate(1)
        pair.set("blocks.0", False)
        pair.accumulate(2)
        pair.step()
        pair.set("blocks.0", True)
    pair.step()


@ranks(2)
@both_ways
def test_a_gradient_of_before_stays_while_its_unit_is_frozen(rank, world, use_orig_params):
    pair = Pair(rank, use_orig_params=use_orig_params)
    pair.step(zero=False)
    pair.set("blocks.0", False)
    pair.step(zero=False)
    pair.set("blocks.0", True)
    pair.step()


# --- single parameters: use_orig_params=True -----------------------------------------------------


@ranks(1, 2, 3)
@pytest.mark.parametrize("wrapped", ["units", "one unit"])
def test_all_but_the_head_is_frozen(rank, world, wrapped):
    from toys import wrap

    pair = Pair(rank, use_orig_params=True, wrapped=wrap_blocks if wrapped == "units" else wrap)
    pair.set("", False)
    pair.set("head", True)
    for _ in range(3):
        pair.step()


@ranks(2, 3)
@pytest.mark.parametrize("step", [0, 1])
def test_norms_are_frozen(rank, world, step):
    pair = Pair(rank, use_orig_params=True)
    for number in range(4):
        if number == step:
            for path in ("blocks.0.norm", "blocks.1.norm", "norm"):
                pair.set(path, False)
        pair.step()


@ranks(2)
@pytest.mark.parametrize(
    "path",
    ["embed", "blocks.0.norm", "blocks.0.norm.weight", "blocks.0.up.bias", "head.bias"],
)
@pytest.mark.parametrize("step", [0, 1])
def test_one_parameter_is_frozen_and_unfrozen(rank, world, path, step):
    pair = Pair(rank, use_orig_params=True)
    for number in range(5):
        if number == step:
            pair.set(path, False)
        if number == step + 2:
            pair.set(path, True)
        pair.step()


@ranks(2)
def test_another_parameter_every_step(rank, world):
    pair = Pair(rank, use_orig_params=True)
    names = [name for name, _ in toy().named_parameters() if name != "head.weight"]
    for number in range(2 * len(names)):
        pair.set(names[number % len(names)], number >= len(names))
        pair.step(zero=number % 3 != 0)


class Branches(nn.Module):
    """Which branch runs is chosen from outside; the others' parameters go unused."""

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
def test_a_tied_weight_is_frozen(rank, world):
    plain = toy()
    plain.head.weight = plain.embed.weight
    pair = Pair(rank, plain=plain, use_orig_params=True)
    for flag in (True, False, True):
        pair.set("embed.weight", flag)
        pair.step()


@ranks(2)
def test_single_parameters_are_frozen_between_forward_and_backward(rank, world):
    pair = Pair(rank, use_orig_params=True)
    for path in ("blocks.0.norm.weight", "blocks.1.down.weight", "head.bias"):
        pair.step(lambda path=path: pair.set(path, False))
        pair.step()


@ranks(2)
@pytest.mark.parametrize("precision", [PRECISIONS[1], PRECISIONS[2]], ids=lambda p: p.name)
def test_freezing_under_mixed_precision(rank, world, precision):
    pair = Pair(rank, use_orig_params=True, precision=precision)
    for flag in (True, False, True):
        pair.set("blocks.0", flag)
        pair.set("norm", flag)
        pair.step()


@ranks(4)
def test_freezing_over_replicas(rank, world):
    pair = Pair(
        rank,
        use_orig_params=True,
        **sharded(ShardingStrategy.HYBRID_SHARD, world),
    )
    for flag in (True, False, True):
        pair.set("blocks.0", flag)
        pair.set("head", flag)
        pair.step()


@ranks(2)
def test_gathered_tensors_have_the_flags(rank, world):
    """What forward reads as requires_grad is what was set."""
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

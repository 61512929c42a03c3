"""Tests of parameters that the program adds or replaces after sharding. If no unit manages a
parameter that needs gradients, the next forward raises an error with its name. Parameters of a unit
cannot be replaced or changed in the middle of a forward, and values that are written in a forward
reach no other rank.
"""

from __future__ import annotations

import faulthandler

import pytest
import torch
from harness import ranks
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from toys import by_door, loss_of, tokens, toy, wrap

import fsdpc
from fsdpc import fully_shard

BOTH = pytest.mark.parametrize("interface", ["class", "flat", "fully_shard"])


def shard(module, interface):
    if interface == "fully_shard":
        return fully_shard(module)
    return wrap("fsdpc", module, use_orig_params=interface == "class")


def build(interface, **options):
    model = by_door(interface, toy(), **options)
    return model, getattr(model, "module", model)


class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.ones(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def adapter(inner):
    inner.head = Adapted(inner.head)
    return {"head.a": inner.head.a, "head.b": inner.head.b}


def embedding(inner):
    inner.embed = nn.Embedding(20, 6)
    return {"embed.weight": inner.embed.weight}


def below_a_unit(inner):
    gain = nn.Parameter(torch.ones(6))
    block = inner.blocks[1]
    getattr(block, "_fsdp_wrapped_module", block).register_parameter("gain", gain)
    return {"blocks.1.gain": gain}


@ranks(1, 2)
@BOTH
def test_what_no_unit_manages(rank, world, interface):
    def step(model):
        loss_of(model, tokens(rank, 0)).backward()

    for add in (adapter, embedding, below_a_unit):
        for before in (True, False):  # before the first forward, or before a later one
            model, inner = build(interface)
            if not before:
                step(model)
            added = add(inner)
            with torch.no_grad():
                loss_of(model, tokens(rank, 0))
            if world == 1:
                step(model)
                continue
            names = ", ".join(map(repr, added))
            for _ in range(2):
                with pytest.raises(fsdpc.StateError, match=f"parameters {names} were added after"):
                    step(model)
            for p in added.values():
                p.requires_grad_(False)
            step(model)


@ranks(2)
@BOTH
def test_what_stays_or_is_taken_in(rank, world, interface):
    def step(model):
        loss_of(model, tokens(rank, 0)).backward()

    model, inner = build(interface)
    step(model)
    inner.head = Adapted(inner.head)
    inner.head.extra = fsdpc.mark_replicated(nn.Linear(3, 3))
    with pytest.raises(fsdpc.StateError, match=r"parameters 'head.a', 'head.b' were added"):
        step(model)
    fsdpc.mark_replicated(inner.head.a)
    fsdpc.mark_replicated(inner.head.b)
    inner.side = DistributedDataParallel(nn.Linear(2, 2))
    inner.other = shard(nn.Linear(6, 6), interface)
    inner.table = nn.Parameter(torch.ones(3), requires_grad=False)
    step(model)
    assert inner.head.a.grad is not None or inner.head.b.grad is not None

    kept = nn.Linear(6, 6)
    if interface == "fully_shard":
        model = nn.Sequential(nn.Linear(6, 6), kept)
        model = fully_shard(model, ignored_params=set(kept.parameters()))
    else:
        model = wrap("fsdpc", nn.Sequential(nn.Linear(6, 6), kept), ignored_states=[kept])
    model(torch.ones(2, 6)).sum().backward()
    assert kept.weight.grad is not None
    with pytest.raises(TypeError, match="mark_replicated expects"):
        fsdpc.mark_replicated("head")


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight = nn.Parameter(self.weight.clamp(-0.1, 0.1))
        return super().forward(x)


class Writer(nn.Linear):
    """A layer that changes its weight or bias in forward, in one of several ways."""

    way = ""

    def forward(self, x):
        if self.way == "put back":
            self.weight.data.mul_(0.5)
            self.bias.data.numpy()[:] += 1
            y = super().forward(x)
            self.bias.data.numpy()[:] -= 1
            self.weight.data.mul_(2)
            return y
        if self.way == "clamped":
            self.weight.data.clamp_(-9, 9)
        elif self.way == "scaled":
            self.weight.data.mul_(0.5)
        elif self.way == "numpy":
            self.bias.data.numpy()[0] = 3
        elif self.way == "assigned":
            self.weight.data = self.weight.data * 0.5
        return super().forward(x)


@ranks(2)
@BOTH
def test_a_parameter_replaced_in_forward(rank, world, interface):
    model = shard(nn.Sequential(nn.Linear(4, 4), Clamped(4, 4)), interface)
    for _ in range(2):
        with pytest.raises(
            fsdpc.StateError, match=r"'1.weight' of unit .* was replaced in forward"
        ):
            model(torch.ones(2, 4))
    (model.module if interface != "fully_shard" else model)[1].forward = lambda x: x
    model(torch.ones(2, 4)).sum().backward()


def writers(seed, kind=Writer):
    torch.manual_seed(seed)
    layers = [kind(5, 5) for _ in range(3)]
    for layer in layers:  # exact in binary
        layer.weight.data = torch.randint(-4, 5, (5, 5)) / 8
        layer.bias.data = torch.randint(-4, 5, (5,)) / 8
    return nn.Sequential(*layers)


def train(model, rank, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    losses = []
    for step in range(steps):
        if step % 2:
            faulthandler.enable()  # a program may do this at any time
        x = torch.randint(-2, 3, (2, 5), generator=torch.Generator().manual_seed(step)).float()
        loss = model(x).tanh().sum() if step else model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(1, 2, env={"FSDPC_POISON": "0"})
@BOTH
def test_writes_in_forward_are_a_ranks_own(rank, world, interface):
    model = writers(0)
    for one in model:
        one.way = "put back"
    expected = train(model, rank, steps=1)
    model = shard(writers(0), interface)
    inner = model if interface == "fully_shard" else model.module
    for one in inner:
        one.way = "put back" if rank == 0 else ""
    first = train(model, rank, steps=1)
    other = train(writers(0), rank, steps=1)
    assert first == (expected if rank == 0 else other), "each rank its own values"
    for one in inner:
        one.way = "clamped"  # changes nothing
    train(model, rank)


@ranks(2)
@pytest.mark.parametrize("way", ["scaled", "numpy", "assigned"])
@BOTH
def test_changes_in_forward_are_refused(rank, world, interface, way):
    model = shard(writers(0), interface)
    inner = model if interface == "fully_shard" else model.module
    inner[1].way = way
    words = "other memory" if way == "assigned" else "changed in place during forward"
    with pytest.raises(fsdpc.StateError, match=words):
        train(model, rank)
    if way != "assigned":
        inner[1].way = ""
        expected, plain = train(writers(0), rank), shard(writers(0), interface)
        assert train(model, rank)[1:] != expected[:-1]  # the model can still train
        assert train(plain, rank) == pytest.approx(expected)


@ranks(2)
def test_writes_into_unsharded_parameters(rank, world):
    model = fully_shard(writers(0))
    model.unshard()  # before any forward
    model[0].weight.data.mul_(2 + rank)
    assert torch.equal(model[0].weight, writers(0)[0].weight * (2 + rank))
    with pytest.raises(fsdpc.StateError, match="changed in place"):
        model.reshard()
    torch.testing.assert_close(model[0].weight.full_tensor(), writers(0)[0].weight)


@ranks(2)
@BOTH
def test_parameters_over_common_memory(rank, world, interface):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = nn.Parameter(first.weight.data[1:3])
    model = nn.Sequential(first, nn.Sequential(second))
    with pytest.raises(ValueError, match="are different Parameters over common memory"):
        shard(model, interface)
    if interface != "fully_shard":
        policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy({nn.Linear})
        with pytest.raises(ValueError, match=r"'0.weight' and '1.0.weight'|'1.0.weight' and '0."):
            wrap("fsdpc", model, auto_wrap_policy=policy)
    second.weight = first.weight
    shard(model, interface)


@ranks(2)
def test_values_lent_to_a_sharded_class(rank, world):
    """functional_call may not lend values to a unit under any name, because the unit would compute
    with its own shards. The same holds for a unit inside another unit. The error does not change
    the model.
    """
    x = torch.ones(3, 4)
    for flat, nested in ((True, False), (True, True), (False, True)):
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        want = plain(x)
        full = {name: param.detach() * 2 for name, param in plain.named_parameters()}
        if nested:
            plain[0] = wrap("fsdpc", plain[0], use_orig_params=not flat)
        model = wrap("fsdpc", plain, use_orig_params=not flat)
        model(x).sum().backward()
        own = {name: param.detach() * 2 for name, param in model.named_parameters()}
        inner = {f"_fsdp_wrapped_module.{name}": value for name, value in full.items()}
        for values in (own, full, inner, dict(list(own.items())[-1:])):
            with pytest.raises(NotImplementedError, match="unit .*functional_call cannot lend"):
                functional_call(model, values, (x,))
            torch.testing.assert_close(model(x), want)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(torch.zeros_like(vector), model.parameters())
        assert not model(x).any()


@ranks(2)
def test_what_stands_for_a_flat_parameter(rank, world):
    """An error names a tensor that replaces a flat parameter or a parameter of a unit. A module
    uses the buffers that functional_call lends to it.
    """
    model = wrap("fsdpc", nn.Sequential(nn.Linear(4, 4), wrap("fsdpc", nn.BatchNorm1d(4))))
    x = torch.ones(2, 4)
    inner, flat = model.module, model.module._flat_param
    inner._flat_param = nn.Parameter(flat.detach() * 2, requires_grad=False)
    with pytest.raises(fsdpc.StateError, match="'_flat_param' of unit .* was replaced .* copy"):
        model(x)
    inner._flat_param = flat
    model(x)
    weight = inner[0].weight
    inner[0].weight = torch.ones(4, 4)
    with pytest.raises(fsdpc.StateError, match="'0.weight' of unit .*summon_full_params"):
        model(x)
    inner[0].weight = weight
    lent = {"1.running_mean": torch.full((4,), 9.0)}  # the name lacks "_fsdp_wrapped_module."
    functional_call(model, lent, (x,))
    assert 0 < (lent["1.running_mean"] - 9).abs().max() < 2
    assert model.module[1].module.running_mean.abs().max() < 2
    model(x).sum().backward()


@ranks(2)
@pytest.mark.parametrize("interface", ["class", "fully_shard"])
def test_a_parameter_set_past_the_modules_setattr(rank, world, interface):
    """The parameter is set in the table of parameters and as a plain attribute,
    which hides the entry of the table.
    """
    model = shard(nn.Sequential(nn.Linear(4, 4)), interface)
    x = torch.ones(2, 4)
    model(x)
    linear, new = model[0], nn.Parameter(torch.full((4, 4), 2.0))
    linear._parameters["weight"] = new
    object.__setattr__(linear, "weight", new)
    out = model(x)
    assert (out > 7).all()  # 4 * 2.0, plus the bias
    out.sum().backward()
    assert "weight" not in linear.__dict__
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert torch.allclose(model(x) - out, torch.full((2, 4), -10.0))

"""Gradients of sharded parameters by `backward(inputs=)` and `autograd.grad`."""

from __future__ import annotations

import pytest
import torch
from harness import ranks
from torch import nn
from toys import by_door, loss_of, no_sync_if, tokens, toy

from fsdpc import StateError, fully_shard


def sharded(kind):
    return by_door(kind, toy())


def local(value):
    return getattr(value, "_local_tensor", value)


def same(got, expected, what):
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one is None) == (other is None), (what, number, one, other)
        assert one is None or torch.equal(local(one), local(other)), (what, number)


def refused(reason, loss, inputs, **options):
    with pytest.raises(StateError, match="sharded parameter '.*' of unit.*" + reason):
        torch.autograd.grad(loss, inputs, **options)


class Adjoint(torch.autograd.Function):
    """A function whose backward runs another backward, as torchdiffeq's adjoint does."""

    @staticmethod
    def forward(ctx, model, batch, *params):
        ctx.model, ctx.batch, ctx.params = model, batch, params
        with torch.no_grad():
            return loss_of(model, batch)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            loss = loss_of(ctx.model, ctx.batch)
        return None, None, *torch.autograd.grad(loss, ctx.params, grad, allow_unused=True)


@ranks(1, 3)
@pytest.mark.parametrize("kind", ["original", "flat", "fully_shard"])
def test_asked_gradients_are_those_of_a_backward(rank, world, kind):
    model = sharded(kind)
    params = list(model.parameters())
    batches = [tokens(rank, step) for step in range(3)]
    expected = []
    for batch in batches:
        loss_of(model, batch).backward()
        expected.append([None if p.grad is None else p.grad.clone() for p in params])
        model.zero_grad()
    nothing = [p for p in params if p.numel() == 0]

    def whole(grads):  # a rank shows no gradient of a parameter without elements
        return [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]

    loss_of(model, batches[0]).backward(inputs=params)
    same([p.grad for p in params], expected[0], "backward(inputs=all)")
    kept = [p.grad for p in params]
    first = torch.autograd.grad(loss_of(model, batches[1]), params)
    same(first, whole(expected[1]), "grad")
    same([p.grad for p in params], expected[0], "what a backward had made before grad")
    assert all(p.grad is one for p, one in zip(params, kept, strict=True))
    second = torch.autograd.grad(loss_of(model, batches[2]), params, allow_unused=True)
    same(second, whole(expected[2]), "grad again")
    same(first, whole(expected[1]), "the first result after the second")
    loss_of(model, batches[1]).backward()  # adds to the gradients of the first batch
    summed = [None if a is None else a + b for a, b in zip(expected[0], expected[1], strict=True)]
    torch.testing.assert_close(
        [local(p.grad) for p in params if p.grad is not None],
        [local(g) for g in summed if g is not None],
    )
    model.zero_grad()

    some = params[::2]
    loss_of(model, batches[0]).backward(inputs=some)
    same([p.grad for p in some], expected[0][::2], "backward(inputs=some)")
    assert all(p.grad is None for p in params[1::2])
    assert all(p.grad is None for p in nothing) or kind == "fully_shard"


@ranks(2)
@pytest.mark.parametrize("kind", ["original", "flat", "fully_shard"])
def test_asked_beside_inputs_unused_and_refused(rank, world, kind):
    model = sharded(kind)
    params = list(model.parameters())
    block = model.blocks[0]
    loose = torch.ones(4, 6, requires_grad=True)
    x = loose * (rank + 1)
    own = [p for p in block.parameters() if p.numel() > 0]
    y = block(x).pow(2).sum()  # a part of the model; the other blocks are not used
    y.backward(inputs=[*own, loose, x], retain_graph=True)
    expected = [one.grad.clone() for one in (*own, loose, x)]
    unused = [p for p in model.blocks[1].parameters() if p.numel() > 0][:1]
    model.zero_grad()
    loose.grad = None
    edge = torch.autograd.graph.get_gradient_edge(own[0])
    got = torch.autograd.grad(
        y, [*own, loose, x, *unused, edge], retain_graph=True, allow_unused=True
    )
    same(got, [*expected, *[None for _ in unused], expected[0]], "parameters beside inputs")
    with pytest.raises(RuntimeError, match=f"at index {len(own)} appears to not have been used"):
        torch.autograd.grad(y, [*own, *unused])

    parts = [p.to_local() if kind == "fully_shard" else p for p in own]
    penalty = sum(part.pow(2).sum() for part in parts)  # uses the shards, not gathered values
    got = torch.autograd.grad(penalty, own, create_graph=True)
    same(got, [2 * local(p).detach() for p in own], "a loss of the shards alone")

    def loss():
        return loss_of(model, tokens(rank, 0))

    refused("create_graph", loss(), params, create_graph=True)
    with no_sync_if(model, kind != "fully_shard"):
        if kind == "fully_shard":
            model.set_requires_gradient_sync(False)
        refused("no_sync", loss(), params)
    if kind == "fully_shard":
        model.set_requires_gradient_sync(True)
        value = loss()
        refused("beside gathered parameters", value, list(model.parameters()))
    with pytest.raises(StateError, match="inside another backward, as by an adjoint method"):
        Adjoint.apply(model, tokens(rank, 0), *params).backward()
    handle = params[0].register_post_accumulate_grad_hook(lambda p: None)
    refused("post-accumulate hooks", loss(), params)
    handle.remove()
    loss().backward()  # works after all the refused calls


@ranks(2)
def test_asked_of_a_model_that_was_filled_on_a_rank_without_a_part(rank, world):
    """Gradients are right after ``to_empty``, also on a rank that has no elements of a parameter.

    ``to_empty`` swaps all fields of a parameter, even if there is no value to fill in.
    """
    with torch.device("meta"):
        model = nn.Linear(1, 1)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1)
    params = list(model.parameters())
    model(torch.full((2, 1), float(rank + 1))).pow(2).mean().backward(inputs=params)
    assert [param.grad.full_tensor().item() for param in params] == [8, 5]

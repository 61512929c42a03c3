"""``fully_shard`` as programs and frameworks use it: outputs of any type, weights that are read
outside of their modules, models that get their values on the meta device.
"""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

from fsdpc import MixedPrecisionPolicy, fully_shard

LOW = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)

# --- outputs -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    twice: torch.Tensor = dataclasses.field(init=False)


class Registered:
    def __init__(self, x):
        self.x = x


torch.utils._pytree.register_pytree_node(
    Registered, lambda value: ([value.x], None), lambda items, context: Registered(*items)
)


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(4, 4)

    def forward(self, x):
        y = self.inner(x)
        if self.kind == "dataclass":
            output = Output(y)
            output.twice = 2 * y
            return output
        return Registered(y) if self.kind == "registered" else collections.deque([y])


@ranks(2)
def test_outputs_of_any_type_are_cast_and_train(rank, world):
    """torch loses the gradients of the last two, and raises for the first."""
    for kind in ("dataclass", "registered", "deque"):
        model = Returns(kind)
        with torch.no_grad():
            model.inner.weight.fill_(1)
        fully_shard(model.inner, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        fully_shard(model, mp_policy=LOW)
        output = model(torch.ones(2, 4) * (rank + 1))
        tensor = output[0] if kind == "deque" else getattr(output, "twice", None)
        tensor = output.x if tensor is None else tensor
        assert tensor.dtype == torch.float32, kind
        tensor.sum().backward()
        scale = 2 if kind == "dataclass" else 1
        grad = model.inner.weight.grad.full_tensor()
        assert torch.equal(grad, torch.full_like(grad, 3.0 * scale)), kind


# --- weights that are read outside of their modules ----------------------------------------------


class Chunked(nn.Module):
    """A language model whose loss reads the head's weight chunk by chunk; `after`: outside."""

    def __init__(self, after=False):
        super().__init__()
        torch.manual_seed(0)
        self.after, self.embed = after, nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def loss(self, hidden, labels):
        parts = zip(hidden.chunk(2, 1), labels.chunk(2, 1), strict=True)
        scores = [
            functional.cross_entropy((h @ self.head.weight.T).flatten(0, 1), y.flatten())
            for h, y in parts
        ]
        return sum(scores) / 2 + 0.1 * self.norm.weight.square().sum()

    def forward(self, ids, labels):
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        hidden = self.norm(hidden)
        return hidden if self.after else self.loss(hidden, labels)


def chunked_loss(model, rank, number):
    generator = torch.Generator().manual_seed(10 * number + rank)
    ids, labels = torch.randint(11, (2, 2, 6), generator=generator)
    output = model(ids, labels)
    return model.loss(output, labels) if model.after else output


def frozen(model):
    for param in (*model.norm.parameters(), *model.head.parameters()):
        param.requires_grad_(False)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)


def train_chunked(rank, world, after=False, group=False, reshard=None, freeze=False):
    model, reference = Chunked(after), Chunked(after)
    for one in (model, reference) if freeze else ():
        frozen(one)
    for block in model.blocks:
        fully_shard(block)
    if group:
        fully_shard([model.norm, model.head], reshard_after_forward=reshard)
    fully_shard(model)
    optimizers = sgd(model), sgd(reference)
    for number in range(2):
        with torch.no_grad():
            if not after:  # as with torch, a root's values are readable after training forwards
                chunked_loss(model, rank, number)
        chunked_loss(model, rank, number).backward()
        (sum(chunked_loss(reference, r, number) for r in range(world)) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), want, rtol=0, atol=1e-6, msg=name)
    return model


@ranks(2)
def test_losses_that_read_a_head_they_never_call(rank, world):
    """trl's way: norm and head are one unit, and only the norm is called."""
    for reshard in (False, True):
        for freeze in (False, True):
            train_chunked(rank, world, group=True, reshard=reshard, freeze=freeze)
    train_chunked(rank, world, after=True)
    train_chunked(rank, world, after=True, group=True, reshard=False)


@ranks(2)
def test_what_modules_show_after_a_forward(rank, world):
    """As with torch: plain parameters of units that are kept, until their backward or reshard()."""
    model = train_chunked(rank, world, group=True, reshard=False)
    kept = [model.embed.weight, model.norm.weight, model.head.weight]
    chunked_loss(model, rank, 0).backward()
    grads = [param.grad.full_tensor() for param in kept]

    loss = chunked_loss(model, rank, 0)
    shown = [model.embed.weight, model.norm.weight, model.head.weight]
    assert not any(isinstance(param, DTensor) for param in shown)
    assert isinstance(model.blocks[0].weight, DTensor)
    with pytest.raises(RuntimeError, match=r"gathered parameter 'embed\.weight'"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert isinstance(model.head.state_dict()["weight"], DTensor)
    model.zero_grad()
    assert model.embed.weight is kept[0]
    loss.backward()
    for param, grad in zip(kept, grads, strict=True):
        assert torch.equal(param.grad.full_tensor(), grad)

    loss = chunked_loss(model, rank, 0)
    new = distribute_tensor(torch.zeros(11, 8), kept[2].device_mesh, [Shard(0)])
    model.head.weight = nn.Parameter(new)
    loss.backward()
    loss = chunked_loss(model, rank, 0)
    assert model.head.weight.sum() == 0
    model.reshard()
    assert isinstance(model.embed.weight, DTensor)
    loss = chunked_loss(model, rank, 0)
    del loss  # no backward will come
    assert isinstance(model.head.weight, DTensor)

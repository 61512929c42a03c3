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
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
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
    """torch loses the gradients of the registered class and the deque,
    and raises an error for the dataclass.
    """
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
    """A language model whose loss reads the head's weight in chunks. With `after`, the loss is
    computed outside of forward.
    """

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
    train_beside(model, reference, rank, world)
    return model


def train_beside(model, reference, rank, world):
    """Train both models for two steps, the reference with the batches of all ranks,
    and check that their weights agree.
    """
    optimizers = sgd(model), sgd(reference)
    for number in range(2):
        with torch.no_grad():
            # As with torch, the root's values can be read only after a training forward, not after
            # one under no_grad.
            if not model.after:
                chunked_loss(model, rank, number)
        chunked_loss(model, rank, number).backward()
        (sum(chunked_loss(reference, r, number) for r in range(world)) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), want, rtol=0, atol=1e-6, msg=name)


@ranks(2)
def test_losses_that_read_a_head_they_never_call(rank, world):
    """As in trl, the norm and the head are one unit, and only the norm is called."""
    for reshard in (False, True):
        for freeze in (False, True):
            train_chunked(rank, world, group=True, reshard=reshard, freeze=freeze)
    train_chunked(rank, world, after=True)
    train_chunked(rank, world, after=True, group=True, reshard=False)


class Asking(Chunked):
    """A model that reads the head's weight by ``full_tensor()`` if the weight is sharded."""

    def loss(self, hidden, labels):
        weight = self.head.weight
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        return functional.cross_entropy((hidden @ whole.T).flatten(0, 1), labels.flatten())


@ranks(2)
def test_full_tensors_of_a_frozen_head_inside_the_forward(rank, world):
    """As in trl with adapters, the head is a separate unit, which is never called."""
    model, reference = Asking(), Asking()
    for one in (model, reference):
        one.head.weight.requires_grad_(False)
    for unit in (*model.blocks, model.head, model):
        fully_shard(unit)
    train_beside(model, reference, rank, world)

    trainable, plain = Asking(), Asking()
    for unit in (trainable.head, trainable):
        fully_shard(unit)
    with torch.no_grad():
        assert chunked_loss(trainable, rank, 0) == chunked_loss(plain, rank, 0)
    with pytest.raises(RuntimeError, match=r"'weight' of unit 'head' .* gradient of all ranks"):
        chunked_loss(trainable, rank, 0)


@ranks(2)
def test_what_modules_show_after_a_forward(rank, world):
    """As with torch, modules show the plain parameters of units that stay gathered,
    until backward or reshard().
    """
    model = train_chunked(rank, world, group=True, reshard=False)
    kept = [model.embed.weight, model.norm.weight, model.head.weight]
    chunked_loss(model, rank, 0).backward()
    grads = [param.grad.full_tensor() for param in kept]

    loss = chunked_loss(model, rank, 0)
    shown = [model.embed.weight, model.norm.weight, model.head.weight]
    assert not any(isinstance(param, DTensor) for param in shown)
    assert isinstance(model.blocks[0].weight, DTensor)
    with pytest.raises(RuntimeError, match=r"full, plain parameter .* 'embed\.weight'"):
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


# --- values for models on the meta device --------------------------------------------------------


class Heads(Chunked):
    """A model whose root has its own parameter, and whose head may be tied to the embeddings."""

    def __init__(self, tied=False):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids) * self.scale
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return self.head(self.norm(hidden))


def put(model, name, param):
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, param)


def distributed(model, source):
    """Return the source's values as DTensors placed like the model's parameters,
    under all names of tied parameters.
    """
    values = {
        name: distribute_tensor(value.detach(), param.device_mesh, param.placements)
        for (name, param), value in zip(model.named_parameters(), source.parameters(), strict=True)
    }
    return values if "head.weight" in values else {**values, "head.weight": values["embed.weight"]}


def fill(model, source, how, rank):
    values = distributed(model, source)
    if how == "assign":
        model.load_state_dict(values, assign=True)
    elif how == "assign in parts":
        for name, value in values.items():
            model.load_state_dict({name: value}, assign=True, strict=False)
    elif how == "to_empty":
        for module in model.modules():
            module.to_empty(device="cpu", recurse=False)
        model.load_state_dict(values)
    elif how == "parameters":
        for name, _ in list(model.named_parameters()):
            put(model, name, nn.Parameter(values[name]))
    elif how == "the other name":
        for name, _ in reversed(list(model.named_parameters(remove_duplicate=False))):
            if name != "embed.weight":
                put(model, name, nn.Parameter(values[name]))
    elif how == "plain parameters":
        for name, _ in list(model.named_parameters()):
            put(model, name, nn.Parameter(source.get_parameter(name).detach().clone()))
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        options.cpu_offload = how == "broadcast, offloaded"
        set_model_state_dict(model, source.state_dict() if rank == 0 else {}, options=options)


WAYS = ["assign", "assign in parts", "to_empty", "parameters", "plain parameters"]
TIED_WAYS = ["parameters", "the other name", "broadcast", "broadcast, offloaded"]


@pytest.mark.long
@ranks(2)
def test_every_way_to_fill_a_meta_model(rank, world):
    """Each way works with and without tied weights,
    with units of one and of several modules, before and after a forward.
    """
    ids = torch.arange(11)[None]
    for tied, how in [*((False, how) for how in WAYS), *((True, how) for how in TIED_WAYS)]:
        torch.manual_seed(0)
        source = Heads(tied)
        with torch.device("meta"):
            model = Heads(tied)
        fully_shard(model.blocks[0])
        fully_shard([model.norm, model.head, *([model.embed] if tied else [])])
        fully_shard(model)
        for filled in (1, 2):
            fill(model, source, how, rank)
            output, expected = model(ids), source(ids)
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-5, msg=how)
            output.square().mean().backward()
            expected.square().mean().backward()
            for one, other in zip(model.parameters(), source.parameters(), strict=True):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=how)
            model.zero_grad()
            source.zero_grad()
            with torch.no_grad():
                source.scale.mul_(filled + 1)
                source.embed.weight.mul_(filled + 1)


@ranks(2)
def test_meta_models_that_are_not_filled(rank, world):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1])
    fully_shard(model)
    for layer in model:
        layer.reset_parameters()
    with pytest.raises(
        RuntimeError, match=r"still on meta device: \['0\.weight', '0\.bias'\]\nFor"
    ):
        model(torch.ones(2, 4))
    model[0].to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"still on meta device: \['1\.weight', '1\.bias'\]"):
        model(torch.ones(2, 4))
    model.to_empty(device="cpu")
    plain = model[0].bias = nn.Parameter(torch.ones(4))
    model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"in place of the sharded '0\.bias'"):
        torch.optim.SGD([plain], lr=0.1).step()
    assert isinstance(model[0].bias, nn.Parameter)


@ranks(2)
def test_types_of_parameters_after_a_forward(rank, world):
    """Parameters are DTensors or plain as in torch, for all values of `reshard_after_forward`,
    on a root and on a child.
    """
    for value, plain in ((None, {"1"}), (True, set()), (False, {"0", "1"})):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        fully_shard(model[0], reshard_after_forward=value)
        fully_shard(model, reshard_after_forward=value)
        for end in ("backward", "reshard"):
            output = model(torch.ones(2, 3))
            shown = {name: isinstance(p, DTensor) for name, p in model.named_parameters()}
            assert {name[0] for name, sharded in shown.items() if not sharded} == plain, value
            if end == "backward":
                output.sum().backward()
            else:
                model.reshard()
                assert all(isinstance(p, DTensor) for p in model[1].parameters())
                assert isinstance(model[0].weight, DTensor) == (value is not False)
                model[0].reshard()
            assert all(isinstance(p, DTensor) for p in model.parameters())


@ranks(2)
def test_weights_that_are_tied_after_sharding(rank, world):
    """If a loader ties weights after sharding, both modules add to one gradient."""
    ids = torch.arange(11)[None]
    for meta, alone in [(False, True), (True, False)]:
        torch.manual_seed(0)
        source = Heads(tied=True)
        with torch.device("meta" if meta else "cpu"):
            torch.manual_seed(0)
            model = Heads()
        fully_shard(model.embed if alone else [model.embed, model.norm])
        fully_shard(model)
        if meta:
            untied = Heads()
            untied.load_state_dict(source.state_dict())
            fill(model, untied, "parameters", rank)
        model.head.weight = model.embed.weight
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, source)]
        for _ in range(2):
            torch.testing.assert_close(model(ids), source(ids))
            for one, optimizer in zip((model, source), optimizers, strict=True):
                one(ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert model.head.weight is model.embed.weight
        for one, other in zip(model.parameters(), source.parameters(), strict=True):
            torch.testing.assert_close(one.full_tensor(), other)


@ranks(2)
def test_a_first_forward_in_inference_mode(rank, world):
    """The root has no parameters of its own. Its unit is made only in the first forward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    with torch.inference_mode():
        expected = model(torch.ones(1, 4))
    output = model(torch.ones(1, 4))
    output.sum().backward()
    assert torch.equal(output.detach(), expected)
    assert all(param.grad is not None for param in model.parameters())

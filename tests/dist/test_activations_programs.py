"""Programs that people run with checkpointed, compressed and offloaded activations.

Each program must give the same gradients as without these features, on plain and on sharded models.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from harness import ranks
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from toys import clean, full_gradients, full_parameters, wrap_blocks

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc.activations import checkpoint, compress, offload, offloading

WIDTH, ROWS = 32, 64  # large enough that compress() packs an activation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.relu(self.up(self.norm(x)), inplace=True))


class Tuples(Block):
    """A block that takes and returns a tensor, a view of a tensor, a dictionary and a number."""

    def forward(self, state: Any) -> Any:
        x, half, kept, calls = state
        x = super().forward(x) + kept["part"]
        return x, x[: ROWS // 2] + half, {"part": x * 0.1, "text": "no tensor"}, calls + 1


class Experts(nn.Module):
    """A module that runs one of two blocks or neither; `choice` differs between ranks and steps."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.experts[choice](x) if choice < 2 else x * 0.5


class Model(nn.Module):
    """A model of consecutive blocks; the inputs of the blocks are used again at the end."""

    kind: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.kind() for _ in range(3))
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        """Enable torch's checkpoints. Models of transformers have a method of this name."""
        self.gradient_checkpointing = True

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.enter(x)
        seen = x
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = torch_checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
            seen = seen + x * 0.1
        return seen


class InPlaceModel(Model):
    kind = InPlace


class TuplesModel(Model):
    kind = Tuples

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.enter(x)
        state = x, x[: ROWS // 2], {"part": x * 0.1, "text": "no tensor"}, 0
        for block in self.blocks:
            state = block(state)
        return state[0] + state[2]["part"] + state[1].mean() + state[3]


class ExpertsModel(Model):
    kind = Experts

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            x = block(x, (step + number) % 3)
        return x


# How each feature is installed: applied to the model once, or entered around each forward.
WRAPS: dict[str, dict[str, Any]] = {"checkpoint": {"ratio": "2/3"}, "matmul": {"policy": "matmul"}}
AROUND: dict[str, Callable[[Any], Any]] = {
    "offload": offload,
    "int8": lambda model: compress(model, "int8"),
}
BOUNDS = {"checkpoint": 0.0, "matmul": 0.0, "offload": 0.0, "int8": 0.03}


def install(name: str, model: Any) -> Callable[[], Any]:
    """Install a feature, and return the context to enter around each forward."""
    if name in WRAPS:
        checkpoint(model, **WRAPS[name])
        return nullcontext
    return partial(AROUND[name], model)


def made(kind: type[Model], sharded: bool) -> Any:
    model = kind()
    policy = (Block, Experts) if kind is ExpertsModel else (kind.kind,)
    return wrap_blocks("fsdpc", model, *policy, use_orig_params=True) if sharded else model


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def train(model: Any, around: Any, rank: int, between: Any = None) -> dict[str, Tensor]:
    """Train two steps, and return the gradients of the second step by name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        torch.manual_seed(50 + 10 * step + rank)
        with around() if step else nullcontext():
            loss = model(batch(rank, step), step + rank).square().mean()
        if between is not None:
            between(model, rank)
        loss.backward()
        if step == 0:
            optimizer.step()
    if isinstance(model, FSDP):
        return full_gradients(model)
    return {
        clean(n): torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }


def check(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float, what: Any) -> None:
    assert found.keys() == expected.keys()
    gap = sum(float((found[n] - expected[n]).norm()) ** 2 for n in found) ** 0.5
    norm = sum(float(grad.norm()) ** 2 for grad in expected.values()) ** 0.5
    assert 0 < norm and gap <= bound * norm, (what, gap / norm)


def compare(kind: type[Model], rank: int, world: int, between: Any = None) -> None:
    """Compare runs with one feature each to a run with none. Several ranks shard the models."""
    torch.set_num_threads(1)
    offloading._said[:] = ["said"]
    sharded = world > 1
    expected = train(made(kind, sharded), nullcontext, rank, between)
    for name, bound in BOUNDS.items():
        model = made(kind, sharded)
        if kind is InPlaceModel and name == "matmul":
            with pytest.raises(RuntimeError, match="Tensor cached .* has been mutated"):
                train(model, install(name, model), rank, between)
            continue
        found = train(model, install(name, model), rank, between)
        check(found, expected, bound, name)


@pytest.mark.parametrize("kind", [Model, InPlaceModel, TuplesModel, ExpertsModel])
@ranks(1, 2)
def test_blocks(rank: int, world: int, kind: type[Model]):
    """The features work with several kinds of blocks.

    There are blocks whose inputs are used again, blocks with in-place operators, blocks that take
    and return tuples, dictionaries and views, and blocks that only some ranks run.
    """
    compare(kind, rank, world)


@ranks(1, 2)
def test_evaluation_and_generation_between_forward_and_backward(rank: int, world: int):
    def between(model: Any, rank: int) -> None:
        state = torch.get_rng_state()
        model.eval()
        with torch.no_grad():
            x = batch(rank, 5)
            for _ in range(3):  # as generate() does
                x = model(x).tanh()
        model.train()
        torch.set_rng_state(state)

    compare(Model, rank, world, between)


@ranks(1, 2)
def test_gradient_checkpointing_enable_and_ours(rank: int, world: int):
    """A model may checkpoint its own blocks while a feature of fsdpc is installed."""
    torch.set_num_threads(1)
    expected = train(made(Model, world > 1), nullcontext, rank)
    for name, bound in BOUNDS.items():
        model = made(Model, world > 1)
        (model.module if world > 1 else model).gradient_checkpointing_enable()
        check(train(model, install(name, model), rank), expected, bound, name)


@ranks(1, 2)
def test_hooks_of_the_user_around_and_inside(rank: int, world: int):
    """The user's saved-tensor hooks run, but compress() hides those that were entered before it."""
    torch.set_num_threads(1)
    expected = train(made(Model, world > 1), nullcontext, rank)
    seen: list[torch.Size] = []

    def own() -> Any:
        return saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t)

    for name in ("int8", "offload", "checkpoint"):
        for hooks, inside in product((own, save_on_cpu), (True, False)):
            model = made(Model, world > 1)
            ours = install(name, model)
            seen.clear()
            order = (ours, hooks) if inside else (hooks, ours)
            found = train(model, partial(entered, *order), rank)
            hidden = name == "int8" and not inside
            check(found, expected, BOUNDS[name] if hidden else 0.0, (name, hooks, inside))
            if hooks is own:
                assert bool(seen) != hidden, (name, inside)


@contextmanager
def entered(*kinds: Callable[[], Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(kind())
        yield


@ranks(1, 2)
def test_second_derivatives(rank: int, world: int):
    """Second derivatives work, but torch refuses them if a policy keeps results of operators."""
    torch.set_num_threads(1)

    def penalty(model: Any, around: Any) -> Tensor:
        torch.manual_seed(3)
        x = batch(rank, 0).requires_grad_()
        with around:
            out = model(x).square().mean()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        loss = grad.square().sum()
        loss.backward()
        return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])

    expected = penalty(made(Model, world > 1), nullcontext())
    for name, bound in BOUNDS.items():
        model = made(Model, world > 1)
        if name == "matmul":
            with pytest.raises(RuntimeError, match="only allowed to backward once on any region"):
                penalty(model, install(name, model)())
            continue
        gap = float((penalty(model, install(name, model)()) - expected).norm() / expected.norm())
        assert gap <= bound, (name, gap)


@ranks(1, 2)
def test_copies_and_names(rank: int, world: int):
    """copy.deepcopy, the names of a state dict, and torch.save of a model work with checkpoints."""
    torch.set_num_threads(1)
    plain = made(Model, world > 1)
    names = list(plain.state_dict())
    for policy in (None, "matmul"):
        model = made(Model, world > 1)
        checkpoint(model, every=2, policy=policy)
        assert list(model.state_dict()) == names
        average = copy.deepcopy(model)
        expected = train(model, partial(compress, model), rank)
        check(train(average, partial(compress, average), rank), expected, 0.0, "copy")
        average.load_state_dict(model.state_dict())
        if world == 1:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            other = torch.load(buffer, weights_only=False)
            assert all(map(torch.equal, other.parameters(), model.parameters()))
            torch.manual_seed(9)
            first = model(batch(0, 9))
            torch.manual_seed(9)
            assert torch.equal(first, other(batch(0, 9)))
        else:
            for key, value in full_parameters(average).items():
                assert torch.equal(value, full_parameters(model)[key])

"""Graphs that torch's FSDP refuses or gets wrong: repeated use, checkpointing, outputs, faults."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from harness import ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.utils.checkpoint import checkpoint
from toys import (
    Block,
    Reference,
    check_equal,
    check_gradients,
    check_parameters,
    compare_training,
    full_gradients,
    loss_of,
    no_sync_if,
    tokens,
    toy,
    wrap,
    wrap_blocks,
)

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])


def rtol(engine):
    return 0.0 if engine == "fsdpc" else 1e-6


# --- more than one pass --------------------------------------------------------------------------


@ranks(1, 2, 3)
@both_ways
@every_strategy
def test_backward_twice(rank, world, engine, strategy, use_orig_params):
    compare_training(
        engine,
        toy(),
        lambda m: wrap_blocks(
            engine, m, sharding_strategy=strategy, use_orig_params=use_orig_params
        ),
        lambda step: tokens(rank, step),
        times=2,
    )


@ranks(2, 3)
@both_ways
@every_strategy
@pytest.mark.parametrize("separate", [False, True], ids=["one_backward", "two_backwards"])
def test_two_forwards_before_backward(rank, world, engine, strategy, use_orig_params, separate):
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(
        engine, model, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (sharded, reference.master)]
    for step in range(3):
        first = loss_of(sharded, tokens(rank, step, 0))
        second = loss_of(sharded, tokens(rank, step, 1))
        expected = [
            reference.forward(tokens(rank, step, micro), refresh=micro == 0) for micro in (0, 1)
        ]
        if separate:
            for loss, other in zip((first, second), expected, strict=True):
                loss.backward()
                backward_of_copy(reference, other)
        else:
            (first + second).backward()
            backward_of_copy(reference, expected[0] + expected[1])
        check_gradients(engine, sharded, reference, f"of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_parameters(engine, sharded, reference, f"after step {step}")


def backward_of_copy(reference, loss):
    loss.backward()
    reference.take_gradients()
    reference.reduce()


class Twice(nn.Module):
    """A model that calls one block twice, then another block, then the first block again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.shared = Block(6)
        self.other = Block(6)
        self.head = nn.Linear(6, 13)

    def forward(self, batch):
        x = self.shared(self.shared(self.embed(batch)))
        return self.head(self.shared(self.other(x)))


@ranks(1, 2, 3)
@both_ways
@every_strategy
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
def test_a_module_called_three_times(rank, world, engine, strategy, use_orig_params, prefetch):
    torch.manual_seed(0)
    compare_training(
        engine,
        Twice(),
        lambda m: wrap_blocks(
            engine,
            m,
            sharding_strategy=strategy,
            backward_prefetch=prefetch,
            forward_prefetch=True,
            use_orig_params=use_orig_params,
        ),
        lambda step: tokens(rank, step),
    )


@ranks(2, 3)
@both_ways
@every_strategy
def test_evaluation_between_steps_and_inside_them(rank, world, engine, strategy, use_orig_params):
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(
        engine, model, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (sharded, reference.master)]

    def evaluate(step):
        sharded.eval()
        with torch.no_grad():
            for number in range(2):
                batch = tokens(rank, 50 + step, number)
                check_equal(
                    {"logits": sharded(batch)},
                    {"logits": reference.master(batch)},
                    f"evaluation in step {step}",
                    rtol=rtol(engine),
                )
        sharded.train()

    evaluate(99)
    for step in range(3):
        loss = loss_of(sharded, tokens(rank, step))
        evaluate(step)
        loss.backward()
        reference.backward(tokens(rank, step))
        evaluate(step)
        check_gradients(engine, sharded, reference, f"of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        evaluate(step)


@ranks(2, 3)
@pytest.mark.parametrize("grad_mode", ["no_grad", "inference_mode"])
def test_ranks_evaluate_different_numbers_of_batches(rank, world, engine, grad_mode):
    """Ranks that finish their evaluation early go on to the next step."""
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(engine, model, use_orig_params=True)
    for step in range(3):
        loss_of(sharded, tokens(rank, step)).backward()
        with getattr(torch, grad_mode)():
            for number in range(1 + 2 * rank if step < 2 else 0):
                batch = tokens(rank, 70 + step, number)
                check_equal(
                    {"logits": sharded(batch)},
                    {"logits": reference.master(batch)},
                    f"evaluation {number} in step {step}",
                    rtol=rtol(engine),
                )
    for step in range(3):
        reference.backward(tokens(rank, step))
    check_gradients(engine, sharded, reference, "of all steps")


@ranks(2)
@both_ways
def test_forward_without_backward(rank, world, engine, use_orig_params):
    """If nobody uses the outputs of a forward, its graph is dropped, no unit stays gathered,
    and no rank waits for a backward.
    """
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(engine, model, use_orig_params=use_orig_params)
    for step in range(3):
        loss_of(sharded, tokens(rank, 90 + step))  # dropped
        kept = loss_of(sharded, tokens(rank, 80 + step))
        loss_of(sharded, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        del kept
        check_gradients(engine, sharded, reference, f"of step {step}")


@ranks(2, 3)
@both_ways
@pytest.mark.parametrize("pattern", ["sss", "nns", "nsns", "nn", "sns"])
def test_accumulation_patterns(rank, world, engine, use_orig_params, pattern):
    """Micro-batches with (s) and without (n) synchronization come in any order in one step."""
    model = toy()
    reference = Reference(model)
    sharded = wrap_blocks(engine, model, use_orig_params=use_orig_params)
    pattern = pattern if pattern.endswith("s") else pattern + "s"
    for step in range(2):
        for micro, kind in enumerate(pattern):
            batch = tokens(rank, step, micro)
            with no_sync_if(sharded, kind == "n"):
                loss_of(sharded, batch).backward()
            reference.backward(batch, sync=kind == "s")
        check_gradients(engine, sharded, reference, f"of step {step}")


# --- faults and a new step -----------------------------------------------------------------------


class Faulty(nn.Module):
    """A block that raises on request, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6)
        self.fail = ""

    def forward(self, x):
        if self.fail == "before":
            raise ArithmeticError("asked to fail before the block")
        x = self.block(x)
        if self.fail == "after":
            raise ArithmeticError("asked to fail after the block")
        if self.fail == "backward":
            x.register_hook(self.raise_in_backward)
        return x

    def raise_in_backward(self, grad):
        raise ArithmeticError("asked to fail in backward")


@ranks(1, 2, 3)
@both_ways
@every_strategy
@pytest.mark.parametrize("fail", ["before", "after", "backward"])
def test_an_exception_and_then_a_new_step(rank, world, engine, strategy, use_orig_params, fail):
    model = toy(blocks=3)
    faulty = model.blocks[1] = Faulty()
    reference = Reference(model)
    sharded = wrap_blocks(
        engine, model, Block, Faulty, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (sharded, reference.master)]
    for step in range(3):
        faulty.fail = fail
        with pytest.raises(ArithmeticError, match="asked to fail"):
            loss_of(sharded, tokens(rank, 60 + step)).backward()
        faulty.fail = ""
        optimizers[0].zero_grad()
        loss_of(sharded, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        check_gradients(engine, sharded, reference, f"of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_parameters(engine, sharded, reference, f"after step {step}")


# --- activation checkpointing --------------------------------------------------------------------

IMPLEMENTATIONS = [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT]


def checkpointed(engine, model, where, implementation, **options):
    """Return the sharded model with activation checkpoints.

    With `where` "inside", blocks are checkpointed before the model is sharded, and with "outside"
    afterwards. Both ways, the checkpoint contains the unit of the block. With "within", two layers
    of each block are checkpointed.
    """

    def around(module):
        return checkpoint_wrapper(module, checkpoint_impl=implementation)

    if where == "inside":
        model.blocks = nn.ModuleList(around(block) for block in model.blocks)
    elif where == "within":
        for block in model.blocks:
            block.up = around(block.up)
            block.norm = around(block.norm)
    model = wrap_blocks(engine, model, **options)
    if where == "outside":
        blocks = nn.ModuleList(around(block) for block in model.module.blocks)
        model.module.blocks = blocks
    return model


@ranks(1, 2, 3)
@both_ways
@every_strategy
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
@pytest.mark.parametrize("where", ["inside", "outside", "within"])
def test_activation_checkpointing(
    rank, world, engine, strategy, use_orig_params, where, implementation
):
    compare_training(
        engine,
        toy(blocks=3),
        lambda m: checkpointed(
            engine,
            m,
            where,
            implementation,
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
        ),
        lambda step: tokens(rank, step),
    )


class CheckpointsItself(nn.Module):
    """A model that calls torch.utils.checkpoint in forward, over a span of several units."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(4))
        self.head = nn.Linear(6, 13)
        self.reentrant = reentrant

    def span(self, x, start):
        return self.blocks[start + 1](self.blocks[start](x))

    def forward(self, batch):
        x = self.embed(batch)
        for start in (0, 2):
            x = checkpoint(self.span, x, start, use_reentrant=self.reentrant)
        return self.head(x)


@ranks(2, 3)
@every_strategy
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_over_several_units(rank, world, engine, strategy, reentrant):
    torch.manual_seed(0)
    compare_training(
        engine,
        CheckpointsItself(reentrant),
        lambda m: wrap_blocks(engine, m, sharding_strategy=strategy, use_orig_params=True),
        lambda step: tokens(rank, step),
    )


# --- outputs and inputs --------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    note: str
    extra: torch.Tensor | None = None


SHAPES = {
    "tensor": (lambda y: y, lambda o: o),
    "tuple": (lambda y: (y, y * 2), lambda o: o[0] + o[1]),
    "tuple_partly_used": (lambda y: (y * 3, y), lambda o: o[1]),
    "list": (lambda y: [y, None, "text", 3], lambda o: o[0]),
    "dict": (lambda y: {"y": y, "none": None, "n": 1}, lambda o: o["y"]),
    "nested": (
        lambda y: {"a": [(y, {"b": y * 0.5})], "c": ()},
        lambda o: o["a"][0][0] + o["a"][0][1]["b"],
    ),
    "dataclass": (lambda y: Result(y, "note"), lambda o: o.hidden),
    "same_tensor_twice": (lambda y: (y, y), lambda o: o[0] * o[1]),
    "view": (lambda y: y.flatten(0, 1), lambda o: o.view(2, 5, 6)),
    "detached_beside": (lambda y: (y, y.detach()), lambda o: o[0] + o[1]),
    "none_beside": (lambda y: (None, y), lambda o: o[1]),
}


class Shaped(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.block = Block(6)
        self.shape = shape

    def forward(self, x):
        return SHAPES[self.shape][0](self.block(x))


class Consumer(nn.Module):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first, self.second = Shaped(shape), Shaped(shape)
        self.head = nn.Linear(6, 13)
        self.shape = shape

    def forward(self, batch):
        take = SHAPES[self.shape][1]
        return self.head(take(self.second(take(self.first(self.embed(batch))))))


@ranks(2)
@both_ways
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_outputs_of_every_shape(rank, world, engine, use_orig_params, shape, strategy):
    torch.manual_seed(0)
    compare_training(
        engine,
        Consumer(shape),
        lambda m: wrap_blocks(
            engine, m, Shaped, sharding_strategy=strategy, use_orig_params=use_orig_params
        ),
        lambda step: tokens(rank, step),
    )


class RootOutput(nn.Module):
    """A model whose root itself returns its outputs in the structure `shape`."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.block = Shaped(shape)

    def forward(self, batch):
        return self.block(self.embed(batch))


@ranks(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_root_outputs_of_every_shape(rank, world, engine, shape):
    torch.manual_seed(0)
    take = SHAPES[shape][1]
    compare_training(
        engine,
        RootOutput(shape),
        lambda m: wrap_blocks(engine, m, Shaped, use_orig_params=True),
        lambda step: tokens(rank, step),
        loss_of=lambda m, b: take(m(b)).square().mean(),
    )


class Metric(nn.Module):
    """A module that returns None instead of a tensor, and adds to a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(6, 1)
        self.seen = 0.0

    def forward(self, x):
        self.seen += float(self.probe(x).detach().sum())


class WithMetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.metric = Metric()
        self.block = Block(6)
        self.head = nn.Linear(6, 13)

    def forward(self, batch):
        x = self.embed(batch)
        assert self.metric(x) is None
        return self.head(self.block(x))


@ranks(2)
@both_ways
@every_strategy
def test_a_unit_that_returns_none(rank, world, engine, strategy, use_orig_params):
    torch.manual_seed(0)
    model = WithMetric()
    plain = copy.deepcopy(model)
    sharded = compare_training(
        engine,
        model,
        lambda m: wrap_blocks(
            engine, m, Block, Metric, sharding_strategy=strategy, use_orig_params=use_orig_params
        ),
        lambda step: tokens(rank, step),
    )
    plain(tokens(rank, 0))
    sharded.module.metric.module.seen = 0.0
    assert plain.metric.seen != 0.0


class ReluAfter(nn.Module):
    """A model that changes the outputs of its units in place, once through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.lone = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13)

    def forward(self, batch):
        x = self.embed(batch)
        for block in self.blocks:
            x = F.relu_(block(x))
        x = self.lone(x)
        x.mul_(2.0)
        x[:, 0] = 0.0
        return self.head(x)


@ranks(2, 3)
@both_ways
@every_strategy
def test_in_place_operations_after_a_unit(rank, world, engine, strategy, use_orig_params):
    torch.manual_seed(0)
    compare_training(
        engine,
        ReluAfter(),
        lambda m: wrap_blocks(
            engine, m, Block, nn.Linear, sharding_strategy=strategy, use_orig_params=use_orig_params
        ),
        lambda step: tokens(rank, step),
    )


class Keyword(nn.Module):
    """A module that takes its inputs by keyword: tensors in a container,
    and a mask that does not require grad.
    """

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(6)

    def forward(self, *, states, mask=None):
        y = self.block(states["x"])
        return y * mask if mask is not None else y


class CallsByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.first, self.second = Keyword(), Keyword()
        self.head = nn.Linear(6, 13)

    def forward(self, batch):
        x = self.first(states={"x": self.embed(batch)})
        x = self.second(states={"x": x}, mask=(batch % 3 != 0).unsqueeze(-1))
        return self.head(x)


@ranks(2)
@both_ways
def test_inputs_by_keyword(rank, world, engine, use_orig_params):
    torch.manual_seed(0)
    compare_training(
        engine,
        CallsByKeyword(),
        lambda m: wrap_blocks(engine, m, Keyword, use_orig_params=use_orig_params),
        lambda step: tokens(rank, step),
    )


# --- nesting -------------------------------------------------------------------------------------


class Deep(nn.Module):
    """A nested module with parameters and a unit at every level."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6))
        self.block = Block(6)
        self.inner = Deep(depth - 1) if depth else None

    def forward(self, x):
        x = self.block(x) * self.scale
        x = self.inner(x) if self.inner is not None else x
        return x + self.scale


@ranks(1, 2, 3)
@both_ways
@every_strategy
@pytest.mark.parametrize("prefetch", [*BackwardPrefetch, None])
def test_units_in_units_in_units(rank, world, engine, strategy, use_orig_params, prefetch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(13, 6), Deep(3), nn.Linear(6, 13))
    compare_training(
        engine,
        model,
        lambda m: wrap_blocks(
            engine,
            m,
            Block,
            Deep,
            sharding_strategy=strategy,
            backward_prefetch=prefetch,
            use_orig_params=use_orig_params,
        ),
        lambda step: tokens(rank, step),
    )


@ranks(2)
@both_ways
def test_units_without_parameters_of_their_own(rank, world, engine, use_orig_params):
    torch.manual_seed(0)
    inner = wrap(engine, Block(6), use_orig_params=use_orig_params)
    model = nn.Sequential(nn.Embedding(13, 6), nn.Sequential(nn.Tanh(), inner), nn.Linear(6, 13))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(13, 6), nn.Sequential(nn.Tanh(), Block(6)), nn.Linear(6, 13))
    plain[1][1].load_state_dict({k: v.clone() for k, v in inner.state_dict().items()})
    plain[0].load_state_dict(model[0].state_dict())
    plain[2].load_state_dict(model[2].state_dict())
    model[1] = wrap(engine, model[1], use_orig_params=use_orig_params)
    sharded = wrap(engine, model, use_orig_params=use_orig_params)
    reference = Reference(plain)
    for step in range(3):
        loss_of(sharded, tokens(rank, step)).backward()
        reference.backward(tokens(rank, step))
        check_gradients(engine, sharded, reference, f"of step {step}")


@ranks(2)
def test_two_models_in_one_process(rank, world, engine):
    """The models' steps interleave; neither model touches the other's slots."""
    models = [toy(seed) for seed in (0, 1)]
    references = [Reference(m) for m in models]
    sharded = [wrap_blocks(engine, m, use_orig_params=True) for m in models]
    for step in range(3):
        losses = [loss_of(m, tokens(rank, step)) for m in sharded]
        for loss, reference in zip(losses, references, strict=True):
            loss.backward()
            reference.backward(tokens(rank, step))
        for m, reference in zip(sharded, references, strict=True):
            check_gradients(engine, m, reference, f"of step {step}")


@ranks(2)
@both_ways
def test_a_model_can_be_dropped_and_another_made(rank, world, engine, use_orig_params):
    first = None
    for _ in range(5):
        sharded = wrap_blocks(engine, toy(), use_orig_params=use_orig_params)
        loss_of(sharded, tokens(rank, 0)).backward()
        gradients = full_gradients(sharded)
        if first is not None:
            check_equal(gradients, first, "gradients of a new model", rtol=rtol(engine))
        first = gradients
        del sharded

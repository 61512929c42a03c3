"""Tests of ranks on one host that evaluate different numbers of batches.

As long as no rank changes its weights, all outputs are right. A rank with fewer batches may change
its weights before the other ranks are done: docs/decisions/032-changed-weights.md lists the
possible orders of events.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from toys import by_door, full_parameters, loss_of, tokens, toy, wrap

import fsdpc
from fsdpc._comm import bootstrap as _bootstrap


def wide() -> torch.nn.Module:
    """Return a toy model in which every boundary between two ranks is inside a parameter."""
    return toy(width=40)


def sharded(door: str) -> torch.nn.Module:
    return by_door(door, wide())


@contextmanager
def other_weights(model: torch.nn.Module, data: bool = False) -> Iterator[None]:
    """Halve the weights inside the context. With `data`, write to `param.data`, as classes for
    weight averages do. autograd does not notice such writes.
    """
    kept = [param.detach().clone() for param in model.parameters()]
    put(model, [0.5 * value for value in kept], data)
    yield
    put(model, kept, data)


@torch.no_grad()
def put(model: torch.nn.Module, values: list[torch.Tensor], data: bool) -> None:
    for param, value in zip(model.parameters(), values, strict=True):
        (param.data if data else param).copy_(value)


def evaluate_other_weights(model: torch.nn.Module, rank: int, batches: int) -> None:
    with other_weights(model):
        evaluate(model, rank, batches)


@torch.no_grad()
def evaluate(
    model: torch.nn.Module, rank: int, batches: int, like: torch.nn.Module | None = None
) -> None:
    """Run forwards. If `like`, an unsharded model, is given, outputs must equal its outputs."""
    for step in range(batches):
        batch = tokens(rank, step)
        output = model(batch)
        assert like is None or torch.equal(output, like(batch))


def halved() -> torch.nn.Module:
    model = wide()
    with other_weights(model):
        return copy.deepcopy(model)


def losses(door: str, rank: int, first: Callable[..., None] | None) -> list[float]:
    """Return the losses of six steps. `first(model)` runs before each step."""
    model = sharded(door)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(6):
        if first is not None:
            first(model)
        loss = loss_of(model, tokens(rank, step))
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_training_after_other_weights(rank, world, door):
    """A training forward uses the weights that were put back, not the halved weights, which another
    rank has gathered to evaluate one more batch.
    """
    uneven = losses(door, rank, lambda model: evaluate_other_weights(model, rank, rank % 2))
    assert uneven == losses(door, rank, None)


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_batches_between_backward_and_step(rank, world, door):
    """The last rank's second batch would read weights after the other ranks' step,
    so all ranks raise an error.
    """
    model = sharded(door)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with refused(world):
        for step in range(2):
            loss_of(model, tokens(rank, step)).backward()
            evaluate(model, rank, 2 if rank == world - 1 else 1)
            optimizer.step()
            optimizer.zero_grad()


@contextmanager
def refused(world: int) -> Iterator[None]:
    """Check that all ranks raise an error that names the rank which has changed its weights."""
    text = rf"rank [0-{world - 2}] has changed .* rank {world - 1}, in .* as many batches"
    with pytest.raises((fsdpc.MismatchError, fsdpc.PeerError), match=text):
        yield


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("then", ["train", "evaluate", "full"])
def test_more_batches_of_other_weights(rank, world, door, data, then):
    """No batch reads weights that another rank has changed, whatever that rank does next."""
    model, plain, other = sharded(door), wide(), halved()
    evaluate(model, rank, 2, plain)
    with refused(world):
        with other_weights(model, data):
            evaluate(model, rank, 2 if rank == world - 1 else 1, other)
        if then == "train" or (then == "full" and door == "fully_shard"):
            loss_of(model, tokens(rank, 0)).backward()
        elif then == "full":
            full_parameters(model)
        evaluate(model, rank, 2, plain)


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat"])
@pytest.mark.parametrize("data", [False, True])
def test_ranks_that_meet_before_each_change(rank, world, door, data):
    model, plain, other = sharded(door), wide(), halved()
    for step in range(4):
        evaluate(model, rank, 1 + (rank + step) % 2, plain)
        full_parameters(model)
        with other_weights(model, data):
            evaluate(model, rank, 1 + (rank + step) % world, other)
            full_parameters(model)
        evaluate(model, rank, 1 + (rank + step) % 2, plain)
        loss_of(model, tokens(rank, step)).backward()


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
def test_a_barrier_before_metrics_and_changes(rank, world, door):
    """While some ranks wait in the barrier, other ranks still evaluate. Collectives and weight
    changes after the barrier work.
    """
    model, other = sharded(door), halved()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = wide()
    for step in range(3):
        batches = 1 + (rank + step) % 3
        evaluate(model, rank, batches, reference if step == 0 else None)
        fsdpc.barrier(model)
        count = torch.tensor(float(batches))
        dist.all_reduce(count)
        assert count == sum(1 + (r + step) % 3 for r in range(world))
        with other_weights(model, data=step % 2 == 0):
            evaluate(model, rank, 1 + (rank + step) % 2, other if step == 0 else None)
            fsdpc.barrier(model)
        evaluate(model, rank, 1 + (rank + 1) % 2, reference if step == 0 else None)
        fsdpc.barrier(model)
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(TypeError, match="barrier expects an nn.Module but got int"):
        fsdpc.barrier(1)
    list(model.modules())[-1].register_forward_pre_hook(lambda *_: fsdpc.barrier(model))
    with pytest.raises(fsdpc.StateError, match="called in forward: call it between two batches"):
        model(tokens(rank, 0))


@ranks(4)
@pytest.mark.parametrize("uneven", [True, False])
def test_a_barrier_of_replicas(rank, world, uneven):
    """With `uneven`, ranks evaluate different numbers of batches; without `uneven`, they evaluate
    equally many and communicate over a wire.
    """
    env = {} if uneven else {"FSDPC_COLLECTIVES": "wire"}
    with mock.patch.dict(os.environ, env):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = fsdpc.fully_shard(wide(), mesh=mesh)
        plain, other = wide(), halved()
        for step in range(3):
            evaluate(model, rank, 1 + (rank + step) % 3 * uneven, plain)
            fsdpc.barrier(model)
            with other_weights(model):
                evaluate(model, rank, 1 + rank * uneven, other)
                fsdpc.barrier(model)
            loss_of(model, tokens(rank, step)).backward()


@ranks(2, 3)
@pytest.mark.parametrize("door", ["orig", "flat", "fully_shard"])
@pytest.mark.parametrize("data", [False, True])
def test_as_many_batches_of_each_weights(rank, world, door, data):
    """If all ranks run the same forwards, changes between these forwards are not refused, even a
    change of a single parameter of which a rank holds no elements. Uneven numbers of batches are
    not refused as long as no rank changes its weights.
    """
    model, plain, other = sharded(door), wide(), halved()
    for step in range(3):
        with other_weights(model, data):
            evaluate(model, rank, step, other)
        for param in list(model.parameters()):
            kept = param.detach().clone()
            with torch.no_grad():
                (param.data if data else param).mul_(2.0)
            evaluate(model, rank, 1)
            (param.data if data else param.detach()).copy_(kept)
            evaluate(model, rank, 1, plain)
        evaluate(model, rank, (rank + step) % world, plain)
        loss_of(model, tokens(rank, step)).backward()


@ranks(2)
@pytest.mark.parametrize("cut", [8, 9, 7])
def test_changes_of_what_one_rank_holds(rank, world, cut):
    """There are two parameters; each rank holds one of them, or one and a part of the other.
    Writing one parameter between forwards that all ranks run is not refused, whichever way the
    program writes the parameter.
    """
    torch.manual_seed(0)
    parts = torch.nn.Sequential(torch.nn.Linear(64, cut), torch.nn.Linear(cut, 64))
    for part in parts:
        part.bias = None
    model = wrap("fsdpc", parts, use_orig_params=True)
    batch = torch.randn(2, 64)
    optimizers = [torch.optim.SGD([param], lr=0.1) for param in model.parameters()]
    values = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    for step in range(2):
        model(batch).square().sum().backward()
        for param, optimizer in zip(list(model.parameters()), optimizers, strict=True):
            for change in (
                optimizer.step,
                lambda param=param: param.data.mul_(1.1),
                lambda param=param: param.detach().mul_(1.1),
                lambda step=step: model.load_state_dict(
                    {name: value * step for name, value in list(values.items())[:1]}, strict=False
                ),
            ):
                with torch.no_grad():
                    model(batch)
                    change()
                    model(batch)


@ranks(2, env={"FSDPC_COLLECTIVES": "wire"})
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_more_batches_over_a_wire(rank, world, door):
    """Rank 1 evaluates one more batch with the old weights. Its gathers meet the gathers of rank 0,
    which has already changed its weights, so both ranks raise an error.
    """
    model, plain, other = sharded(door), wide(), halved()
    evaluate(model, rank, 1, plain)
    with pytest.raises((fsdpc.MismatchError, fsdpc.PeerError), match="equally many batches"):
        evaluate(model, rank, 1 + rank, plain)
        with other_weights(model):
            evaluate(model, rank, 2, other)


# --- a rank that leaves in good order -------------------------------------------------------------


def evaluate_without_the_last(rank, world, changes, grad):
    model, plain = sharded("orig"), wide()
    evaluate(model, rank, 2, plain)
    if rank == world - 1:
        _bootstrap._leave()  # fsdpc calls this when a program ends
        return
    evaluate(model, rank, 1, plain)
    if changes:
        put(model, [0.5 * value.detach() for value in model.parameters()], data=True)
    with torch.set_grad_enabled(grad):
        assert torch.equal(model(tokens(rank, 0)), plain(tokens(rank, 0)))


@pytest.mark.parametrize("grad", [False, True])
def test_a_rank_that_left_has_the_weights_of_then(grad):
    """The other ranks still read the values of a rank that has left, as long as no rank changes its
    weights. These values are never combined with changed weights.
    """
    run_ranks(evaluate_without_the_last, 3, changes=False, grad=grad)
    outcomes = run_ranks(evaluate_without_the_last, 3, faults=True, changes=True, grad=grad)
    for outcome in outcomes[:2]:
        assert "rank 2 has left" in (outcome.error or ""), outcome.log

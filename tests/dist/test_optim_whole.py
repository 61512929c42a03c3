"""Tests of Adafactor, SOAP and Shampoo on shards: steps equal unsharded steps to the bit, on any
number of ranks. Their states, which stay on owner ranks, are saved in every form.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import ranks
from test_optim_muon import OPTIONS, STEPS, Model, check, scaled_steps, train, wanted
from toys import full_parameters, wrap

import fsdpc
from fsdpc import checkpoint, optim
from fsdpc.optim import _owned
from fsdpc.optim._places import local_of

sys.path.append(str(Path(__file__).parents[1] / "fuzz"))
import optim_bits  # noqa: E402

SPLIT, MATRICES = OPTIONS["split"], OPTIONS["matrices"]
EVERY: dict[str, dict[str, Any]] = {
    "Adafactor": {"lr": 0.03, "weight_decay": 0.1, "split": {"qkv": [12, 16, 8]}},
    "SOAP": {"precondition_frequency": 2, "split": SPLIT, "matrices": MATRICES},
    "Shampoo": {"precondition_frequency": 2, "split": SPLIT, "matrices": MATRICES},
}
KINDS = pytest.mark.parametrize("kind", EVERY)


def make(kind: str, model: torch.nn.Module, **more: Any) -> Any:
    return getattr(optim, kind)(model.named_parameters(), **{**EVERY[kind], **more})


def alone(kind: str, steps: int = STEPS, **more: Any) -> tuple[Model, Any]:
    model = Model()
    optimizer = make(kind, model, **more)
    train(model, optimizer, range(steps))
    return model, optimizer


def shard(door: str) -> torch.nn.Module:
    if door == "fully_shard":
        return fsdpc.fully_shard(Model())
    return wrap("fsdpc", Model(), use_orig_params=door == "FSDP")


def equal(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    if isinstance(model, fsdpc.FullyShardedDataParallel):
        check(model, expected)
        return
    for (name, value), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, other), name


DOORS = ("FSDP", "flat", "fully_shard")


@ranks(2, 3, 4)
@KINDS
def test_shards_step_as_one_process(rank, world, kind):
    _owned.ROUND = 100  # small, so that a step takes several rounds
    expected, _ = alone(kind)
    for door in DOORS:
        model = shard(door)
        optimizer = make(kind, model)
        train(model, optimizer, range(STEPS))
        equal(model, expected)
        [route] = optimizer._routes
        assert len(route.rounds) > 1
        assert bool(route.away) == (kind != "Adafactor" and door != "fully_shard"), "owners"
    total = torch.tensor(float(held_elements(optimizer)))
    dist.all_reduce(total)
    assert float(total) == held_elements(alone(kind)[1]), "each state is at one rank"


def held_elements(optimizer: Any) -> int:
    return sum(
        local_of(value).numel()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )


def grow(kind: str, model: torch.nn.Module) -> Any:
    """Train, and after every two steps add another third of the parameters to the optimizer.
    Return the optimizer.
    """
    optimizer = None
    for i, part in enumerate(thirds(model)):
        if optimizer is None:
            optimizer = getattr(optim, kind)(part, **EVERY[kind])
        else:
            optimizer.add_param_group({"params": part, "lr": 0.01})
        train(model, optimizer, range(2 * i, 2 * i + 2))
    return optimizer


def thirds(model: torch.nn.Module) -> list[Any]:
    named = sorted(model.named_parameters())
    return [named[::3], named[1::3], named[2::3]]


@ranks(2, 3)
@KINDS
def test_groups_that_join_later(rank, world, kind):
    """Groups may be added later, for example when layers are unfrozen one after the other. States
    stay at their owner ranks.
    """
    expected = Model()
    train(expected, grow(kind, expected), range(6, 8))
    for door in ("FSDP", "fully_shard"):
        model = shard(door)
        saved = grow(kind, model).state_dict()
        groups = [{"params": part} for part in thirds(model)]
        resumed = getattr(optim, kind)(groups, **EVERY[kind])
        resumed.load_state_dict(saved)
        train(model, resumed, range(6, 8))
        equal(model, expected)


class One(Model):
    """A model with one matrix and one vector."""

    def __init__(self) -> None:
        super().__init__()
        for name in {*dict(self.named_parameters())} - {"up", "bias"}:
            delattr(self, name)

    def forward(self, step: int, without: str = "") -> torch.Tensor:
        return sum((getattr(self, n) * wanted(n, step)).sum() for n in ("up", "bias"))


@ranks(2)
@KINDS
def test_one_matrix_beside_a_vector(rank, world, kind):
    """The matrix and the vector are in one flat parameter. The flat parameter's own states take the
    names that the states of a matrix usually have.
    """
    expected = One()
    train(expected, make(kind, expected), range(STEPS))
    model = wrap("fsdpc", One(), use_orig_params=False)
    optimizer = make(kind, model)
    train(model, optimizer, range(1))
    resumed = make(kind, model)
    resumed.load_state_dict(optimizer.state_dict())
    train(model, resumed, range(1, STEPS))
    check(model, expected)


@ranks(4)
@KINDS
def test_replicas_and_torchs_units(rank, world, kind):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expected, _ = alone(kind)
    hybrid = fsdpc.ShardingStrategy.HYBRID_SHARD
    models = [
        wrap("fsdpc", Model(), device_mesh=mesh, sharding_strategy=hybrid),
        fsdpc.fully_shard(Model(), mesh=mesh),
        fully_shard(Model(), mesh=dist.init_device_mesh("cpu", (4,))),
    ]
    for model in models:
        optimizer = make(kind, model)
        train(model, optimizer, range(1))
        resumed = make(kind, model)
        resumed.load_state_dict(optimizer.state_dict())
        train(model, resumed, range(1, STEPS))
        equal(model, expected)


@ranks(2)
@KINDS
def test_what_a_step_leaves_out(rank, world, kind):
    """A step leaves out a parameter without a gradient. If one rank has an infinite gradient, all
    ranks skip the step. With clipping, norms equal those of the unsharded model.
    """

    def run(model: torch.nn.Module, sharded: bool) -> Any:
        optimizer = make(kind, model)
        model(0, "down").backward()
        optimizer.step()
        scaled_steps(model, optimizer, rank if sharded else 1)
        return optimizer

    expected = Model()
    run(expected, False)
    for door in ("FSDP", "fully_shard"):
        model = shard(door)
        run(model, True)
        equal(model, expected)
    model, other = shard("FSDP"), Model()
    norms = train(model, make(kind, model), range(STEPS), clip=True)
    wanted = train(other, make(kind, other), range(STEPS), clip=True)
    torch.testing.assert_close(norms, wanted, rtol=1e-12, atol=0)
    for key, value in full_parameters(model).items():
        torch.testing.assert_close(value, dict(other.named_parameters())[key].detach())


@pytest.mark.long
@ranks(3)
@pytest.mark.parametrize("model", optim_bits.MODELS)
def test_real_models(rank, world, model):
    """This test runs a part of fuzz/optim_bits.py. Parameters, averages and losses equal those of
    fsdpc and of torch in one process.
    """
    for number, name in enumerate(optim_bits.OPTIMIZERS):
        door = optim_bits.DOORS[(number + len(model)) % 3]
        ours, torchs = optim_bits.one_process(model, name, world, 2)
        found = optim_bits.on_ranks(model, name, door, rank, 2)
        assert found[0] == ours[0] or rank > 0
        for expected in (ours, *([] if torchs is None else [torchs])):
            own = expected[0] if rank == 0 else found[0]  # only rank 0 has losses
            assert not optim_bits.differing(found, (own, *expected[1:])), (name, door)


@ranks(1, 2)
@pytest.mark.parametrize("kind", ["Muon", *EVERY])
def test_in_backward(rank, world, kind):
    """in_backward works on one rank. On several ranks it is refused, because ranks would wait for
    each other in different units.
    """
    options = EVERY.get(kind, OPTIONS)
    for door in DOORS:
        model = shard(door)

        def new(params: Any) -> Any:
            return getattr(optim, kind)(params, **options)

        if world > 1:
            with pytest.raises(NotImplementedError, match=f"{kind} communicates .* after backward"):
                optim.in_backward(model, new)
            continue
        expected = Model()
        train(expected, new(expected.named_parameters()), range(STEPS))
        train(model, optim.in_backward(model, new), range(STEPS))
        equal(model, expected)


@ranks(2, 3)
@KINDS
def test_state_dicts(rank, world, kind):
    """A full state dict of shards equals that of the unsharded optimizer, and both optimizers
    resume from it. States of flat parameters have no full state dict and are loaded only on their
    own ranks.
    """
    FSDP = fsdpc.FullyShardedDataParallel
    expected, whole = alone(kind, split=None)
    model = shard("FSDP")
    optimizer = make(kind, model, split=None)
    train(model, optimizer, range(STEPS))
    saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    for name, state in saved["state"].items():
        of_one = whole.state[getattr(expected, name)]
        assert state.keys() == of_one.keys()
        for key, value in of_one.items():
            assert torch.equal(state[key], value), (name, key)
    resumed = make(kind, model, lr=1.0, split=None)
    model.requires_grad_(False)  # frozen parameters keep their owners
    resumed.load_state_dict(FSDP.optim_state_dict_to_load(model, resumed, saved))
    model.requires_grad_(True)
    other = copy.deepcopy(expected)
    single = make(kind, other, lr=1.0, split=None)
    numbered = FSDP.rekey_optim_state_dict(saved, fsdpc.OptimStateKeyType.PARAM_ID, other)
    single.load_state_dict(numbered)
    train(model, resumed, range(STEPS, STEPS + 1))
    train(other, single, range(STEPS, STEPS + 1))
    equal(model, other)
    flat = shard("flat")
    optimizer = make(kind, flat)
    train(flat, optimizer, range(STEPS))
    with pytest.raises(NotImplementedError, match="use fsdpc.checkpoint"):
        FSDP.optim_state_dict(flat, optimizer)
    with pytest.raises(NotImplementedError, match="use fsdpc.checkpoint"):
        FSDP.optim_state_dict_to_load(flat, optimizer, saved)
    resumed = make(kind, flat, lr=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    train(flat, resumed, range(STEPS, STEPS + 1))
    equal(flat, alone(kind, STEPS + 1)[0])


@pytest.mark.long
@ranks(2, 3)
@KINDS
def test_checkpoints_over_worlds_and_interfaces(rank, world, kind):
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    expected, _ = alone(kind, STEPS + 1)
    for turn, source in enumerate((*DOORS, "one")):
        model = Model() if source == "one" else shard(source)
        optimizer = make(kind, model)
        train(model, optimizer, range(STEPS))
        folder = f"{box[0]}/{source}"
        checkpoint.save(folder, model, optimizer)
        begin = (turn + 2 * world) % 4  # each run, on 2 or 3 ranks, tests half of the door pairs
        for target in ((*DOORS, "one") * 2)[begin : begin + 2]:
            other = Model() if target == "one" else shard(target)
            resumed = make(kind, other, lr=1.0)
            checkpoint.load(folder, other, resumed)
            train(other, resumed, range(STEPS, STEPS + 1))
            equal(other, expected)


class Wrapped(torch.optim.Optimizer):
    """A wrapper like accelerate's: its methods are its own,
    but everything else belongs to the inner optimizer.
    """

    def __init__(self, inside: Any) -> None:
        self.optimizer = inside

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()


@ranks(2)
@pytest.mark.parametrize("kind", ["Muon", *EVERY])
def test_as_accelerate_prepares_and_saves(rank, world, kind):
    """Shards may replace parameters that the optimizer already has. State dicts and checkpoints
    also accept a wrapper of the optimizer.
    """
    EVERY["Muon"] = OPTIONS
    expected, _ = alone(kind)
    model = Model()
    optimizer = make(kind, model)
    optimizer.load_state_dict(optimizer.state_dict())
    fsdpc.fully_shard(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(STEPS))
    equal(model, expected)
    model = shard("FSDP")
    one, other = (make(kind, model, split=None) for _ in range(2))
    train(model, one, range(1))
    saved = fsdpc.FSDP.optim_state_dict(model, Wrapped(one))
    other.load_state_dict(fsdpc.FSDP.optim_state_dict_to_load(model, Wrapped(other), saved))
    train(model, other, range(1, STEPS))
    equal(model, alone(kind, split=None)[0])
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    checkpoint.save(f"{box[0]}/saved", model, Wrapped(other))
    checkpoint.load(f"{box[0]}/saved", model, Wrapped(one))
    train(model, one, range(STEPS, STEPS + 1))
    equal(model, alone(kind, STEPS + 1, split=None)[0])


@ranks(2, alone=True)
@pytest.mark.parametrize("kind", ["Muon", *EVERY])
def test_states_on_a_disk(rank, world, kind):
    """Results equal those with states in memory. State dicts go from the disk to memory and back.
    After a step that fails in the middle, training continues from a checkpoint.
    """
    EVERY["Muon"] = OPTIONS
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    disk = optim.Disk(tempfile.mkdtemp(), 400_000)
    expected, _ = alone(kind)
    for door in DOORS:
        model = shard(door)
        optimizer = make(kind, model, offload=disk)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_owned, "ROUND", 100)  # several rounds
            train(model, optimizer, range(1))
        in_file = {where.values.data_ptr() for where in optimizer._store.whole.values()}
        in_file |= {at.data_ptr() for of in optimizer._store.held.values() for at in of[0].values()}
        for state in optimizer.state.values():
            for name, value in state.items():
                assert name == "step" or local_of(value).data_ptr() in in_file, (door, name)
        resumed = make(kind, model, lr=1.0)
        resumed.load_state_dict(optimizer.state_dict())
        train(model, resumed, range(1, 2))
        loaded = make(kind, model, lr=1.0, offload=disk)
        loaded.load_state_dict(resumed.state_dict())
        train(model, loaded, range(2, STEPS))
        equal(model, expected)
        if door != DOORS[list(EVERY).index(kind) % 3]:
            continue
        checkpoint.save(f"{box[0]}/saved", model, loaded)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(type(loaded), "_take", lambda *_: 1 / 0)
            train(model, loaded, range(1))
        with pytest.raises(optim.DiskError, match=f"a step of {kind} ended in the middle"):
            train(model, loaded, range(1))
        checkpoint.load(f"{box[0]}/saved", model, loaded)
        train(model, loaded, range(STEPS, STEPS + 1))
        equal(model, alone(kind, STEPS + 1)[0])


@ranks(2)
@KINDS
def test_torchs_distributed_checkpoints(rank, world, kind):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    model = shard("fully_shard")
    optimizer = make(kind, model, split=None)
    train(model, optimizer, range(STEPS))
    dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=box[0])
    optimizer.zero_grad()
    resumed = make(kind, model, lr=0.5, split=None)
    loaded = get_optimizer_state_dict(model, resumed)  # makes states by a step that changes nothing
    dcp.load(loaded, checkpoint_id=box[0])
    set_optimizer_state_dict(model, resumed, loaded)
    train(model, resumed, range(STEPS, STEPS + 1))
    equal(model, alone(kind, STEPS + 1, split=None)[0])

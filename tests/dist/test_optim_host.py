"""Tests on the simulated GPU of states in pinned host memory, for optimizers of parameters on a
GPU. Results equal those with states on the GPU to the bit, copies run beside the steps, and no host
synchronization is needed. When a test leaves out a wait, the simulator reports it.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import itertools
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import env
import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks
from test_clip_gpu import Unread
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_leaves_with_path as leaves
from toys import Block, loss_of, tokens, toy, wrap

import fsdpc
from fsdpc import checkpoint, fully_shard, optim
from fsdpc.activations import checkpoint as checkpoint_blocks
from fsdpc.activations import offload as activations_offload
from fsdpc.optim import _host
from fsdpc.plan.ledger import plan
from fsdpc.plan.model import Model as Plain
from fsdpc.plan.model import Setup, check
from fsdpc.plan.sources.modules import units_of

ON_GPU = env.environment() | {"FSDPC_TEST_WATCH": "0", "FSDPC_POISON": "0"}
on_gpu = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
SHAPES = {"a": (100, 401), "b": (7,), "c": (64, 64), "d": (5,), "e": (50000,)}
# The size in bytes of the buffers of states. It is so small that the states of "a" and "e" take
# several chunks on each of two ranks.
SMALL = 2 * 131072
# For AdamMini: how many elements of a parameter share a second moment. The key is the size of the
# parameter's last dimension. Boundaries of shards and chunks lie inside these blocks of elements.
BLOCKS = {7: 1, 301: 903, 449: 1000}
MINI = partial(optim.AdamMini, block=lambda name, shape: BLOCKS.get(shape[-1], shape[-1]))
KINDS: dict[str, tuple[Any, torch.dtype]] = {
    "AdamW": (partial(optim.AdamW, amsgrad=True), torch.float32),
    "Adam": (optim.Adam, torch.bfloat16),
    "SGD": (partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), torch.float32),
    "Lion": (optim.Lion, torch.float32),
    "AdamWBF16": (optim.AdamWBF16, torch.bfloat16),
    "AdamW8bit": (optim.AdamW8bit, torch.float32),
    "AdamMini": (MINI, torch.float32),
}
# Shapes for AdamW8bit and AdamMini, whose states have fewer bytes: the states of "c" still take
# several chunks. AdamW8bit keeps float32 states for "a" and "d", which are small.
LARGE = {"a": (3, 301), "b": (90, 67), "c": (300, 449), "d": (7,), "e": (5001,)}


class Model(nn.Module):
    def __init__(
        self, dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] = SHAPES
    ) -> None:
        super().__init__()
        self.shapes = shapes
        for i, (name, shape) in enumerate(shapes.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            self.register_parameter(name, nn.Parameter(values.to(dtype)))

    def forward(self, step: int) -> torch.Tensor:
        factors = torch.randn(len(self.shapes), generator=torch.Generator().manual_seed(step))
        params = zip(self.shapes, factors.tolist(), strict=True)
        # In the second step one parameter has no gradient.
        return sum(
            (getattr(self, n).square() * f).sum() for n, f in params if step != 1 or n != "c"
        )


def made(
    how: str, dtype: torch.dtype = torch.float32, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> nn.Module:
    if how == "rows":
        model = Model(dtype, shapes)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    return wrap("fsdpc", Model(dtype, shapes), use_orig_params=how == "units")


def train(model: nn.Module, optimizer: Any, steps: range, **options: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step(**options)


def same(one: Any, other: Any) -> None:
    """Check that both optimizers have equal parameters and states."""
    for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        found, wanted = (dict(leaves(each.state[p])) for each, p in ((one, a), (other, b)))
        assert torch.equal(local(a), local(b)) and found.keys() == wanted.keys()
        for path in found:
            x, y = local(found[path]), local(wanted[path])
            assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y), path


@pytest.mark.long
@on_gpu
@ranks(1, 2, env=ON_GPU)
def test_equal_to_states_on_the_gpu(rank: int, world: int):
    import simgpu

    cases = [("AdamW", how, ratio) for how in ("units", "rows") for ratio in (0, 0.5, 1)]
    cases += [("AdamW", "flat", 1), ("Adam", "flat", 1), ("SGD", "rows", 0.5), ("SGD", "units", 1)]
    cases += [("Lion", "units", 1), ("AdamWBF16", "units", 1), ("AdamWBF16", "rows", 0.5)]
    cases += [("AdamW8bit", "rows", 0.97), ("AdamW8bit", "flat", 1), ("AdamMini", "units", 0)]
    cases += [("AdamMini", how, 1) for how in ("units", "rows", "flat")]
    cases += [("AdamMini", "rows", 0.97), ("AdamMini", "units", 0.5)]
    policies = ("lazy", "eager", "random:1", "order:host,2,1,0")
    for number, (name, how, ratio) in enumerate(cases):
        simgpu.policy(policies[number % len(policies)])
        kind, dtype = KINDS[name]
        low = name in ("AdamW8bit", "AdamMini")
        clip = {"max_norm": 1.0} if low or name == "AdamW" else {}
        shapes = LARGE if low else SHAPES
        models = [made(how, dtype, shapes) for _ in range(2)]
        kept = kind(models[0].parameters())
        away = kind(models[1].parameters(), offload=optim.Host(ratio, SMALL))
        for model, optimizer in zip(models, (kept, away), strict=True):
            train(model, optimizer, range(3), **clip)
        same(away, kept)
        here, total = away._store.chosen_bytes
        assert here <= ratio * total and (here == total) == (ratio == 1), (name, how)
        assert (away._store.host_bytes > 0) == (here > 0)
        assert not low or ratio < 0.9 or len(away._store.chunks) > 1


def count_a_step(rank: int, world: int, name: str) -> dict[str, Any]:
    import simgpu

    from fsdpc import _C

    simgpu.policy("lazy")
    kind, shapes = (MINI, LARGE) if name == "AdamMini" else (optim.AdamW, SHAPES)
    model = made("units", shapes=shapes)
    optimizer = kind(model.parameters(), offload=optim.Host(1, SMALL))
    train(model, optimizer, range(2))
    model(2).backward()
    store = optimizer._store
    lanes = [lane.counts() for lane in (store.incoming, store.outgoing)]
    early: list[bool] = []
    own: Any = type(optimizer)
    real = own._step_group

    def step_group(self: Any, *args: Any) -> None:
        """Record whether the next chunk has arrived when this chunk is stepped."""
        if self is not optimizer:
            after = len(early) + 1
            early.append(after < chunks and has_come(store, after))
        real(self, *args)

    chunks = len(store.chunks)
    found: dict[str, Any] = {"chunks": chunks, "bytes": store.chosen_bytes[0]}
    for policy in ("lazy", "eager"):
        simgpu.policy(policy)
        early.clear()
        own._step_group = step_group
        for buffer in store.buffers:
            buffer.fill_(171)
        waits = _C.cuda_waits(0)
        with simgpu.counting() as driver:
            optimizer.step()
        own._step_group = real
        found[policy] = {"early": list(early), "host_syncs": _C.cuda_waits(0) - waits, **driver}
    found["lanes"] = [
        {name: value - before[name] for name, value in lane.counts().items()}
        for lane, before in zip((store.incoming, store.outgoing), lanes, strict=True)
    ]
    return found


def has_come(store: Any, number: int) -> bool:
    """Return whether the first state of chunk ``number`` is in its buffer."""
    there, host, nbytes = next(iter(store.addresses(number % 2, store.chunks[number])))
    return ctypes.string_at(there, nbytes) == ctypes.string_at(host, nbytes)


@on_gpu
@pytest.mark.parametrize("name", ["AdamW", "AdamMini"])
def test_counts(name: str):
    """While a chunk is stepped, the next chunk is copied; the step does not wait for the copy."""
    found = run_ranks(count_a_step, 1, env=ON_GPU, name=name)[0]
    print(found)
    chunks, (came, went) = found["chunks"], found["lanes"]
    assert chunks >= 6
    for policy in ("lazy", "eager"):
        assert found[policy]["host_syncs"] == found[policy]["host_allocations"] == 0
        assert found[policy]["allocations"] == found[policy]["pageable"] == 0
    assert found["eager"]["early"] == [True] * (chunks - 1) + [False]
    assert not any(found["lazy"]["early"])
    two = 2 * found["bytes"]  # the bytes of two steps
    assert two <= came["bytes_in"] == went["bytes_out"] <= 1.05 * two
    assert came["marks"] == went["marks"] == came["joins"] == 2 * chunks
    assert went["begins"] == 2 * chunks and came["begins"] == 2 * (chunks - 1)
    assert went["joins"] == 2 * (chunks - 1) and came["finishes"] == went["finishes"] == 0


def leave_out_each(rank: int, world: int, what: str) -> list[tuple[Any, list[str]]]:
    import simgpu
    from watch import Operators

    simgpu.policy("lazy")
    simgpu.options().quiet = True
    masters = what == "masters"
    kind = {"AdamW8bit": optim.AdamW8bit, "AdamMini": MINI}.get(what, optim.AdamW)
    shapes = SHAPES if kind is optim.AdamW else {"a": (300, 301)}
    model = made("units", torch.bfloat16 if masters else torch.float32, shapes)
    optimizer = kind(model.parameters(), offload=optim.Host(1, SMALL, masters=masters))
    train(model, optimizer, range(2))
    found: list[tuple[Any, list[str]]] = []
    model(2).backward()
    with Operators():
        for left_out in ("none", "none", "read", *range(1, 1000)):
            assert simgpu.drain()
            optimizer.step()  # the copies of this step still run when the next step begins
            if left_out == "read":
                states = dict.values(optimizer.state)  # the optimizer does not see these reads
                [values.sum() for values in tree_leaves(list(states)) if values.numel() > 1]
            elif left_out != "none":
                simgpu.skip_wait(left_out)
            before = simgpu.calls("cuStreamWaitEvent")
            optimizer.step()
            waits = simgpu.calls("cuStreamWaitEvent") - before
            assert simgpu.drain()
            found.append((left_out, simgpu.take_reports()))
            if left_out == waits:
                return found
    raise AssertionError("waits that do not end")


@on_gpu
@pytest.mark.parametrize("what", ["AdamW", "masters", "AdamW8bit", "AdamMini"])
def test_each_wait_that_is_left_out_is_found(what: str):
    found = run_ranks(leave_out_each, 1, env=ON_GPU, what=what)[0]
    for left_out, reports in found:
        print(f"{left_out}: {(reports or ['-'])[0]}")
    assert found[0][1] == found[1][1] == [] and len(found) > (
        15 if what in ("AdamW", "masters") else 8
    )
    assert [left_out for left_out, reports in found[2:] if not reports] == []


@on_gpu
@ranks(2, env=ON_GPU)
def test_masters(rank: int, world: int):
    """With the same values and gradients, steps equal those of an optimizer with masters in a file.
    The test also sets elements of parameters, skips a step, and loads the states of the other
    optimizer. The host reads no tensor in a step.
    """
    cases = [("AdamW", 0), ("AdamW", 0.5), ("AdamW", 1), ("SGD", 0.5), ("Lion", 1), ("SGD", 1)]
    for number, (name, ratio) in enumerate(cases):
        dtype = torch.float16 if name == "Lion" else torch.bfloat16
        model, kind = made(("units", "rows", "flat")[number % 3], dtype), KINDS[name][0]
        params = list(model.parameters())
        others = [nn.Parameter(local(p).detach().clone()) for p in params]
        with tempfile.TemporaryDirectory() as folder:
            disk = optim.Disk(folder, 3 * 131072, masters=True)
            kept = kind(others, lr=1e-4, offload=disk)
            away = kind(params, lr=1e-4, offload=optim.Host(ratio, SMALL, masters=True))
            for step in range(5):
                away.zero_grad()
                model(step).backward()
                for param, other in zip(params, others, strict=True):
                    other.grad = None if param.grad is None else local(param.grad).clone()
                    if step == 2:  # values that the user sets are kept despite the master
                        with torch.no_grad():
                            local(param).view(-1)[:3].fill_(-0.0)
                            other.view(-1)[:3].fill_(-0.0)
                for optimizer in (kept, away):
                    optimizer.grad_scale = torch.tensor(4.0)
                    optimizer.found_inf = torch.tensor(float(step in (0, 2)))
                before = [bits(local(p)).clone() for p in params]
                kept.step()
                with Unread():
                    away.step()
                left = [torch.equal(bits(local(p)), b) for p, b in zip(params, before, strict=True)]
                assert all(left) or step not in (0, 2)
                for param, other in zip(params, others, strict=True):
                    assert torch.equal(bits(local(param)), bits(other)), (name, ratio, step)
                if step == 3:
                    away = kind(params, offload=optim.Host(1 - ratio, SMALL, masters=True))
                    away.load_state_dict(kept.state_dict())
            same_states(away, kept)
            assert any((s["master"] != p).any() for p, s in kept.state.items())
            here, total = away._store.chosen_bytes
            assert total > 0 and here <= (1 - ratio) * total and (here == total) == (ratio == 0)


@pytest.mark.long
@on_gpu
@ranks(2, env=ON_GPU)
def test_masters_with_second_moments_of_blocks(rank: int, world: int):
    """Masters equal float32 parameters that get the same gradients, also after loading a state dict
    and after loading a checkpoint.
    """
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for ratio in (0, 0.97, 1):
        model, wide = made("rows", torch.bfloat16, LARGE), made("rows", torch.float32, LARGE)
        params, others = list(model.parameters()), list(wide.parameters())
        with torch.no_grad():
            for param, other in zip(params, others, strict=True):
                local(other).copy_(local(param))

        def fresh(ratio: float, params: Any = params) -> Any:
            return MINI(params, lr=1e-4, offload=optim.Host(ratio, SMALL, masters=True))

        kept, away = MINI(others, lr=1e-4), fresh(ratio)
        for step in range(5):
            if step == 3:
                saved, away = away.state_dict(), fresh(1 - ratio)
                away.load_state_dict(saved)
            if step == 4:
                checkpoint.save(f"{folder[0]}/{ratio}", model, away)
                away = fresh(ratio)
                checkpoint.load(f"{folder[0]}/{ratio}", model, away)
            for optimizer, each in ((away, model), (kept, wide)):
                optimizer.zero_grad()
                each(step).backward()
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(float(step == 2))
            for param, other in zip(params, others, strict=True):
                if param.grad is not None:
                    local(other.grad).copy_(local(param.grad))
            kept.step()
            with Unread():
                away.step()
            for param, other in zip(params, others, strict=True):
                assert torch.equal(local(param), local(other).to(param.dtype)), (ratio, step)
                own, expected = away.state[param], kept.state[other]
                if own:
                    assert torch.equal(local(own["master"]), local(other))
                    assert torch.equal(local(own["exp_avg"]), local(expected["exp_avg"]))
                    assert torch.equal(own["means"][0], expected["means"][0])
        assert (away._store.host_bytes > 0) == (ratio > 0)


def same_states(one: Any, other: Any) -> None:
    """Check that states of sharded parameters equal those of their copies in host memory."""
    states = zip(one.state.values(), other.state.values(), strict=True)
    for a, b in states:
        assert a.keys() == b.keys() and a["master"].dtype == torch.float32
        assert all(torch.equal(local(a[key]), b[key]) for key in a)


def local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def bits(value: torch.Tensor) -> torch.Tensor:
    return value.detach().view(torch.int16)


@on_gpu
@ranks(2, env=ON_GPU)
def test_infinities_skip_a_step(rank: int, world: int):
    """The first step is skipped too, although only the GPU knows that it was skipped."""
    for name in ("AdamW", "SGD", "AdamW8bit", "AdamMini"):
        ends = []
        for offload in (None, optim.Host(1, SMALL)):
            model = made("rows")
            optimizer = KINDS[name][0](model.parameters(), offload=offload)
            for number, found in enumerate((1.0, 0.0, 1.0, 0.0)):
                optimizer.zero_grad()
                model(number).backward()
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(found)
                optimizer.step()
            ends.append(optimizer)
        same(*ends)


@pytest.mark.long
@on_gpu
@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "AdamMini"])
@ranks(2, env=ON_GPU)
def test_states_are_saved_and_loaded(rank: int, world: int, name: str):
    """States go through state dicts, gathered state dicts and checkpoints,
    between all places where states can be.
    """
    FSDP = fsdpc.FullyShardedDataParallel
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    places = (None, optim.Host(1, SMALL), optim.Host(0.5, SMALL))
    models = [made("units") for _ in places]

    def fresh(number: int) -> Any:
        kind = MINI if name == "AdamMini" else getattr(optim, name)
        return kind(models[number].parameters(), offload=places[number])

    optimizers = [fresh(number) for number in range(3)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(2))
    plain = copy.deepcopy(optimizers[0].state_dict())
    full = FSDP.optim_state_dict(models[0], optimizers[0])
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        for key, state in FSDP.optim_state_dict(model, optimizer)["state"].items():
            assert all(torch.equal(v, full["state"][key][k]) for k, v in state.items())
        checkpoint.save(Path(folder[0]) / str(number), model, optimizer)
        train(model, optimizer, range(2, 4))
    for number, model in enumerate(models):
        for how in ("state dict", "gathered", "checkpoint"):
            optimizer = optimizers[number] if how == "checkpoint" else fresh(number)
            waits = finishes(optimizer)
            checkpoint.load(Path(folder[0]) / str((number + 1) % 3), model, optimizer)
            if how == "checkpoint" and number == 1:  # copies of the last step were still running
                assert finishes(optimizer) > waits
            if how == "state dict":
                optimizer.load_state_dict(plain)
            if how == "gathered":
                optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full))
            train(model, optimizer, range(2, 4))
            if number > 0:
                same(optimizer, optimizers[0])
                here, _ = optimizer._store.chosen_bytes
                assert optimizer._store.host_bytes >= here > 0 or number == 2
        if number == 0:
            optimizers[0] = optimizer


def finishes(optimizer: Any) -> int:
    """Return how often the host has waited for copies of states to host memory."""
    lane = getattr(optimizer._store, "outgoing", None)
    return lane.counts()["finishes"] if lane else 0


@on_gpu
@ranks(1, env=ON_GPU)
def test_failures(rank: int, world: int):
    import simgpu

    model = made("units")
    model(0).backward()
    optimizer = optim.AdamW(model.parameters(), offload=optim.Host(1, SMALL))
    simgpu.fail("cuMemHostAlloc", 1, 2)  # out of memory
    with pytest.raises(MemoryError, match=r"AdamW: offload=Host.*cannot be pinned.*smaller ratio"):
        optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    model(1).backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim.AdamW, "_step_group", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="ended in the middle.*Load a checkpoint"):
            use()
    optimizer.load_state_dict(saved)
    optimizer.step()
    with pytest.raises(ValueError, match="AdamW8bit has no float32 masters"):
        optim.AdamW8bit(model.parameters(), offload=optim.Host(masters=True))


def program(door: str, name: str, offload: Any) -> list[torch.Tensor]:
    """Train with gradient accumulation, a frozen block that is unfrozen later, checkpointed blocks,
    offloaded activations, two parameter groups, a schedule, clipping, and one block whose
    parameters are in host memory.
    """
    plain = toy(blocks=4, width=64)
    for param in plain.blocks[1].parameters():
        param.requires_grad_(False)
    checkpoint_blocks(plain, ratio="1/2", blocks=Block)
    if door == "FSDP":
        for i, block in enumerate(plain.blocks):
            away = fsdpc.CPUOffload(offload_params=i == 2)
            plain.blocks[i] = wrap("fsdpc", block, use_orig_params=True, cpu_offload=away)
        model = wrap("fsdpc", plain, use_orig_params=True)
    else:
        for i, block in enumerate(plain.blocks):
            fully_shard(block, **({"offload_policy": CPUOffloadPolicy()} if i == 2 else {}))
        model = fully_shard(plain)
    params = dict(model.named_parameters())
    biases = [p for name, p in params.items() if name.endswith("bias")]
    others = [p for name, p in params.items() if not name.endswith("bias")]
    groups = [{"params": others}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = KINDS[name][0](groups, lr=1e-2, offload=offload)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for step in range(4):
        if step == 2:
            for name, param in params.items():
                if "blocks.1." in name:
                    param.requires_grad_(True)
        for micro in range(2):
            with activations_offload(model, min_bytes=256):
                loss = loss_of(model, tokens(dist.get_rank(), step, micro))
            loss.backward()
        optimizer.step_and_clip(1.0)
        optimizer.zero_grad()
        schedule.step()
    assert offload is None or optimizer._store.host_bytes > 0
    values = [*params.values(), *tree_leaves(list(optimizer.state.values()))]
    return [(v.to_local() if hasattr(v, "to_local") else v).detach().clone() for v in values]


@on_gpu
@pytest.mark.parametrize("name", ["AdamW", "AdamMini"])
@pytest.mark.parametrize("door", ["FSDP", "fully_shard"])
@ranks(2, env=ON_GPU)
def test_a_program_with_everything_around_it(rank: int, world: int, door: str, name: str):
    expected = program(door, name, None)
    for ratio in (0.5, 1):
        found = program(door, name, optim.Host(ratio, SMALL))
        assert len(found) == len(expected) > 30, (len(found), len(expected))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), ratio


@on_gpu
@ranks(2, env=ON_GPU)
def test_the_plan_equals_the_run(rank: int, world: int):
    """The planned bytes on the GPU and in host memory equal those of a run. The model has flat
    parameters, one per unit and dtype.
    """
    cases: dict[str, tuple[Any, torch.dtype]] = {
        "adamw-fused": (optim.AdamW, torch.float32),
        "lion": (optim.Lion, torch.bfloat16),
        "momentum": (partial(optim.SGD, lr=0.1, momentum=0.9), torch.float32),
        "adamw-bf16": (optim.AdamWBF16, torch.float32),
        "adamw-master": (optim.AdamW, torch.bfloat16),
        "adamw8bit": (optim.AdamW8bit, torch.float32),
        "adam-mini": (MINI, torch.bfloat16),
    }
    gpu = fsdpc._C.cuda_device(0)
    where = {"align_bytes": gpu["align_bytes"], "range_grain": gpu["grain_bytes"]}
    policy = ModuleWrapPolicy({Block})
    for (name, (kind, dtype)), ratio in itertools.product(cases.items(), (0.5, 1.0)):
        plain = toy(blocks=3, width=64).to(dtype)
        storage = str(dtype).removeprefix("torch.")
        setup = Setup(
            world, storage=storage, optimizer=name, host=ratio, host_buffers=SMALL, **where
        )
        planned = plan(Plain("toy", units_of(plain, policy)), check(setup))
        model = wrap("fsdpc", plain, use_orig_params=False, auto_wrap_policy=policy)
        masters = name == "adamw-master"
        away = optim.Host(ratio, SMALL, masters=masters)
        optimizer = kind(model.parameters(), offload=away)
        loss_of(model, tokens(rank, 0)).backward()
        optimizer.step()
        if name == "adamw8bit" and rank > 0:
            continue  # the plan describes only rank 0
        store = optimizer._store
        rows = {(r.role, r.where): r.bytes for r in planned.rows}
        assert rows["optimizer states", "host"] == store.host_bytes > 0, (name, ratio)
        assert rows["buffers of states", "device"] == sum(map(len, store.buffers)) == SMALL
        here, total = store.chosen_bytes
        assert rows.get(("optimizer states", "device"), 0) == total - here
        report = fsdpc.memory_report(model, optimizer)
        line = next(line for line in report.lines if line.role == "optimizer states")
        held = [(s.get("step"), s.get("means")) for s in dict.values(optimizer.state)]
        beside = sum(value.nbytes for value in tree_leaves(held) if value is not None)
        assert line.actual == line.planned == SMALL + total - here + beside
        assert "in pinned host memory" in line.note


@ranks(1)
def test_in_host_memory_it_costs_nothing_and_says_so(rank: int, world: int):
    model = made("units")
    _host._said.clear()
    with pytest.warns(UserWarning, match="changes nothing: the parameters are in host memory"):
        optimizer = optim.AdamW(model.parameters(), offload=optim.Host(0.5))
    assert optimizer._store is None and type(optimizer.state) is collections.defaultdict
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the process has already given the warning
        optim.AdamW(model.parameters(), offload=optim.Host())
    for options, match in (({"ratio": 1.5}, "from 0 .* to 1"), ({"buffer_bytes": 9}, "at least")):
        with pytest.raises(ValueError, match=match):
            optim.Host(**options)

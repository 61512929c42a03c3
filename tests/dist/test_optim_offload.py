"""Tests of fsdpc.optim on shards with states on a disk. Results equal those with states in memory
to the bit, also after a kill and through checkpoints. The memory of a run is bounded.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import die, ranks, run_ranks
from test_optim_steps import Model, alone, make, same, train
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_leaves
from toys import Block, by_door, full_parameters, loss_of, tokens, toy, wrap

import fsdpc
from fsdpc import _C, checkpoint, fully_shard, optim
from fsdpc.optim import _disk
from fsdpc.plan.ledger import plan
from fsdpc.plan.model import CPU, Setup, check
from fsdpc.plan.model import Model as Plain
from fsdpc.plan.sources.modules import units_of

STEPS = 3
SMALL = 400_000
KINDS = {
    "AdamW": ("units", "flat", "rows"),
    "AdamWBF16": ("units", "rows"),  # with "flat", the random bits differ
    "SGD": ("flat",),
    "Lion": ("rows",),
    "AdamMini": ("flat", "rows"),
}


@ranks(2)
def test_shards_of_both_interfaces(rank, world):
    folder = tempfile.mkdtemp()
    mesh = dist.init_device_mesh("cpu", (world,))
    for name, kinds in KINDS.items():
        dtype = torch.bfloat16 if name == "AdamWBF16" else torch.float32
        expected = dict(alone(name, dtype, clip=name == "AdamW")[0].named_parameters())
        for kind in kinds:
            model = Model(dtype)
            if kind == "rows":
                fully_shard(model, mesh=mesh)
            else:
                model = wrap("fsdpc", model, use_orig_params=kind == "units")
            disk = optim.Disk(folder, SMALL, checksum=True)
            optimizer = make(name, model, offload=disk)
            train(model, optimizer, range(STEPS), name == "AdamW")
            if kind == "rows":
                found = {n: p.full_tensor() for n, p in model.named_parameters()}
            else:
                found = full_parameters(model)
            for key, value in found.items():
                same(name, value.detach(), expected[key].detach())
    assert os.listdir(folder) == []


@ranks(2)
def test_optimizer_state_dicts_gather_and_load(rank, world):
    folder = tempfile.mkdtemp()
    disk = optim.Disk(folder, SMALL)
    model = wrap("fsdpc", Model(torch.float32), use_orig_params=True)
    other = wrap("fsdpc", Model(torch.float32), use_orig_params=True)
    one, two = make("AdamW", model, offload=disk), make("AdamW", other)
    train(model, one, range(2), True)
    train(other, two, range(2), True)
    fsdp = fsdpc.FullyShardedDataParallel
    states, expected = fsdp.optim_state_dict(model, one), fsdp.optim_state_dict(other, two)
    for name, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(states["state"][name][key], value), (name, key)
    fresh = make("AdamW", model, offload=disk)
    fresh.load_state_dict(fsdp.optim_state_dict_to_load(model, fresh, expected))
    train(model, fresh, range(2, 4), True)
    train(other, two, range(2, 4), True)
    wanted = full_parameters(other)
    for key, value in full_parameters(model).items():
        assert torch.equal(value, wanted[key])


@ranks(2)
def test_the_plan_equals_the_run(rank, world):
    """The planned bytes of the file and of its buffers equal those of a run. The model has flat
    parameters, one per unit and dtype.
    """
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "adamw": (optim.AdamW, {}),
        "lion": (optim.Lion, {}),
        "momentum": (partial(optim.SGD, momentum=0.9), {}),
        "adamw-master": (optim.AdamW, {"masters": True}),
        "adam-mini": (partial(optim.AdamMini, block=lambda *_: 100), {}),
    }
    for name, (kind, options) in cases.items():
        for dtype in (torch.float32, torch.bfloat16):
            policy = ModuleWrapPolicy({Block})
            plain = toy(blocks=3, width=64).to(dtype)
            buffers = 500_000
            storage = str(dtype).removeprefix("torch.")
            setup = check(Setup(world, storage=storage, optimizer=name, disk=buffers, **CPU))
            made = plan(Plain("toy", units_of(plain, policy)), setup)
            model = wrap("fsdpc", plain, use_orig_params=False, auto_wrap_policy=policy)
            disk = optim.Disk(tempfile.mkdtemp(), buffers, **options)
            optimizer = kind(model.parameters(), lr=0.1, offload=disk)
            loss_of(model, tokens(rank, 0)).backward()
            optimizer.step()
            store = optimizer._store
            assert made.row("optimizer states") == _C.disk_info(store.disk)["bytes"], (name, dtype)
            assert made.row("buffers of states") == sum(map(len, store.buffers))
            report = fsdpc.memory_report(model, optimizer)
            line = next(line for line in report.lines if line.role == "optimizer states")
            held = [(s.get("step"), s.get("means")) for s in optimizer.state.values()]
            beside = sum(value.nbytes for value in tree_leaves(held) if value is not None)
            assert line.actual == line.planned == sum(map(len, store.buffers)) + beside
            assert "of states on a disk" in line.note


@ranks(2)
@pytest.mark.parametrize("door", ["orig", "fully_shard"])
def test_the_plan_of_whole_matrices_equals_the_run(rank, world, door):
    """The plan counts the states' bytes; files also have padding and room for small states."""
    cases = {
        "muon": (optim.Muon, torch.bfloat16),
        "soap": (optim.SOAP, torch.float32),
        "shampoo": (optim.Shampoo, torch.bfloat16),
        "adafactor": (optim.Adafactor, torch.float32),
    }
    for name, (kind, dtype) in cases.items():
        plain = toy(width=64).to(dtype)
        storage = str(dtype).removeprefix("torch.")
        setup = check(Setup(world, storage=storage, optimizer=name, disk=SMALL, **CPU))
        units = units_of(plain, ModuleWrapPolicy({Block}))
        made = plan(Plain("toy", units), setup)
        model = by_door(door, plain)
        disk = optim.Disk(tempfile.mkdtemp(), SMALL)
        optimizer = kind(model.named_parameters(), lr=0.1, offload=disk)
        loss_of(model, tokens(rank, 0)).backward()
        optimizer.step()
        store = optimizer._store
        kept = [v for each in store.held.values() for own in each for v in own.values()]
        kept += [each.values for each in store.whole.values()]
        placed, size = sum(v.nbytes for v in kept), _C.disk_info(store.disk)["bytes"]
        assert placed <= size <= placed + len(kept) * _disk.PAGE + _disk.ROOM
        shown = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
        assert placed == sum(getattr(v, "_local_tensor", v).nbytes for v in shown)
        every = torch.tensor(float(placed))
        dist.all_reduce(every)
        [states] = [row for row in made.rows if row.role == "optimizer states"]
        assert states.where == "disk", name
        assert abs(states.bytes * world - int(every)) < world, name
        assert made.row("buffers of states") == sum(map(len, store.buffers))


# --- memory --------------------------------------------------------------------------------------


def blocks() -> nn.Module:
    """Return a model of 8 units with 8 million parameters in all."""
    torch.manual_seed(0)
    layers = [wrap("fsdpc", nn.Linear(1000, 1000), use_orig_params=True) for _ in range(8)]
    return wrap("fsdpc", nn.Sequential(*layers), use_orig_params=True)


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randn(4, 1000)).square().mean().backward()


def steps(model: nn.Module, **options: Any) -> optim.AdamW:
    optimizer = optim.AdamW(model.parameters(), lr=0.01, **options)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step_and_clip(1.0)
    return optimizer


def fits(model: nn.Module) -> bool:
    """Return whether a step with states in memory is possible."""
    try:
        optim.AdamW(model.parameters()).step()
    except (RuntimeError, MemoryError):
        return False
    return True


@pytest.mark.long
@ranks(2)
def test_memory_is_bounded(rank, world):
    """The states of a sharded model take 32 MB on each rank, but RLIMIT_DATA allows only 8 MB for
    them and 8 MB for a backward. The model trains with states on the disk, and results equal those
    of a run in memory to the bit. The limit does not allow such a run in memory.
    """
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD: free() unmaps large blocks
    one, other, small = blocks(), blocks(), nn.Linear(3, 3)
    small(torch.ones(3)).sum().backward()
    optim.AdamW(small.parameters()).step_and_clip(1.0)  # allocates what is needed at first use
    for model in (one, other):
        backward(model, 0)
    data = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
    limit = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + (16 << 20), limit[1]))
    try:
        kept = steps(one, offload=optim.Disk(tempfile.mkdtemp(), buffer_bytes=4 << 20))
        allowed = fits(other)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limit)
    assert not allowed
    full = steps(blocks())
    sizes = [sum(v.nbytes for k, v in s.items() if k != "step") for s in full.state.values()]
    assert sum(sizes) >= 4 * 8_000_000
    for a, b in zip(kept.param_groups[0]["params"], full.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
        if a.numel():
            assert torch.equal(kept.state[a]["exp_avg_sq"], full.state[b]["exp_avg_sq"])


# --- kills ---------------------------------------------------------------------------------------


def run_to(rank: int, world: int, folder: str, last: int, on_disk: bool, die_at: int = 0) -> Any:
    """Train up to step `last`, from the checkpoint if there is one; save after step 2. Rank 1 dies
    after `die_at` chunks; with 0, it never dies.
    """
    states = Path(folder) / "states"
    model = wrap("fsdpc", Model(torch.float32), use_orig_params=True)
    disk = optim.Disk(states, SMALL) if on_disk else None
    optimizer = make("AdamW", model, offload=disk)
    begin, written = 0, 0
    if (Path(folder) / "saved").exists():
        checkpoint.load(Path(folder) / "saved", model, optimizer)
        begin = 2
    real = _disk.Store.start

    def counted(self: Any, write: bool, buffer: int, chunk: Any) -> None:
        nonlocal written
        real(self, write, buffer, chunk)
        written += write
        if written == die_at and rank == 1:
            die()

    if die_at:
        _disk.Store.start = counted
    train(model, optimizer, range(begin, min(2, last)), True)
    if begin == 0 and on_disk:
        checkpoint.save(Path(folder) / "saved", model, optimizer)
    train(model, optimizer, range(max(begin, 2), last), True)
    return {name: value.tolist() for name, value in full_parameters(model).items()}


def test_killed_in_the_middle_of_a_step(tmp_path: Path):
    (tmp_path / "states").mkdir()
    arguments = {"folder": str(tmp_path), "last": 4}
    expected = run_ranks(run_to, 2, on_disk=False, **arguments)
    outcomes = run_ranks(run_to, 2, faults=True, on_disk=True, die_at=3, **arguments)
    assert outcomes[1].exit_signal == signal.SIGKILL, outcomes[1].error
    assert "PeerError" in (outcomes[0].error or ""), outcomes[0].error
    assert os.listdir(tmp_path / "states") == []  # the next run finds no old file
    found = run_ranks(run_to, 2, on_disk=True, **arguments)
    assert found == expected

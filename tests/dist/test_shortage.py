"""Tests of allocations that fail: the exception stays as it is and gets one report,
and other ranks get the cause.
"""

from __future__ import annotations

import functools
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import ranks, run_ranks
from torch import nn
from toys import wrap

import fsdpc
from fsdpc import optim
from fsdpc._comm import bootstrap as _bootstrap
from fsdpc.plan import noticed, shortage
from fsdpc.wrap import ModuleWrapPolicy

sys.path.append(str(Path(__file__).parents[1] / "simgpu" / "python"))
import env

LARGE = 1 << 26  # elements: 256 MiB in fp32, more than any allocator has at hand
ROOM = 64 << 20


class Block(nn.Module):
    """A block whose parts allocate ``LARGE`` elements when asked to."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.asks = ""

    def forward(self, x):
        x = self.up(x)
        if self.asks == "forward":
            x = x + torch.ones(LARGE).sum()
        if self.asks == "backward":  # torch's backward allocates LARGE elements
            x = x + x.flatten()[:1].expand(LARGE)[torch.tensor([0, 1])].sum()
        return x


def model(front: str, width: int = 64):
    torch.manual_seed(0)
    whole = nn.Sequential(*(Block(width) for _ in range(3)), nn.Linear(width, 4))
    if front == "fsdp":
        return wrap(
            "fsdpc", whole, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
        )
    for block in whole[:3]:
        fsdpc.fully_shard(block)
    return fsdpc.fully_shard(whole)


def blocks(sharded):
    return [m for m in sharded.modules() if isinstance(m, Block)]


def step(sharded, optimizer, width: int = 64) -> None:
    sharded(torch.ones(2, width)).square().mean().backward()
    optimizer.step()


def limit(room: int = ROOM) -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))


def unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def note_of(caught) -> str:
    unlimited()
    notes = [note for note in caught.value.__notes__ if note.startswith(noticed.HEAD)]
    assert len(notes) == 1, notes
    return notes[0]


@ranks(1)
@pytest.mark.parametrize("front", ["fsdp", "fully_shard"])
def test_every_phase_is_reported(rank, world, front):
    """Under a limit of the address space, the error keeps its type and text and gets one note."""
    sharded = model(front)
    optimizer = torch.optim.AdamW(sharded.parameters())
    step(sharded, optimizer)
    for phase in ("forward", "backward"):
        blocks(sharded)[1].asks = phase
        limit()
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate") as caught:
            step(sharded, optimizer)
        note = note_of(caught)
        blocks(sharded)[1].asks = ""
        assert f"on rank 0 of 1 in {phase} of unit 1" in note.splitlines()[0], note
        assert "asked for: 0.25 GiB, by torch" in note or "0.50 GiB" in note, note
        assert "shards" in note and "RLIMIT_AS" in note and "checkpoint every block: -" in note
        step(sharded, optimizer)  # the program may go on


STATES = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
    "adamw8bit": optim.AdamW8bit,
    "adamw-bf16": optim.AdamWBF16,
    "adam-mini": optim.AdamMini,
    "lion": optim.Lion,
    "muon": lambda params: optim.Muon([{"params": params, "use_muon": True}]),
    "soap": lambda params: optim.SOAP([{"params": params, "use_soap": True}]),
    "shampoo": lambda params: optim.Shampoo([{"params": params, "use_shampoo": True}]),
    "adafactor": optim.Adafactor,
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
}


@ranks(1)
@pytest.mark.parametrize("name", STATES)
def test_the_states_of_each_optimizer_are_planned(rank, world, name):
    sharded = model("fsdp", 256)
    optimizer = STATES[name](sharded.parameters())
    step(sharded, optimizer, 256)
    blocks(sharded)[1].asks = "forward"
    limit()
    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        step(sharded, optimizer, 256)
    note = note_of(caught)
    [line] = [line for line in note.splitlines() if line.startswith("optimizer states ")]
    _, planned, actual = re.split(r"  +", line.rstrip())
    but = {"sgd": "-", "adamw8bit": "0.38 MiB"}  # with 8 bits, each parameter begins a new block
    but["adafactor"] = "10.03 KiB"  # the plan does not count the step counters
    assert planned == but.get(name, actual), line


@pytest.mark.long
@ranks(1)
@pytest.mark.parametrize("front", ["fsdp", "fully_shard"])
def test_advice_is_about_the_moment_that_failed(rank, world, front):
    """Before the first step there are no optimizer states, so 8-bit states would free nothing."""
    sharded = model(front, 4096)
    optimizer = torch.optim.AdamW(sharded.parameters())
    for states in (False, True):
        blocks(sharded)[1].asks = "backward"
        limit(3 * ROOM)  # room for the gradient of one block, but not for what block 1 asks for
        with pytest.raises(RuntimeError, match="can't allocate") as caught:
            step(sharded, optimizer, 4096)
        note = note_of(caught)
        advice = note.partition("would free most")[2]
        assert "checkpoint every block: -" in advice, note
        assert ("8-bit optimizer states: -" in advice) == states, note
        blocks(sharded)[1].asks = ""
        step(sharded, optimizer, 4096)


@pytest.mark.long
@ranks(1)
@pytest.mark.parametrize("front", ["fsdp", "fully_shard"])
def test_the_optimizers_step_and_wrapping_are_reported(rank, world, front):
    sharded = model(front, 4096)  # 64 MiB a block
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(torch.ones(2, 4096)).square().mean().backward()
    limit(40 << 20)
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        optimizer.step()
    note = note_of(caught)
    assert "in an optimizer's step" in note and "asked for: 64.00 MiB, by torch" in note, note
    assert "half" not in note.partition("would free")[0]
    plain = nn.Linear(8192, 8192)
    limit()
    with pytest.raises(MemoryError) as wrapped:
        if front == "fsdp":
            wrap("fsdpc", plain)
        else:
            fsdpc.fully_shard(plain)
    note = note_of(wrapped)
    assert "in wrapping of unit Linear" in note and "by fsdpc's engine" in note, note


def fails_alone(rank: int, world: int, front: str) -> None:
    sharded = model(front)
    optimizer = torch.optim.AdamW(sharded.parameters())
    step(sharded, optimizer)
    if rank == 1:
        limit()
        blocks(sharded)[1].asks = "backward"
    step(sharded, optimizer)


def fails_on_a_host(rank: int, world: int, hosts: int) -> None:
    host = _bootstrap.this_host()
    _bootstrap.this_host = lambda: f"node{min(rank, hosts - 1)} {host}"
    fails_alone(rank, world, "fsdp")


@pytest.mark.parametrize("front", ["fsdp", "fully_shard"])
def test_the_other_ranks_get_the_cause(front):
    outcomes = run_ranks(fails_alone, 2, faults=True, front=front)
    assert "DefaultCPUAllocator" in outcomes[1].error
    assert "out of memory on rank 1 of 2 in backward of unit 1" in outcomes[1].traceback
    assert outcomes[0].error.startswith("PeerError: rank 1")
    assert "out of memory on rank 1 of 2 in backward of unit 1" in outcomes[0].error
    assert noticed.HEAD not in outcomes[0].traceback.partition("its error")[0]
    assert outcomes[0].finished_at - outcomes[1].finished_at < 25  # far below the deadline of 30 s


@pytest.mark.parametrize("hosts", [1, 2])
def test_the_other_ranks_get_the_cause_over_a_wire(hosts):
    env = {"FSDPC_COLLECTIVES": "wire" if hosts == 1 else "auto"}
    outcomes = run_ranks(fails_on_a_host, 3, faults=True, env=env, hosts=hosts)
    said = "out of memory on rank 1 of 3 in backward of unit 1"
    assert "DefaultCPUAllocator" in outcomes[1].error and said in outcomes[1].traceback
    for other in (outcomes[0], outcomes[2]):
        assert re.match(r"PeerError: .*rank 1( \(pid \d+\))? gave up", other.error), other.error
        assert said in other.error, other.error
        assert other.finished_at - outcomes[1].finished_at < 25  # far below the deadline of 30 s


@ranks(1)
def test_a_report_that_fails_masks_nothing(rank, world):
    sharded = model("fsdp")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    step(sharded, optimizer)
    blocks(sharded)[1].asks = "forward"
    limit(0)  # the report can use only the reserve of address space
    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        step(sharded, optimizer)
    assert "what would free most" in note_of(caught)
    noticed.REPORT = "fsdpc.no_such_module"
    limit()
    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        step(sharded, optimizer)
    assert "no report could be made: ModuleNotFoundError" in note_of(caught)
    with pytest.raises(ValueError, match="other") as caught:
        raise_in(sharded, ValueError("some other error"))
    assert not hasattr(caught.value, "__notes__")


def raise_in(sharded, error: Exception) -> None:
    def fails(*args):
        raise error

    blocks(sharded)[0].up.register_forward_hook(fails)
    sharded(torch.ones(2, 64))


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@ranks(2, env=env.environment())
def test_a_small_gpu(rank, world):
    """The simulated GPU has no memory left for a unit, then none for slots."""
    import simgpu

    options = simgpu.cuda().simgpu_get_options().contents
    sharded = model("fsdp", 256)
    before = options.memory_bytes
    options.memory_bytes = simgpu.count()["device_bytes"] + (64 << 10)
    with pytest.raises(fsdpc.OutOfMemoryError) as caught:
        sharded(torch.ones(2, 256))
    note = note_of(caught)
    assert "in the first forward, making slots" in note and "gather slots" in note, note
    with pytest.raises(fsdpc.OutOfMemoryError) as wrapped:
        wrap("fsdpc", nn.Linear(2048, 2048))
    assert "in wrapping of unit Linear" in note_of(wrapped)
    options.memory_bytes = before


@ranks(1)
def test_a_forked_process_counts_its_share_of_its_parents_memory(rank, world):
    whole = noticed.private_bytes()
    noticed.PROCESS = 0  # another process
    assert 0 < noticed.private_bytes() < whole


def test_what_a_gpu_holds_before_there_are_slots(monkeypatch):
    monkeypatch.setattr(shortage, "gpu_of", lambda tree: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
    assert shortage._process(SimpleNamespace(units=[], depths=[], core=None), []) == 7

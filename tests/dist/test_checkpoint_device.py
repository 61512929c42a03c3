"""Checkpoints through pinned memory, on the simulated GPU.

The files equal the files that CPU ranks write, to the bit. Neither the host nor a stream waits
without need. If a test leaves out a wait, the simulator reports a race.
"""

from __future__ import annotations

import gc
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import env
import pytest
import torch
from harness import run_ranks
from torch import nn

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc import checkpoint
from fsdpc.checkpoint import background, saving, staging
from fsdpc.checkpoint.convert import convert

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
ON_GPU = env.environment() | {"FSDPC_TEST_WATCH": "0", "FSDPC_POISON": "0"}
BOUND = {"FSDPC_PINNED_MIB": "0.03"}


class Run:
    """A sharded model with a buffer that its forward writes, and with an optimizer."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(3)]
        whole = nn.Sequential(nn.Linear(16, 64), *(FSDP(each) for each in layers), nn.Linear(64, 4))
        self.norm = nn.BatchNorm1d(16)
        self.model = nn.Sequential(self.norm, FSDP(whole))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.rank = rank

    def step(self, number: int) -> None:
        torch.manual_seed(10 * number + self.rank)
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 16)).square().mean().backward()
        self.optimizer.step()


def digest(path: Path) -> dict[str, str]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(f.relative_to(path)): hashlib.md5(f.read_bytes()).hexdigest() for f in files}


def save_all(rank: int, world: int, folder: str, steps: int = 2) -> None:
    """Save in the foreground, then in the background while a step runs, then with a cast."""
    staging.SLOT_BYTES = 1 << 16  # so small that large values are copied in several parts
    run = Run(rank)
    for i in range(steps):
        run.step(i)
    checkpoint.save(f"{folder}/now", run.model, run.optimizer)
    handle = checkpoint.save(f"{folder}/later", run.model, run.optimizer, async_=True)
    checkpoint_cast = {"dtype": torch.bfloat16}
    assert handle is not None
    run.step(steps)
    handle.wait()
    checkpoint.save(f"{folder}/cast", run.model, run.optimizer, **checkpoint_cast)


def load_and_save(rank: int, world: int, folder: str, to: str) -> None:
    run = Run(rank)
    for verify in ("before", "during"):
        found = checkpoint.load(f"{folder}/now", run.model, run.optimizer, verify=verify)
        assert found.verified
    checkpoint.load(f"{folder}/cast", Run(rank).model, cast=True)
    checkpoint.save(to, run.model, run.optimizer)
    run = Run(rank)
    checkpoint.load(f"{folder}/dcp", run.model, run.optimizer)
    checkpoint.save(f"{to}-dcp", run.model, run.optimizer)


@pytest.mark.long
@pytest.mark.parametrize("world, more", [(1, {}), (2, {}), (2, BOUND)])
def test_equal_to_processors(tmp_path: Path, world: int, more: dict[str, str]):
    """GPU files equal CPU files, even if the model has stepped since a background save began."""
    for name, where in (("cpu", {}), ("gpu", ON_GPU | more)):
        run_ranks(save_all, world, env=where, on_device=bool(where), folder=str(tmp_path / name))
    for kind in ("now", "later", "cast"):
        there = digest(tmp_path / "gpu" / kind)
        assert there == digest(tmp_path / "cpu" / kind)
        assert len(there) > 5
    folder, to = str(tmp_path / "cpu"), tmp_path / "loaded"
    convert(tmp_path / "cpu/now", tmp_path / "cpu/dcp", None, "dcp")
    run_ranks(load_and_save, 3 - world, env=ON_GPU | more, folder=folder, to=str(to))
    tensors = {name for name in digest(to) if name.endswith(".safetensors")}
    expected = {name: digest(tmp_path / "cpu" / "now")[name] for name in tensors}
    for loaded in (to, tmp_path / "loaded-dcp"):  # loaded-dcp was loaded from torch's format
        assert {name: digest(loaded)[name] for name in tensors} == expected


# --- what is copied, and who waits ---------------------------------------------------------------


@contextmanager
def held_back() -> Iterator[Callable[[checkpoint.SaveHandle], None]]:
    """Let saves in the background go on only after a call of the yielded function.

    That function waits for the snapshot in the main thread, because the simulator counts only what
    the main thread has seen.
    """
    go, finish = threading.Event(), staging.Landing.finish
    errors: list[BaseException] = []

    def late(self: staging.Landing) -> None:
        assert go.wait(60)
        if errors:
            raise errors[0]

    def let_go(handle: checkpoint.SaveHandle) -> None:
        try:
            finish(handle._landing)
        except checkpoint.CheckpointError as error:
            errors.append(error)
        go.set()

    staging.Landing.finish = late  # type: ignore[method-assign]
    try:
        yield let_go
    finally:
        go.set()
        staging.Landing.finish = finish  # type: ignore[method-assign]


def count_a_save(rank: int, world: int, folder: str) -> dict[str, Any]:
    import simgpu

    from fsdpc import _C

    run = Run(rank)
    run.step(0)
    checkpoint.save(f"{folder}/a", run.model, run.optimizer, async_=True).wait()
    run.step(1)
    stage = staging.staging_of(0)
    before, waits, pinned = stage.lane.counts(), _C.cuda_waits(0), stage.pinned_bytes
    with held_back() as let_go, simgpu.counting() as driver:
        handle = checkpoint.save(f"{folder}/b", run.model, run.optimizer, async_=True)
        run.optimizer.step()
        after, waited = stage.lane.counts(), _C.cuda_waits(0)
        let_go(handle)
        handle.wait()
    grown = {name: after[name] - before[name] for name in after}
    before = stage.lane.counts()
    checkpoint.save(f"{folder}/c", run.model, run.optimizer)
    saved = {name: value - before[name] for name, value in stage.lane.counts().items()}
    return {
        "async": grown,
        "host_syncs": waited - waits,
        "pageable": driver["pageable"],
        "new_pinned": driver["host_allocations"],
        "save": saved,
        "snapshot": pinned,
        "reports": simgpu.take_reports(),
    }


def test_counts(tmp_path: Path):
    found = run_ranks(count_a_save, 1, env=ON_GPU, folder=str(tmp_path))[0]
    print(found)
    # Copied: three values per element (value, two moments), 18 step counters, the norm's buffers.
    elements = 16 * 64 + 64 + 3 * (2 * 64 * 96 + 64 + 96) + 64 * 4 + 4 + 2 * 16
    assert found["async"]["bytes_out"] == 12 * elements + 18 * 4 + 2 * 16 * 4 + 8
    assert found["save"]["bytes_out"] == found["async"]["bytes_out"]
    # The current stream waits for the copies of buffers at once, and for the other copies before
    # the optimizer's step. The host never waits.
    assert {name: found["async"][name] for name in ("begins", "joins", "finishes")} == {
        "begins": 1,
        "joins": 2,
        "finishes": 0,
    }
    assert found["host_syncs"] == 0 and found["pageable"] == 0 and found["new_pinned"] == 0
    assert found["save"]["finishes"] == found["save"]["marks"] <= 4  # one per slot
    assert found["snapshot"] < found["async"]["bytes_out"] + (1 << 17)
    assert found["reports"] == []


# --- planted waits -------------------------------------------------------------------------------


def declare_writers() -> None:
    """Tell the simulator which pinned memory the host reads in a save or writes in a load."""
    import simgpu

    from fsdpc.checkpoint import loading
    from fsdpc.checkpoint.layout import MEMORY, NBYTES

    def told(function: Any, place: int, access: Any, what: bytes) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            rows = args[place].rows if hasattr(args[place], "rows") else args[place]
            for row in rows:
                pinned = row[MEMORY] and simgpu.cuda().simgpu_accessible(int(row[MEMORY]), 1, False)
                if pinned:
                    access(int(row[MEMORY]), int(row[NBYTES]), what)
            return function(*args, **options)

        return run

    library = simgpu.cuda()
    saving.write_job = told(saving.write_job, 0, library.simgpu_cpu_read, b"the writer")
    loading.read_table = told(loading.read_table, 1, library.simgpu_cpu_write, b"the reader")


_waits: dict[str, Any] = {"during": "", "left out": None}


def during(phase: str) -> None:
    _waits["during"] = phase


def round_of(run: Run, folder: str, name: str) -> None:
    """Run a step, a save, a step, a background save during a step, a load, and a step."""
    run.step(1)
    during("save")
    checkpoint.save(f"{folder}/{name}-now", run.model, run.optimizer)
    run.step(2)
    with held_back() as let_go:
        during("snapshot of buffers")
        handle = checkpoint.save(f"{folder}/{name}-later", run.model, run.optimizer, async_=True)
        during("snapshot")
        run.step(3)
        let_go(handle)
        handle.wait()
    during("load")
    checkpoint.load(f"{folder}/{name}-now", run.model, run.optimizer, verify="no")
    during("")
    run.step(4)


def leave_out_waits_of_lanes() -> None:
    """Replace the methods of Lane that wait, so that one of them can be left out.

    `_waits["left out"]` is a phase of the round and the name of a method. In this phase, calls of
    this method do nothing.
    """
    from fsdpc._companions.lane import Lane

    for name in ("begin", "join", "finish"):
        real = getattr(Lane, name)

        def call(self: Any, *args: Any, name: str = name, real: Any = real) -> Any:
            if (_waits["during"], name) == _waits["left out"]:
                return None
            return real(self, *args)

        setattr(Lane, name, call)


PLANTED = [
    ("save", "begin"),
    ("save", "finish"),
    ("snapshot of buffers", "begin"),
    ("snapshot of buffers", "join"),
    ("snapshot", "join"),
    ("snapshot", "finish"),
    ("load", "begin"),
    ("load", "join"),
    ("load", "finish"),
]


def leave_out_each(rank: int, world: int, folder: str) -> list[tuple[Any, list[str]]]:
    import simgpu
    from watch import Operators

    staging.SLOT_BYTES = 1 << 16  # several parts
    declare_writers()
    leave_out_waits_of_lanes()
    simgpu.policy("lazy")
    simgpu.options().quiet = True
    found = []
    # Freeing a run frees pinned memory, which waits for the GPU and could hide a missing wait.
    gc.disable()
    with Operators(everywhere=True):
        for number, planted in enumerate([None, *PLANTED]):
            run = Run(rank)
            gc.collect()
            run.step(0)
            assert simgpu.cuda().cuCtxSynchronize() == 0
            simgpu.take_reports()
            _waits["left out"] = planted
            # If step counts are copied too late, their values are wrong, and a step may raise.
            with suppress(OverflowError, RuntimeError) if planted else nullcontext():
                round_of(run, folder, str(number))
            _waits["left out"] = None
            assert simgpu.drain()
            found.append((planted, simgpu.take_reports()))
    return found


@pytest.mark.long
def test_each_wait_that_is_left_out_is_found(tmp_path: Path):
    found = run_ranks(leave_out_each, 1, env=ON_GPU, folder=str(tmp_path))[0]
    for planted, reports in found:
        print(f"{planted}: {(reports or ['-'])[0]}")
    assert found[0][1] == []
    assert [planted for planted, reports in found[1:] if not reports] == []


def write_without_a_step(rank: int, world: int, folder: str) -> str:
    run = Run(rank)
    run.step(0)
    with held_back() as let_go:
        handle = checkpoint.save(f"{folder}/torn", run.model, async_=True)
        with torch.no_grad():
            next(run.model.parameters()).zero_()
        let_go(handle)
        with pytest.raises(checkpoint.CheckpointError, match=r"handle\.join\(\)"):
            handle.wait()
    with held_back() as let_go:
        handle = checkpoint.save(f"{folder}/whole", run.model, async_=True)
        handle.join()
        with torch.no_grad():
            next(run.model.parameters()).fill_(3)
        let_go(handle)
        handle.wait()
    background.finish_running()
    return "done"


def test_writes_that_no_hook_tells(tmp_path: Path):
    assert run_ranks(write_without_a_step, 1, env=ON_GPU, folder=str(tmp_path)) == ["done"]
    assert not (tmp_path / "torn").exists() and (tmp_path / "whole" / "fsdpc.json").exists()

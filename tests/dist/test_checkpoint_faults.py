"""fsdpc.checkpoint when ranks die, fail or see a full disk: the last good checkpoint stays."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import build
from harness import die, run_ranks, signal_rank
from torch import nn

from fsdpc import checkpoint
from fsdpc.checkpoint import folders, saving

KILLS = int(os.environ.get("FSDPC_TEST_KILLS", "12"))
POINTS = ("create", "write", "sync", "finish", "header", "manifest", "publish", "end")


def filled(value: float, kind: str = "fsdpc") -> nn.Module:
    """A model whose every element is one number: a mix of two checkpoints shows."""
    model = build(kind)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def value_of(path: Path) -> float:
    """Of the checkpoint's every element; one process."""
    model = build("plain")
    assert checkpoint.load(path, model).verified
    found = {float(x) for p in model.parameters() for x in p.detach().reshape(-1)}
    assert len(found) == 1, f"a mix of checkpoints: {found}"
    return found.pop()


def save_until_killed(rank: int, world: int, path: str, first: int, victim: int, at: str) -> None:
    """`at`: a step's name, or the seconds after which the victim dies, wherever it is."""

    def reach(name: str) -> None:
        if rank == victim and name == at:
            die()

    model = filled(first)
    checkpoint.save(Path(path) / "a", model, overwrite=True)
    if at.replace(".", "").isdigit() and rank == victim:
        signal_rank(victim, signal.SIGKILL, float(at))
    real = saving.write_plan
    checkpoint.write_plan = lambda plan, ranks, **options: real(plan, ranks, failpoint=reach)
    deadline = time.monotonic() + 20
    value = first
    while time.monotonic() < deadline:
        value += 1
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        checkpoint.save(Path(path) / "a", model, overwrite=True)


def cases() -> list[tuple[int, str]]:
    rng = random.Random(os.environ.get("FUZZ_SEED", "1"))
    steps = [(victim, at) for at in POINTS for victim in (0, 1)]
    steps = [(v, at) for v, at in steps if v == 0 or at in ("create", "write", "sync", "finish")]
    times = [(rng.randrange(2), f"{rng.uniform(0, 0.1):.4f}") for _ in range(KILLS - len(steps))]
    return steps[:KILLS] + times


def test_killed_ranks_leave_a_complete_checkpoint(tmp_path: Path):
    value = 0.0
    for victim, at in cases():
        arguments = {"path": str(tmp_path), "first": int(value) + 1, "victim": victim, "at": at}
        outcomes = run_ranks(save_until_killed, 2, faults=True, **arguments)
        assert outcomes[victim].exit_signal == signal.SIGKILL, (victim, at, outcomes[victim].error)
        survivor = outcomes[1 - victim]
        assert survivor.error_types[:1] == ("CheckpointError",), (victim, at, survivor.error)
        assert "rank" in survivor.error
        found = value_of(tmp_path / "a")
        assert found >= int(value) + 1, (victim, at)
        value = found
    checkpoint.save(tmp_path / "a", build("plain"), overwrite=True)
    folders.finish_removing()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]  # leftovers are gone


def save_with_fault(rank: int, world: int, path: str, fault: str, async_: bool) -> str:
    checkpoint.save(Path(path) / "a", filled(1.0))
    if rank == 1 and fault == "write":
        real = saving.write_job

        def broken(job: Any, **options: Any) -> Any:
            real(job, **options)
            raise OSError(errno.EIO, "Input/output error", str(job.path))

        saving.write_job = broken
    if rank == 0 and fault == "space":

        def full(fd: int, nbytes: int, file: Path) -> None:
            raise OSError(errno.ENOSPC, f"No space left on device: {nbytes} bytes for {file}")

        folders._allocate = full
    with pytest.raises(checkpoint.CheckpointError) as error:
        handle = checkpoint.save(Path(path) / "a", filled(2.0), overwrite=True, async_=async_)
        if handle is not None:
            handle.wait()
    return str(error.value)


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize(
    ("fault", "rank", "text"),
    [("write", 1, "Input/output error"), ("space", 0, "No space left")],
)
def test_a_failing_write_is_raised_on_all_ranks(
    tmp_path: Path, fault: str, rank: int, text: str, async_: bool
):
    texts = run_ranks(save_with_fault, 2, path=str(tmp_path), fault=fault, async_=async_)
    for found in texts:
        assert f"rank {rank} (" in found and text in found and "model-00001-of-00001" in found
    assert value_of(tmp_path / "a") == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def save_too_much(rank: int, world: int, path: str) -> str:
    """RLIMIT_FSIZE makes writes fail as a full disk does, after the space was promised."""
    import resource

    checkpoint.save(Path(path) / "a", filled(1.0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 + 500, resource.RLIM_INFINITY))
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.save(Path(path) / "a", filled(2.0), overwrite=True)
    return str(error.value)


def test_a_file_that_cannot_grow(tmp_path: Path):
    texts = run_ranks(save_too_much, 2, path=str(tmp_path))
    assert all("File too large" in text and "rank 0" in text for text in texts)
    assert value_of(tmp_path / "a") == 1.0


def save_different(rank: int, world: int, path: str, what: str) -> str:
    model = filled(1.0)
    extra = {"bad": object()} if what == "extra" and rank == 1 else None
    if what == "path" and rank == 1:
        path += "-other"
    if what == "model" and rank == 1:
        model.register_buffer("more", torch.zeros(3))
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.save(path, model, extra=extra)
    return str(error.value)


@pytest.mark.parametrize(("what", "text"), [
    ("extra", r"rank 1 \("),
    ("path", "rank 1 has another path than rank 0"),
    ("model", "rank 1 has another names, shapes or dtypes"),
])  # fmt: skip
def test_ranks_that_differ_write_nothing(tmp_path: Path, what: str, text: str):
    import re

    for found in run_ranks(save_different, 2, path=str(tmp_path / "a"), what=what):
        assert re.search(text, found), found
    assert not list(tmp_path.iterdir())


def train_while_saving(rank: int, world: int, path: str) -> list[float]:
    from toys import loss_of, tokens

    model = build("fsdpc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = checkpoint.Checkpointer(path, keep=2, async_=True)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        run.save(step, model, optimizer, extra={"step": step})
    run.wait()
    return losses


def go_on(rank: int, world: int, path: str, step: int) -> list[float]:
    from toys import loss_of, tokens

    model = build("fsdpc-flat")
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    found = checkpoint.load(Path(path) / f"step-{step:06d}", model, optimizer)
    assert found.extra == {"step": step}
    losses = []
    for later in range(step + 1, 6):
        optimizer.zero_grad()
        loss = loss_of(model, tokens(rank, later))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_goes_on_from_a_save_in_the_background(tmp_path: Path):
    losses = run_ranks(train_while_saving, 2, path=str(tmp_path))
    again = run_ranks(go_on, 2, path=str(tmp_path), step=4)
    assert [own[5:] for own in losses] == again


TMPFS = """
set -e
mount -t tmpfs -o size=1m none "$1"
exec "$2" - "$1" <<'PYTHON'
import sys
from pathlib import Path
import torch
from fsdpc import checkpoint

where, model = Path(sys.argv[1]) / "a", torch.nn.Linear(400, 400)
checkpoint.save(where, model)
before = model.weight.detach().clone()
torch.nn.init.zeros_(model.weight)
for async_ in (False, True):
    try:
        handle = checkpoint.save(where, model, overwrite=True, async_=async_)
        handle.wait()
    except checkpoint.CheckpointError as error:
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError("a full disk was not noticed")
assert [path.name for path in where.parent.iterdir()] == ["a"]
checkpoint.load(where, model)
assert torch.equal(model.weight, before)
print("the old one is there")
PYTHON
"""


def test_a_full_file_system(tmp_path: Path):
    can = subprocess.run(["unshare", "-rm", "true"], capture_output=True)
    if can.returncode:
        pytest.skip("no mount namespace of one's own here")
    command = ["unshare", "-rm", "sh", "-c", TMPFS, "sh", str(tmp_path), sys.executable]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "the old one is there\n", ended.stderr

"""The last good checkpoint stays when ranks die or fail, or when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import build
from harness import die, run_ranks, signal_rank
from torch import nn

from fsdpc import checkpoint, optim
from fsdpc.checkpoint import background, folders, loading, saving, write
from fsdpc.checkpoint.ranks import Step, ranks_of

KILLS = int(os.environ.get("FSDPC_TEST_KILLS", "12"))
POINTS = ("create", "write", "sync", "finish", "header", "manifest", "publish", "end")


def filled(value: float, kind: str = "fsdpc") -> nn.Module:
    """Return a model whose elements all equal `value`, to detect a mixture of two checkpoints."""
    model = build(kind)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def value_of(path: Path) -> float:
    """Return the value that all elements of a checkpoint have, read by one process."""
    model = build("plain")
    assert checkpoint.load(path, model).verified
    found = {float(x) for p in model.parameters() for x in p.detach().reshape(-1)}
    assert len(found) == 1, f"a mix of checkpoints: {found}"
    return found.pop()


class Position:
    """The position of a data loader."""

    value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def value_of_all(path: Path) -> float:
    """Return the value that all elements of several objects in one checkpoint have."""
    models, position = {name: build("plain") for name in ("model", "ema")}, Position()
    loaded = checkpoint.load(path, models, states={"data": position})
    assert loaded.verified and loaded.step == position.value
    params = [param for model in models.values() for param in model.parameters()]
    found = {float(x) for param in params for x in param.detach().reshape(-1)}
    assert found == {position.value}, f"a mix of checkpoints: {found}, {position.value}"
    return position.value


def save_until_killed(
    rank: int, world: int, path: str, first: int, victim: int, at: str, several: bool
) -> None:
    """Save again and again, until `victim` dies.

    If `at` is the name of a step of a save, the victim dies at this step. If `at` is a number, the
    victim dies after so many seconds, at whichever step it has reached.
    """

    def reach(name: str) -> None:
        if rank == victim and name == at:
            die()

    model, position = filled(first), Position()
    objects = {"model": model, "ema": filled(first)} if several else {"": model}
    target = Path(path) / "ab"[several]

    def save(value: float) -> None:
        position.value = value
        what = {"states": {"data": position}, "step": int(value)} if several else {}
        checkpoint.save(target, objects if several else model, overwrite=True, **what)

    save(first)
    if at.replace(".", "").isdigit() and rank == victim:
        signal_rank(victim, signal.SIGKILL, float(at))
    real = saving.write_plan
    checkpoint.write_plan = lambda plan, ranks, **options: real(plan, ranks, failpoint=reach)
    deadline = time.monotonic() + 20
    value = first
    while time.monotonic() < deadline:
        value += 1
        with torch.no_grad():
            for param in (param for each in objects.values() for param in each.parameters()):
                param.fill_(value)
        save(value)


def cases() -> list[tuple[int, str]]:
    rng = random.Random(os.environ.get("FUZZ_SEED", "1"))
    steps = [(victim, at) for at in POINTS for victim in (0, 1)]
    steps = [(v, at) for v, at in steps if v == 0 or at in ("create", "write", "sync", "finish")]
    times = [(rng.randrange(2), f"{rng.uniform(0, 0.1):.4f}") for _ in range(KILLS - len(steps))]
    found = steps[:KILLS] + times
    rng.shuffle(found)
    return found


@pytest.mark.long
def test_killed_ranks_leave_a_complete_checkpoint(tmp_path: Path):
    """A rank that is killed during a save leaves the old checkpoint or the new one.

    Every second case saves several objects. The checkpoint must have the new version of all objects
    or of none.
    """
    value = 0.0
    for number, (victim, at) in enumerate(cases()):
        several = number % 2 == 1
        arguments = {"path": str(tmp_path), "first": int(value) + 1, "victim": victim, "at": at}
        arguments["several"] = several
        outcomes = run_ranks(save_until_killed, 2, faults=True, **arguments)
        assert outcomes[victim].exit_signal == signal.SIGKILL, (victim, at, outcomes[victim].error)
        survivor = outcomes[1 - victim]
        assert survivor.error_types[:1] == ("CheckpointError",), (victim, at, survivor.error)
        assert "rank" in survivor.error
        found = value_of_all(tmp_path / "b") if several else value_of(tmp_path / "a")
        assert found >= int(value) + 1, (victim, at)
        value = found
    for name in "ab":
        checkpoint.save(tmp_path / name, build("plain"), overwrite=True)
    folders.finish_removing()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]  # leftovers are gone


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
    """Save under an RLIMIT_FSIZE below a file's size: the file cannot grow, as on a full disk."""
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
    for found in run_ranks(save_different, 2, path=str(tmp_path / "a"), what=what):
        assert re.search(text, found), found
    assert not list(tmp_path.iterdir())


def load_while_replaced(rank: int, world: int, path: str) -> tuple[set[float], set[float], str]:
    """Load while a checkpoint changes.

    First, the checkpoint is replaced after rank 0 opened it and before rank 1 opens it. Then, a bit
    flips during one read of rank 1. This read gets one scale of 8-bit optimizer states; another
    rank owns this scale.
    """
    folder, real_open, real_read = Path(path), loading.open_any, loading.read_table

    def late(target: Path, **options: Any) -> Any:
        dist.barrier()  # rank 0 has opened the checkpoint
        loading.open_any = real_open
        os.rename(folder / "a", folder / "old")
        os.rename(folder / "b", folder / "a")
        return real_open(target, **options)

    def early(target: Path, **options: Any) -> Any:
        found = real_open(target, **options)
        dist.barrier()
        loading.open_any = real_open
        return found

    both = []
    for name in ("a", "plain"):
        if rank == 0 and name == "plain":
            for which in ("old", "a"):  # without checksums
                (folder / which / "fsdpc.json").unlink()
                shutil.rmtree(folder / which / "fsdpc")
            os.rename(folder / "a", folder / "b")
            os.rename(folder / "old", folder / "a")
        dist.barrier()
        loading.open_any = late if rank == 1 else early
        model = filled(0.0)
        checkpoint.load(folder / "a", model)
        both.append({float(x) for p in model.parameters() for x in p.detach().reshape(-1)})

    model = build("fsdpc", nn.Linear(100, 77))
    optimizer = optim.AdamW8bit(model.parameters(), min_8bit_size=1)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    checkpoint.save(folder / "c", model, optimizer)

    def flipped(file: Any, rows: Any) -> Any:
        lent = rank == 1 and len(rows) == 1 and rows[0, 0] and rows[0, write.NBYTES] <= 4
        if not lent:
            return real_read(file, rows)
        with open(file.path, "r+b", buffering=0) as held:
            at = int(rows[0, write.OFFSET])
            byte = os.pread(held.fileno(), 1, at)
            os.pwrite(held.fileno(), bytes([byte[0] ^ 1]), at)
            found = real_read(file, rows)
            os.pwrite(held.fileno(), byte, at)
        return found

    loading.read_table = flipped
    _, text = told(lambda: checkpoint.load(folder / "c", model, optimizer))
    loading.read_table = real_read
    return both[0], both[1], text


def test_ranks_load_one_checkpoint_and_compare_every_byte(tmp_path: Path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        model = build("plain")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(value)
        checkpoint.save(tmp_path / name, model)
    for first, second, text in run_ranks(load_while_replaced, 2, path=str(tmp_path)):
        assert first == second == {2.0}
        assert "scales' is damaged" in text and "must not be used" in text, text


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


@pytest.mark.long
def test_a_full_file_system(tmp_path: Path):
    can = subprocess.run(["unshare", "-rm", "true"], capture_output=True)
    if can.returncode:
        pytest.skip("no mount namespace of one's own here")
    command = ["unshare", "-rm", "sh", "-c", TMPFS, "sh", str(tmp_path), sys.executable]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "the old one is there\n", ended.stderr


# --- interrupted ranks, lost hosts, a second save ------------------------------------------------


def told(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the type of the exception that a call raises, and its text followed by its notes."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001  Ctrl-C, too
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "", ""


def at_step(name: str, act: Callable[[], object], *, after: bool = False) -> None:
    """Call `act` once when a save of this rank reaches the step `name`.

    With `after`, `act` is also called when a save ends.
    """
    real, calls = saving.write_plan, []

    def reach(reached: str) -> None:
        if reached == name and not calls:
            calls.append(1)
            act()

    def write(plan: Any, ranks: Any, **options: Any) -> None:
        inner = options.pop("failpoint", None) or (lambda name: None)
        real(plan, ranks, failpoint=lambda name: (inner(name), reach(name)), **options)
        if after:
            act()

    checkpoint.write_plan = background.write_plan = write


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupt_in_message(rank: int, folder: Path) -> None:
    """Send Ctrl-C to rank 1 while it waits for a message of rank 0."""
    if rank == 0:

        def stay_away() -> None:
            until = time.monotonic() + 1.0  # over a wire, Ctrl-C does not end a wait for a message
            while time.monotonic() < until and not (folder / ".over").exists():
                time.sleep(0.01)

        at_step("write", stay_away)
        return
    real, came = Step.__exit__, []

    def leave(step: Step, *error: Any) -> bool:
        if came:
            signal_rank(1, signal.SIGINT, 0.1)
        try:
            return real(step, *error)
        except KeyboardInterrupt:
            Step.__exit__ = real
            (folder / ".over").touch()
            raise

    Step.__exit__ = leave  # type: ignore[method-assign]
    at_step("sync", lambda: came.append(1))


def interrupt(rank: int, world: int, path: str, at: str) -> list[Any]:
    """Send Ctrl-C to rank 1, which catches the exception and saves again."""
    target, model = Path(path) / "a", filled(1.0)
    checkpoint.save(target, model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    if at == "wait":
        gone = threading.Event()
        at_step("write", lambda: gone.wait(60)) if rank == 1 else None
        handle = checkpoint.save(target, model, overwrite=True, async_=True)
        if rank == 1:
            signal_rank(1, signal.SIGINT, 0.1)
        outcome = told(handle.wait)
        gone.set()
    elif at in ("verify", "read"):
        real = loading.read_table

        def read(file: Path, rows: Any) -> Any:
            if rank == 1 and bool(rows[:, 0].any()) == (at == "read"):
                ctrl_c()
            return real(file, rows)

        loading.read_table = read
        outcome = told(lambda: checkpoint.load(target, model))
        loading.read_table = real
    else:
        if at == "message":
            interrupt_in_message(rank, Path(path))
        elif rank == 1 and at == "between steps":
            real_ranges = saving._write_ranges
            saving._write_ranges = lambda *arguments: (real_ranges(*arguments), ctrl_c())
        elif rank == 1:
            at_step(at, ctrl_c)
        outcome = told(lambda: checkpoint.save(target, model, overwrite=True))
    values = {float(x) for p in model.parameters() for x in p.detach().reshape(-1)}
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3.0)
    again = told(lambda: checkpoint.save(target, model, overwrite=True))
    return [*outcome, values, *again]


@pytest.mark.parametrize("wire", ["shm", "wire"])
@pytest.mark.parametrize("at", ["write", "message", "between steps", "verify", "read", "wait"])
def test_ctrl_c(tmp_path: Path, at: str, wire: str):
    """The interrupted rank raises KeyboardInterrupt, and the other rank raises at once.

    The error of the other rank says what happened. If SaveHandle.wait is interrupted, the other
    rank raises nothing. Later saves work, or raise if ranks were in the middle of a message.
    """
    began = time.monotonic()
    env = {"FSDPC_COLLECTIVES": wire}
    (other, why, _, other_then, why_then), (own, note, values, then, said) = run_ranks(
        interrupt, 2, path=str(tmp_path), at=at, env=env
    )
    assert time.monotonic() - began < 25, "a rank has waited for its deadline"
    assert own == "KeyboardInterrupt"
    if at == "wait":
        assert other == "", why
    else:
        assert other == "CheckpointError" and "rank 1" in why, why
    if at in ("message", "between steps"):
        assert (then, other_then) == ("CheckpointError", "CheckpointError")
        assert "KeyboardInterrupt has ended an earlier save" in said, said
        assert "KeyboardInterrupt" in why_then or wire == "wire", why_then
        assert value_of(tmp_path / "a") in (1.0, 2.0)  # 2.0 if all bytes were written before Ctrl-C
        return
    assert (then, other_then) == ("", ""), (said, why_then)
    assert value_of(tmp_path / "a") == 3.0
    if at == "verify":
        assert values == {2.0}, "the model was not to be touched"
    if at == "read":
        assert "so the model must not be used" in note and "so the model must not be used" in why
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".old-")}
    assert left == {"a"}


def lose_one_at_first(rank: int, world: int, path: str, kind: str) -> tuple[str, str]:
    model = filled(1.0, kind)
    if kind == "plain":  # the ranks have used torch's collectives, but none of fsdpc's
        dist.barrier()
    if rank == 1:
        die()
    return told(lambda: (checkpoint.save if kind == "fsdpc" else checkpoint.load)(path, model))


@pytest.mark.parametrize("kind", ["fsdpc", "plain"])
def test_a_rank_that_dies_before_the_first_save_or_load(tmp_path: Path, kind: str):
    """If a rank dies before the first save or load, the other ranks raise without a long wait.

    In an earlier version, the other ranks waited until the timeout of a new process group, and the
    error named no rank.
    """
    began, env = time.monotonic(), {"FSDPC_TIMEOUT": "100"}
    first, *_ = run_ranks(
        lose_one_at_first, 3, faults=True, env=env, path=str(tmp_path / "a"), kind=kind
    )
    assert time.monotonic() - began < 50, "a rank has waited for its deadline"
    error, text = first.value
    assert error == "CheckpointError", text
    assert re.search(r"rank 1 \(pid \d+\)" if kind == "fsdpc" else "closed|reset", text), text


def lose_a_host(rank: int, world: int, path: str, how: str, async_: bool) -> tuple[str, str]:
    ranks = ranks_of(None)
    ranks.hosts, ranks.host = ["near", "far"], int(rank > 0)
    checkpoint.save(Path(path) / "a", filled(1.0))
    if rank > 0:
        number = signal.SIGKILL if how == "dies" else signal.SIGSTOP
        at_step("write", lambda: (signal_rank(rank, number), time.sleep(60)))

    def save() -> None:
        handle = checkpoint.save(Path(path) / "a", filled(2.0), overwrite=True, async_=async_)
        if handle is not None:
            handle.wait()

    return told(save)


@pytest.mark.parametrize(("how", "async_"), [("dies", True), ("stops", False), ("stops", True)])
def test_a_host_that_is_lost(tmp_path: Path, how: str, async_: bool):
    """Both ranks of another host die or stop while they save over a wire.

    Rank 0 raises an error that names a lost rank, at the latest at the deadline.
    """
    env = {"FSDPC_COLLECTIVES": "wire", "FSDPC_TIMEOUT": "2"}
    arguments = {"path": str(tmp_path), "how": how, "async_": async_}
    first, *_ = run_ranks(lose_a_host, 3, faults=True, env=env, **arguments)
    kind, text = first.value
    assert kind == "CheckpointError"
    closed = r"the connection to rank [12] \(process \d+ on host .*\) is closed"
    assert re.search(closed if how == "dies" else "the cause: ranks 1-2 .*are stopped", text), text
    assert value_of(tmp_path / "a") == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def save_twice(rank: int, world: int, path: str) -> tuple[bool, str]:
    """Start a second save when rank 0 has done the first save and rank 1 is still in it."""
    go = threading.Event()
    if rank == 1:
        at_step("", lambda: go.wait(60), after=True)
    handle = checkpoint.save(Path(path) / "a", filled(1.0), async_=True)
    if rank == 0:
        handle.wait()
    model = filled(2.0)
    _, text = told(lambda: checkpoint.save(f"{path}/b", model, async_=True, when_busy="raise"))
    done = handle.done
    go.set()
    run = checkpoint.Checkpointer(path, when_busy="wait", async_=True)
    run.save(1, model)
    run.save(2, model)
    run.wait()
    assert run.steps() == [1, 2]
    return done, text


def test_a_second_save_waits_or_is_refused_on_all_ranks(tmp_path: Path):
    for rank, (done, text) in enumerate(run_ranks(save_twice, 2, path=str(tmp_path))):
        assert done is (rank == 0)
        assert "rank 1 (" in text and "a is still being written" in text, text
    assert value_of(tmp_path / "a") == 1.0
    assert not (tmp_path / "b").exists()


def save_with_a_bar(rank: int, world: int, path: str) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        checkpoint.save(f"{path}/quiet", filled(1.0))
        assert not shown.getvalue()
        checkpoint.save(f"{path}/now", filled(1.0), progress=True)
        checkpoint.save(f"{path}/later", filled(1.0), progress=True, async_=True).wait()
        run = checkpoint.Checkpointer(f"{path}/run", progress=True)
        run.save(1, filled(1.0))
    return shown.getvalue()


def test_a_progress_bar_is_shown_by_rank_0_if_it_is_asked_for(tmp_path: Path):
    pytest.importorskip("tqdm")
    first, *others = run_ranks(save_with_a_bar, 3, path=str(tmp_path))
    assert others == ["", ""]
    for name in ("now", "later", "step-000001"):
        assert re.search(f"{name}: 100%", first), first

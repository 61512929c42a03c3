"""Tests of fsdpc.checkpoint in programs as people write them: wrapped and compiled models, averages
of a model's weights, gradient accumulation, evaluation during training, and preemption.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import build
from harness import run_ranks
from test_checkpoint_elastic import loss, tensors_of
from test_checkpoint_faults import filled
from torch import nn
from toys import full_parameters, loss_of, tokens, toy, wrap

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import background, loading

LOADED_BY_RANKS = ["torch._inductor.compile_fx"]  # imported once before the ranks are forked


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wrapped(kind: str, seed: int) -> nn.Module:
    """Return a model inside of other wrappers."""
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(toy(seed))
    if kind == "compiled part":
        model = toy(seed)
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        return wrap("fsdpc", model)
    return torch.compile(build(kind.removeprefix("compiled "), toy(seed)), backend="eager")


def save_wrapped(rank: int, world: int, path: str, kind: str) -> float:
    model = wrapped(kind, 1)
    optimizer = adamw(model)
    loss_of(model, tokens(rank, 0)).backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer)
    again = wrapped(kind, 2)
    checkpoint.load(path, again, adamw(again))
    assert loss(again) == loss(model)
    return loss(model)


def load_bare(rank: int, world: int, path: str) -> float:
    model = build("fsdpc", toy(3))
    checkpoint.load(path, model, adamw(model))
    return loss(model)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["DDP", "compiled part", "compiled fsdpc-flat", "compiled fsdp2"])
def test_wrappers_leave_no_trace_in_names(tmp_path: Path, kind: str):
    path = str(tmp_path / "a")
    losses = run_ranks(save_wrapped, 2, path=path, kind=kind)
    names = {name for name in tensors_of(path) if not name.startswith("state.")}
    assert names == set(toy().state_dict())
    assert set(losses) == set(run_ranks(load_bare, 1, path=path))


def average(rank: int, world: int, path: str) -> None:
    model = build("fsdpc", toy(1))
    both = nn.ModuleDict({"model": model, "average": copy.deepcopy(model)})
    optimizer = adamw(model)
    loss_of(model, tokens(rank, 0)).backward()
    optimizer.step()
    checkpoint.save(path, both, optimizer)
    model = build("fsdpc-flat", toy(2))
    again = nn.ModuleDict({"model": model, "average": copy.deepcopy(model)})
    checkpoint.load(path, again, adamw(model))
    for name in both:
        expected = full_parameters(both[name])
        for key, value in full_parameters(again[name]).items():
            assert torch.equal(value, expected[key]), (name, key)


def test_an_average_beside_the_model(tmp_path: Path):
    run_ranks(average, 2, path=str(tmp_path / "a"))


def without_memory(rank: int, world: int, path: str) -> None:
    with torch.device("meta"):
        model = toy(1)
    fsdpc.fully_shard(model)
    checkpoint.save(path, build("fsdpc"))
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(checkpoint.CheckpointError, match="on the meta device, .*to_empty"):
            call(path, model)
    model.to_empty(device="cpu")
    checkpoint.load(path, model)
    assert loss(model) == loss(build("fsdpc"))


def test_a_model_without_memory(tmp_path: Path):
    """Save and load of a model on the meta device raise an error that tells what to do.

    In an earlier version, the error was "Cannot copy out of meta tensor".
    """
    run_ranks(without_memory, 2, path=str(tmp_path / "a"))


def end_at_once(rank: int, world: int, path: str) -> None:
    model = build("fsdp2", toy())
    checkpoint.save(path, model, async_=True)
    threading._shutdown()  # the interpreter calls this when it exits, which ends thread pools


def test_a_program_that_ends_behind_a_save_in_the_background(tmp_path: Path):
    """A save in the background is completed even if the program ends first.

    In an earlier version, the save raised "cannot schedule new futures after interpreter shutdown".
    """
    run_ranks(end_at_once, 2, path=str(tmp_path / "a"))
    checkpoint.load(tmp_path / "a", build("plain", toy(1)))


def end_by_an_error(rank: int, world: int, path: str) -> None:
    write = background.write_plan

    def late(*arguments: Any, **more: Any) -> None:
        time.sleep(0.2)
        write(*arguments, **more)

    background.write_plan = late
    handle = checkpoint.save(path, build("fsdp2", toy()), async_=True)
    if rank == 1:
        sys.excepthook(ValueError, ValueError("boom"), None)
    handle.wait()


def test_an_error_that_ends_a_program_lets_a_save_in_the_background_end_first(tmp_path: Path):
    """The checkpoint is complete if a rank ends by an error during a background save.

    In an earlier version, the other ranks got the error at once, also through the communicator of
    the save. No checkpoint was written.
    """
    run_ranks(end_by_an_error, 2, path=str(tmp_path / "a"))
    checkpoint.load(tmp_path / "a", build("plain", toy(1)))


def accumulate(rank: int, world: int, path: str) -> None:
    """Check that a save between two micro-batches changes nothing.

    A checkpoint has no gradients. A program that loads a checkpoint therefore repeats the step from
    its first micro-batch.
    """

    def micro(model: nn.Module, number: int) -> None:
        loss_of(model, tokens(rank, 0, number)).backward()

    def make(seed: int) -> tuple[Any, Any, Any]:
        model = build("fsdpc", toy(seed))
        optimizer = adamw(model)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    position = {"step": 0, "micro": 1, "random": torch.get_rng_state()}
    ends = []
    for save in (False, True):
        model, optimizer, scheduler = make(1)
        with model.no_sync():
            micro(model, 0)
        if save:
            checkpoint.save(path, model, optimizer, scheduler, extra=position)
        micro(model, 1)
        optimizer.step()
        scheduler.step()
        ends.append(full_parameters(model))
    model, optimizer, scheduler = make(2)
    micro(model, 7)  # a load keeps these gradients: the program must clear them, as below
    found = checkpoint.load(path, model, optimizer, scheduler)
    assert found.extra["micro"] == 1 and torch.equal(found.extra["random"], position["random"])
    optimizer.zero_grad()
    with model.no_sync():
        micro(model, 0)
    micro(model, 1)
    optimizer.step()
    scheduler.step()
    ends.append(full_parameters(model))
    assert scheduler.last_epoch == 1
    for end in ends[1:]:
        assert all(torch.equal(end[name], value) for name, value in ends[0].items())


def test_a_save_in_the_middle_of_accumulation(tmp_path: Path):
    run_ranks(accumulate, 2, path=str(tmp_path / "a"))


def another_head(rank: int, world: int, path: str) -> None:
    model = toy(2)
    width = model.head.in_features
    model.head = nn.Linear(width, 5)
    with pytest.raises(checkpoint.CheckpointError, match="give a new head another name"):
        checkpoint.load(path, build("fsdpc", model), strict=False)
    model = toy(2)
    del model.head
    model.score = nn.Linear(width, 5)
    kept = model.score.weight.detach().clone()
    sharded = build("fsdpc", model)
    found = checkpoint.load(path, sharded, strict=False)
    assert sorted(found.missing) == ["score.bias", "score.weight"]
    assert sorted(found.unexpected) == ["head.bias", "head.weight"]
    values = full_parameters(sharded)
    assert torch.equal(values["score.weight"], kept)
    assert torch.equal(values["embed.weight"], toy(1).embed.weight)


def test_fine_tuning_with_another_head(tmp_path: Path):
    from safetensors.torch import save_file

    save_file(dict(toy(1).state_dict()), tmp_path / "model.safetensors", {"format": "pt"})
    run_ranks(another_head, 3, path=str(tmp_path))


class Adapted(nn.Module):
    """A frozen layer with a trainable low-rank update."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base = inner.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, inner.in_features))
        self.lora_b = nn.Parameter(torch.randn(inner.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()


def adapted(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = toy(1).requires_grad_(False)
    torch.manual_seed(seed)
    for block in model.blocks:
        block.up = Adapted(block.up)
    model = build("fsdpc", model)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def adapters(rank: int, world: int, path: str, save: bool) -> list[float]:
    """Save only the weights and moments of adapters, or load them into a whole model."""
    model, optimizer = adapted(1 if save else 2)
    if save:
        loss_of(model, tokens(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(path, model, optimizer, only="*lora_*")
    else:
        found = checkpoint.load(path, model, optimizer, only="*lora_*")
        assert not found.missing and not found.unexpected
        flat = build("fsdpc-flat")
        checkpoint.save(f"{path}-flat", flat, adamw(flat))
        with pytest.raises(checkpoint.CheckpointError, match="which share a flat parameter"):
            checkpoint.load(f"{path}-flat", flat, adamw(flat), only="*.weight")
    first = loss(model)
    loss_of(model, tokens(0, 1)).backward()
    optimizer.step()
    return [first, loss(model)]


def test_adapters_alone(tmp_path: Path):
    path = str(tmp_path / "a")
    expected = run_ranks(adapters, 1, path=path, save=True)[0]
    names = {name for name in tensors_of(path) if not name.startswith("state.")}
    assert names and all(".lora_" in name for name in names)
    for found in run_ranks(adapters, 3, path=path, save=False):
        assert found[0] == expected[0] and found[1] == pytest.approx(expected[1])


def damaged(*_: Any) -> None:
    raise checkpoint.CheckpointError("a tensor is damaged")


def differ(rank: int, world: int, path: str, kind: str) -> str:
    model = build("fsdpc", toy(2))
    options: dict[str, Any] = {"only": "head.*" if rank else "*.weight"}
    if kind == "rename":
        names = ["blocks.0.up.weight", "blocks.1.up.weight"]
        options = {"rename": dict(zip(names, names[::-1], strict=True)) if rank else None}
    if kind == "damaged":
        path, options = f"{path}-{kind}", {"verify": "during"}
        checkpoint.save(path, model)
    before = full_parameters(model)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "damaged" and rank == 1:
            patch.setattr(loading, "_compare", damaged)
        with pytest.raises(checkpoint.CheckpointError) as raised:
            checkpoint.load(path, model, **options)
    after = full_parameters(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    checkpoint.load(path, model)  # this load works only if no rank still waits in the failed load
    return str(raised.value)


@pytest.mark.parametrize("kind", ["only", "rename", "damaged"])
def test_ranks_that_load_other_tensors(tmp_path: Path, kind: str):
    torch.save(toy(1).state_dict(), tmp_path / "a.pt")
    texts = run_ranks(differ, 2, path=str(tmp_path / "a.pt"), kind=kind)
    assert texts[0] == texts[1]
    assert ("tensor is damaged; the" if kind == "damaged" else "rank 1 loads other") in texts[0]


def train_on(rank: int, world: int, path: str) -> None:
    run = checkpoint.Checkpointer(path, keep=2, async_=True)
    model = filled(0.0)
    for step in range(1, 41):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        run.save(step, model)
    run.wait()


EVALUATE = """
import sys, time
sys.path[:0] = sys.argv[2:]
import torch
from toys import toy
from fsdpc import checkpoint
from fsdpc.checkpoint import loading
run, model, good, gone = checkpoint.Checkpointer(sys.argv[1], keep=2), toy(), 0, 0
print("ready", flush=True)
until = time.monotonic() + 60
while time.monotonic() < until and 40 not in run.steps():
    newest = run.latest()
    if newest is None:
        continue
    try:
        found = checkpoint.load(newest, model)
    except checkpoint.CheckpointError as error:
        assert not newest.exists(), error  # removed in the meantime
        gone += 1
        continue
    values = {float(x) for p in model.parameters() for x in p.detach().reshape(-1)}
    assert values == {float(found.step)} == {float(newest.name[5:])}, (newest, values)
    good += 1
assert run.resume(model).step == 40
print(good > 0)
"""


@pytest.mark.long
def test_evaluation_while_training_goes_on(tmp_path: Path):
    """Another process loads the checkpoint that `latest` names.

    Meanwhile, training changes `latest` and removes old checkpoints.
    """
    here = Path(__file__).parent
    command = [sys.executable, "-c", EVALUATE, str(tmp_path / "run"), str(here)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as evaluation:
        assert evaluation.stdout is not None
        assert evaluation.stdout.readline() == "ready\n"
        run_ranks(train_on, 2, path=str(tmp_path / "run"))
        assert evaluation.stdout.read() == "True\n"
    assert evaluation.returncode == 0
    left = {path.name for path in (tmp_path / "run").iterdir() if path.name[0] != "."}
    assert left == {"latest", "step-000039", "step-000040"}


def until_preempted(rank: int, world: int, path: str) -> int:
    """Train until SIGTERM, then save.

    SIGTERM reaches the ranks in different steps, so the ranks agree on the step of the save.
    """
    stop = torch.zeros(())
    signal.signal(signal.SIGTERM, lambda *_: stop.fill_(1))
    model = build("fsdpc")
    optimizer = adamw(model)
    run = checkpoint.Checkpointer(path, every=1000)
    for step in range(10_000):
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 + rank:
            os.kill(os.getpid(), signal.SIGTERM)
        stopping = stop.clone()
        dist.all_reduce(stopping, op=dist.ReduceOp.MAX)
        if stopping:
            run.save(step, model, optimizer, extra={"rank": rank}, force=True)
            break
        run.save(step, model, optimizer)
    return step


def test_preemption(tmp_path: Path):
    assert run_ranks(until_preempted, 2, path=str(tmp_path / "run")) == [2, 2]
    model = toy()
    found = checkpoint.Checkpointer(tmp_path / "run").resume(model, adamw(model))
    assert found is not None and found.step == 2
    assert found.extras == [{"rank": 0}, {"rank": 1}]

"""Tests of fsdpc.checkpoint on one rank: damaged and hostile files, retention, conversion, and the
command.
"""

from __future__ import annotations

import builtins
import copy
import ctypes
import enum
import errno
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import platform
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fsdpc.optim
from fsdpc import _C, checkpoint
from fsdpc._companions.lane import call_before_write
from fsdpc._companions.spans import blocks_of
from fsdpc.checkpoint import (
    background,
    cli,
    dcp_folder,
    folders,
    loading,
    manifest,
    priority,
    saving,
    staging,
    state_keys,
    torch_files,
    write,
)
from fsdpc.checkpoint.convert import convert
from fsdpc.checkpoint.opened import Opened
from fsdpc.checkpoint.verify import compare, verify

FUZZ_SECONDS = 3.0
LIBC = ctypes.CDLL(None)


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.two = nn.Linear(5, 3).bfloat16()
        self.scale = nn.Parameter(torch.tensor(float(seed)))


def trained(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 + seed)
    (model.norm(model.one(torch.randn(4, 7))).sum() * model.scale).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = trained()
    checkpoint.save(tmp_path / "saved", model, optimizer, extra={"position": 3}, step=5)
    return tmp_path / "saved"


def values(model: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Return copies of all values that a load could change."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    if optimizer is not None:
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": value.clone() for key, value in state.items()}
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- round trips ---------------------------------------------------------------------------------


def test_round_trip_and_other_readers(saved: Path):
    model, optimizer = trained(1)
    found = checkpoint.load(saved, model, optimizer)
    assert (found.step, found.extra, found.verified) == (5, {"position": 3}, True)
    assert same(values(model, optimizer), values(*trained()))
    assert optimizer.param_groups[0]["lr"] == 0.5
    for file in saved.rglob("*.safetensors"):
        with safe_open(str(file), "pt") as opened:
            assert opened.metadata()["format"] == "pt"
        assert os.stat(file).st_mode & 0o777 == 0o666 & ~current_umask()
    loaded = load_file(saved / "model-00001-of-00001.safetensors")
    assert same(loaded, dict(Net(0).state_dict() | trained()[0].state_dict()))
    assert not (list(saved.parent.glob(".new-*")) + list(saved.parent.glob(".old-*")))


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_scheduler_and_groups_in_another_order(tmp_path: Path):
    def make(order: int) -> tuple[Net, Any, Any]:
        model = Net(order)
        groups = [{"params": [model.one.weight, model.one.bias], "lr": 1.0 - order},
                  {"params": [model.scale], "lr": 2.0 + order}]  # fmt: skip
        optimizer = torch.optim.AdamW(groups[:: 1 - 2 * order])
        model.one(torch.ones(2, 7)).sum().backward()
        model.scale.grad = torch.ones(())
        optimizer.step()
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)

    model, optimizer, scheduler = make(0)
    scheduler.step()
    checkpoint.save(tmp_path / "a", model, optimizer, scheduler)
    other, other_optimizer, other_scheduler = make(1)
    checkpoint.load(tmp_path / "a", other, other_optimizer, other_scheduler)
    assert [group["lr"] for group in other_optimizer.param_groups] == [2.0, 1.0]
    assert other_scheduler.last_epoch == 1
    for name in ("exp_avg", "exp_avg_sq", "step"):
        for one, two in ((model.scale, other.scale), (model.one.weight, other.one.weight)):
            state = other_optimizer.state[two][name]
            assert torch.equal(optimizer.state[one][name], state)


@pytest.mark.parametrize("verify", ["before", "during"])
def test_tensors_without_elements(tmp_path: Path, verify: Any):
    model = nn.ParameterList([torch.ones(3), torch.empty(0, 4), torch.empty(0)])
    checkpoint.save(tmp_path / "a", model)
    model[0].data.zero_()
    assert checkpoint.load(tmp_path / "a", model, verify=verify).verified
    assert model[0].tolist() == [1, 1, 1]
    assert command("verify", tmp_path / "a") == 0


def test_any_named_tensors_of_an_optimizer(tmp_path: Path):
    """A checkpoint keeps states that are tensors of low precision, tensors of another shape than
    the parameter's, numbers and texts.
    """

    class Odd(torch.optim.SGD):
        def fill(self, seed: int) -> None:
            for param in self.param_groups[0]["params"]:
                self.state[param] = {
                    "codes": torch.full(param.shape, seed, dtype=torch.uint8),
                    "low": torch.full(param.shape, seed, dtype=torch.bfloat16),
                    "table": torch.arange(5.0) + seed,
                    "count": seed,
                    "kind": f"kind {seed}",
                }

    model = Net()
    optimizer, other = Odd(model.parameters(), lr=1), Odd(model.parameters(), lr=1)
    optimizer.fill(1)
    checkpoint.save(tmp_path / "a", model, optimizer)
    checkpoint.load(tmp_path / "a", model, other)
    for param in model.parameters():
        for key, value in optimizer.state[param].items():
            found = other.state[param][key]
            assert torch.equal(found, value) if torch.is_tensor(value) else found == value, key


@pytest.mark.parametrize("what", ["small pieces", "files"])
def test_other_ways_through_files(tmp_path: Path, what: str, monkeypatch: Any):
    """With small pieces or many files, digests and values are those of a plain save."""

    def wide(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(333, 101), nn.Linear(101, 3), nn.Linear(9, 1).half())

    checkpoint.save(tmp_path / "plain", wide(0))
    checkpoint.save(tmp_path / "plain-low", wide(0), dtype=torch.bfloat16)
    options: dict[str, Any] = {"file_bytes": 1000} if what == "files" else {}
    if what == "small pieces":
        monkeypatch.setattr(write, "_WAVE_BYTES", 5000)
        monkeypatch.setattr(loading, "_WAVE_BYTES", 5000)
    checkpoint.save(tmp_path / "other", wide(0), **options)
    checkpoint.save(tmp_path / "other-low", wide(0), dtype=torch.bfloat16, **options)
    files = list((tmp_path / "other").glob("model-0*"))
    assert len(files) == (4 if what == "files" else 1)
    assert compare(tmp_path / "plain", tmp_path / "other") == []
    assert compare(tmp_path / "plain-low", tmp_path / "other-low") == []
    for name in ("other", "other-low"):
        for how in ("before", "during", "no"):
            model = wide(1)
            checkpoint.load(tmp_path / name, model, cast=True, verify=how)
            for key, value in wide(0).state_dict().items():
                low = value.bfloat16().to(value.dtype) if name == "other-low" else value
                assert torch.equal(model.state_dict()[key], low), (name, how, key)


def test_tensors_that_are_not_contiguous(tmp_path: Path):
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 6))
        model[0].to(memory_format=torch.channels_last)
        model[1].weight.data = torch.randn(4, 6).t()
        return model

    source, target = make(0), make(1)
    checkpoint.save(tmp_path / "a", source)
    checkpoint.load(tmp_path / "a", target)
    assert same(values(target), values(source))
    assert target[1].weight.stride() == (1, 6)


# --- right or raises -----------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_every_flipped_bit_is_found_and_nothing_is_loaded(saved: Path, tmp_path: Path):
    model, optimizer = trained(1)
    before = values(model, optimizer)
    rng = random.Random(0)
    files = sorted(path for path in saved.rglob("*") if path.is_file())
    assert len(files) == 8
    for path in files:
        original = path.read_bytes()
        for bit in rng.sample(range(8 * len(original)), 12):
            flip(path, bit)
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.load(saved, model, optimizer)
            path.write_bytes(original)
        for cut in (0, 1, len(original) // 2, len(original) - 1):
            path.write_bytes(original[:cut])
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.load(saved, model, optimizer)
            path.write_bytes(original)
    assert same(values(model, optimizer), before)
    checkpoint.load(saved, model, optimizer)
    assert same(values(model, optimizer), values(*trained()))


def test_a_damaged_tensor_is_named(saved: Path, capsys: pytest.CaptureFixture[str]):
    file = saved / "model-00001-of-00001.safetensors"
    place = Opened(saved).model.where["one.bias"][1]
    flip(file, 8 * place.offset + 5)
    text = "tensor 'one.bias' is damaged"
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(saved, Net())
    with pytest.raises(checkpoint.CheckpointError, match=f"{text}.*must not be used"):
        checkpoint.load(saved, Net(), verify="during")
    checkpoint.load(saved, Net(), verify="no")
    assert [line.split(" in ")[0] for line in verify(saved).damaged] == ["one.bias"]
    assert command("verify", saved) == 1
    assert "damaged: one.bias" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["one.weight", "0.exp_avg", "two.bias", "0.step"])
@pytest.mark.parametrize("how", ["before", "during"])
def test_a_bit_that_flips_in_the_read_that_feeds_the_model(
    saved: Path, monkeypatch: Any, name: str, how: str
):
    """The bit flips in the read that gives values to the model. With "before", all checksums have
    been compared before this read, without an error.
    """
    found, read = Opened(saved), loading.read_table
    where = found.model.where
    if name[0] == "0":
        name, where = f"state.scale.{name[2:]}", found.sets["optimizer"].where
    file, place = where[name]

    def read_wrong(other: Any, rows: Any) -> Any:
        if not rows[:, 0].any():
            return read(other, rows)
        flip(file.path, 8 * place.offset + 1)
        try:
            return read(other, rows)
        finally:
            flip(file.path, 8 * place.offset + 1)

    monkeypatch.setattr(loading, "read_table", read_wrong)
    with pytest.raises(
        checkpoint.CheckpointError, match=f"'{name}' is damaged: .*must not be used"
    ):
        checkpoint.load(saved, *trained(1), verify=how)
    assert not checkpoint.load(saved, *trained(1), verify="no").verified


def command(*args: object) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args([str(arg) for arg in args]))


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(7, 6)


def without_scale() -> Net:
    model = Net()
    del model.scale
    return model


def with_more() -> Net:
    model = Net()
    model.more = nn.Linear(1, 1)
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Other, r"one.weight has shape \(5, 7\) in the checkpoint, \(6, 7\) here"),
        (without_scale, "only in the checkpoint: scale"),
        (with_more, "missing from the checkpoint: more.weight, more.bias"),
        (lambda: Net().double(), "one.weight has torch.float32 in the checkpoint, torch.float64"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(saved: Path, make: Any, text: str):
    model = make()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9)
    before = values(model)
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(saved, model)
    assert same(values(model), before)


def test_not_strict_loads_what_fits(saved: Path):
    model = with_more()
    del model.scale
    found = checkpoint.load(saved, model, strict=False)
    assert (found.missing, found.unexpected) == (["more.weight", "more.bias"], ["scale"])
    assert torch.equal(model.one.weight, trained()[0].one.weight)


def test_an_optimizer_of_other_parameters(saved: Path):
    model = Net(1)
    optimizer = torch.optim.AdamW([model.scale])
    model.scale.grad = torch.ones(())
    optimizer.step()
    before = values(model, optimizer)
    with pytest.raises(checkpoint.CheckpointError, match="of the optimizer: only in the checkp"):
        checkpoint.load(saved, model, optimizer)
    assert same(values(model, optimizer), before)
    checkpoint.load(saved, model, optimizer, strict=False)
    assert optimizer.param_groups[0]["lr"] == 0.5
    checkpoint.save(saved.parent / "scale", model, optimizer)
    model, optimizer = trained(1)
    before = values(model, optimizer)
    checkpoint.load(saved.parent / "scale", model, optimizer, strict=False)
    names = [name for name, _ in model.named_parameters()]
    after = values(model, optimizer)
    assert after.keys() == before.keys()
    for number, name in enumerate(names):
        key = f"{number}.exp_avg"
        if key in before:  # `two` has no state: the forward does not use it
            assert torch.equal(after[key], before[key]) is (name != "scale"), name


def test_an_optimizer_of_another_kind(saved: Path):
    model = Net(1)
    other = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    with pytest.raises(checkpoint.CheckpointError, match="another optimizer than SGD: .* betas"):
        checkpoint.load(saved, model, other)
    assert other.param_groups[0]["lr"] == 0.25 and not other.state
    with pytest.raises(checkpoint.CheckpointError, match="must be a torch.nn.Module, not Ordered"):
        checkpoint.load(saved, model.state_dict())


STATES = {
    "AdamW": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "Adam": fsdpc.optim.Adam,
    "Lion": fsdpc.optim.Lion,
    "SGD": lambda params: fsdpc.optim.SGD(params, momentum=0.5),
}


@pytest.mark.parametrize(
    ("saved", "other", "text"),
    [
        ("Adam", "Lion", "does not fit Lion: it has exp_avg_sq, which is not used"),
        ("Lion", "Adam", "does not fit Adam: it lacks exp_avg_sq;"),
        ("AdamW", "Adamax", "fit Adamax: it lacks exp_inf and has exp_avg_sq, max_exp_avg_sq, wh"),
        ("AdamW", "Adam", None),  # the option amsgrad is loaded, too
        ("SGD", "Adam", "another optimizer than Adam: its options have dampening"),
        ("Adam", "SGD", "another optimizer than SGD: its options have amsgrad"),
    ],
)
def test_states_of_another_optimizer(tmp_path: Path, saved: str, other: str, text: str | None):
    model = Net()
    model.one(torch.ones(2, 7)).sum().backward()
    optimizer = STATES[saved](model.parameters())
    optimizer.step()
    checkpoint.save(tmp_path / "a", model, optimizer)
    fresh = Net(1)
    into = STATES[other](fresh.parameters())
    before = values(fresh)
    if text is None:
        checkpoint.load(tmp_path / "a", fresh, into)
        assert "max_exp_avg_sq" in into.state[fresh.one.weight]
        return
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(tmp_path / "a", fresh, into)
    assert same(values(fresh), before) and not into.state


@pytest.mark.parametrize("kind", [fsdpc.optim.AdamW8bit, fsdpc.optim.AdamMini])
def test_going_back_with_states_by_blocks(tmp_path: Path, kind: Any):
    """A checkpoint loads into the optimizer that saved it and that already has states in blocks."""
    model = nn.Linear(80, 80)
    named = model.named_parameters() if kind is fsdpc.optim.AdamMini else model.parameters()
    optimizer = kind(named, lr=0.1)
    model(torch.ones(1, 80)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    checkpoint.save(tmp_path / "a", model, optimizer)
    optimizer.step()
    after = model.weight.detach().clone()
    checkpoint.load(tmp_path / "a", model, optimizer)
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert torch.equal(model.weight, after)


def test_a_load_runs_no_hooks_of_optimizer_steps(saved: Path):
    """A load steps another optimizer of the same class to find out which states the class makes.
    This step runs no hooks.
    """
    model, optimizer = trained(1)
    calls: list[Any] = []
    hooks = [
        register(lambda *arguments: calls.append(arguments))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    call_before_write(lambda: calls.append("a snapshot's wait"))
    grad, random_state = torch.is_grad_enabled(), torch.get_rng_state()
    try:
        checkpoint.load(saved, model, optimizer)
        assert calls == []
    finally:
        for hook in hooks:
            hook.remove()
    assert torch.is_grad_enabled() is grad and torch.equal(torch.get_rng_state(), random_state)
    model.one.weight.grad = torch.zeros_like(model.one.weight)
    optimizer.step()
    assert calls == ["a snapshot's wait"]


OPTIMIZERS: list[tuple[type, dict[str, Any]]] = [
    (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.5}),
    (torch.optim.SGD, {}), (torch.optim.Adamax, {}), (torch.optim.NAdam, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}), (torch.optim.Adagrad, {}),
    (torch.optim.Rprop, {}), (torch.optim.ASGD, {}), (torch.optim.Adadelta, {}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_the_states_that_optimizers_of_torch_make(number: int):
    kind, options = OPTIMIZERS[number]
    param = nn.Parameter(torch.ones(3, 3))
    optimizer = kind([param], lr=0.1, **options)
    found = state_keys._usual(dict(optimizer.param_groups[0]), optimizer)
    param.grad = torch.ones(3, 3)
    optimizer.step()
    assert found == {key for key, value in optimizer.state[param].items() if value is not None}


def test_only_dtypes_that_can_be_cast_are_said_to_be(tmp_path: Path):
    class One(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.register_buffer("torch", torch.zeros(3, dtype=dtype))

    checkpoint.save(tmp_path / "a", One(torch.float32))
    for dtype, hint in ((torch.bfloat16, True), (torch.int64, False)):
        with pytest.raises(checkpoint.CheckpointError, match="torch.float32 in") as raised:
            checkpoint.load(tmp_path / "a", One(dtype))
        assert ("cast=True" in str(raised.value)) is hint
    other = nn.Module()
    other.register_buffer("torch", torch.zeros(4))
    with pytest.raises(checkpoint.CheckpointError, match="has shape") as raised:
        checkpoint.load(tmp_path / "a", other)
    assert "cast=True" not in str(raised.value)


def test_state_that_was_not_saved_goes(tmp_path: Path):
    model, optimizer = trained()
    checkpoint.save(tmp_path / "a", model, torch.optim.AdamW(model.parameters()))
    checkpoint.load(tmp_path / "a", model, optimizer)
    assert not optimizer.state


def test_urls_are_no_local_folders(tmp_path: Path, monkeypatch: Any, capsys: Any):
    monkeypatch.chdir(tmp_path)
    for line in (["convert", "s3://bucket/x", "a"], ["convert", "a", "s3://bucket/x"]):
        assert command(*line) == 2
        assert "is a URL" in capsys.readouterr().err
    model = Net()
    checkpoint.save("./s3:/x", model)
    checkpoint.load(tmp_path / "s3:" / "x", model)


def test_any_names_in_headers_and_indexes(tmp_path: Path):
    """fsdpc puts this JSON together itself, so the test has names that need escapes and names in
    other alphabets.
    """
    names = ['with "quotes"', "back\\slash", "größe", "行\n", "\U0001f600"]
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(2, 3)) for name in names})
    model["none"] = nn.Parameter(torch.empty(0))
    for path, given in ((tmp_path / "some", model), (tmp_path / "no", nn.Module())):
        checkpoint.save(path, given)
        index = (path / "model.safetensors.index.json").read_text()
        assert index == json.dumps(json.loads(index), indent=2) + "\n"
        assert json.loads(index)["weight_map"].keys() == given.state_dict().keys()
    (file,) = (tmp_path / "some").glob("*.safetensors")
    torch.testing.assert_close(load_file(file), dict(model.state_dict()))


@pytest.mark.parametrize("collects", [True, False])
def test_a_save_leaves_the_garbage_collector_as_it_was(
    tmp_path: Path, monkeypatch: Any, collects: bool
):
    seen = []
    monkeypatch.setattr(Net, "get_extra_state", lambda net: seen.append(gc.isenabled()) or {})
    (gc.enable if collects else gc.disable)()
    try:
        checkpoint.save(tmp_path / "net", Net())
        assert seen == [False] and gc.isenabled() is collects
        with pytest.raises(checkpoint.CheckpointError, match="float8"):
            checkpoint.save(tmp_path / "no", Net(), dtype=torch.float8_e5m2)
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_no_other_folder_is_overwritten(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("")
    with pytest.raises(checkpoint.CheckpointError, match="is no checkpoint, so it is not replaced"):
        checkpoint.save(tmp_path / "a", Net(), overwrite=True)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["thesis.tex"]
    (tmp_path / "a" / "thesis.tex").unlink()
    checkpoint.save(tmp_path / "a", Net(), overwrite=True)


def test_a_target_that_exists_stays(saved: Path):
    model, _ = trained(1)
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with pytest.raises(checkpoint.CheckpointError, match="exists: choose another name"):
        checkpoint.save(saved, model)
    assert before == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    checkpoint.save(saved, model, overwrite=True)
    assert not (saved / "optimizer").exists()
    checkpoint.load(saved, Net(3))
    folders.finish_removing()
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_a_save_waits_for_what_is_removed_only_on_a_full_disk(saved: Path, monkeypatch: Any):
    go, remove, allocate = threading.Event(), shutil.rmtree, os.posix_fallocate

    def slow(path: Path, quiet: bool) -> None:
        assert go.wait(60), "a save has waited"
        remove(path, quiet)

    def full(fd: int, at: int, nbytes: int) -> None:
        if list(saved.parent.glob(".old-*")):
            go.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, at, nbytes)

    monkeypatch.setattr(shutil, "rmtree", slow)
    for _ in range(2):
        checkpoint.save(saved, Net(), overwrite=True)
    assert len(list(saved.parent.glob(".old-*"))) == 2
    monkeypatch.setattr(os, "posix_fallocate", full)
    checkpoint.save(saved, trained(2)[0], overwrite=True)
    folders.finish_removing()
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    checkpoint.load(saved, Net(3))


@pytest.mark.parametrize("point", ["create", "write", "sync", "header", "manifest", "publish"])
def test_a_failing_step_leaves_what_was_there(saved: Path, point: str, monkeypatch: Any):
    class Full(Exception):
        pass

    def fail(name: str) -> None:
        if name == point:
            raise Full("no space")

    real = saving.write_plan
    monkeypatch.setattr(
        checkpoint, "write_plan", lambda *a, **k: real(*a, **{**k, "failpoint": fail})
    )
    with pytest.raises(checkpoint.CheckpointError, match="Full: no space"):
        checkpoint.save(saved, trained(1)[0], overwrite=True)
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    model, optimizer = trained(1)
    checkpoint.load(saved, model, optimizer)
    assert same(values(model, optimizer), values(*trained()))


class Failing:
    """A wrapper around all file operations on paths below a folder. The ``nth`` operation fails.
    With ``later``, all operations after the ``nth`` one fail, too. If ``act`` is set, the ``nth``
    operation does not fail, but ``act`` is called before it.
    """

    act: Callable[[], object] | None = None

    OS = ("open", "mkdir", "pread", "pwrite", "posix_fallocate", "fsync", "rename", "replace",
          "unlink", "rmdir", "scandir", "close")  # fmt: skip
    C = ("ckpt_write", "ckpt_read", "ckpt_rename")

    def __init__(self, monkeypatch: Any, below: Path) -> None:
        self.below, self.nth, self.later, self.count = str(below), 0, False, 0
        for module, names in ((os, self.OS), (_C, self.C), (builtins, ("open",))):
            for name in names:
                monkeypatch.setattr(module, name, self.counted(name, getattr(module, name)))

    def counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            failed = self.nth and self.is_below(args[0], **options) and self.fails()
            if failed and self.act is not None:
                self.act()
                failed = False
            if name == "close" or not failed:  # a close that fails still closes the file
                result = real(*args, **options)
            if failed:
                raise OSError(errno.EIO, f"{name} number {self.nth}")
            return result

        return call

    def is_below(self, what: Any, *, dir_fd: int | None = None, **_: Any) -> bool:
        try:
            what = what if dir_fd is None else dir_fd
            where = os.readlink(f"/proc/self/fd/{what}") if type(what) is int else str(what)
        except OSError:
            return False
        return where.startswith(self.below) and threading.current_thread().name == "MainThread"

    def fails(self) -> bool:
        self.count += 1
        return self.count == self.nth or (self.later and self.count > self.nth)

    def sweep(self, call: Callable[[], object], later: bool) -> Iterator[str]:
        """Run ``call`` again and again. In run n, the nth operation fails. Stop when a run has
        fewer than n operations. Yield the error text of each run: an empty text if ``call``
        returned.
        """
        for nth in itertools.count(1):
            self.nth, self.later, self.count, text = nth, later, 0, ""
            try:
                call()
            except (checkpoint.CheckpointError, OSError) as error:
                text = str(error)
            self.nth = 0
            if self.count < nth:
                return
            yield text


@pytest.mark.parametrize("form", ["fsdpc", "plain", "dcp", "torch.save"])
def test_a_load_while_another_process_replaces_the_checkpoint(
    tmp_path: Path, monkeypatch: Any, form: str
):
    """The checkpoint is replaced at any moment, and the old one is removed at once. A load gives
    one of the two checkpoints as a whole. DCP folders are opened file by file, so such a load may
    also fail because a file is gone.
    """

    def make(value: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.5)
        for param in model.parameters():
            param.data.fill_(value)
            optimizer.state[param]["momentum_buffer"] = torch.full((2, 2), float(value))
        return model, optimizer

    def write(path: Path, value: int) -> None:
        model, optimizer = make(value)
        if form == "torch.save":
            torch.save(as_numbers(model, optimizer), path)
        elif form == "dcp":
            checkpoint.save(path, model, optimizer, format="dcp")
        else:
            parts = (model, optimizer) if form == "fsdpc" else (model,)
            checkpoint.save(path, *parts, file_bytes=1, step=value, extra={"value": value})
        if form == "plain":
            (path / "fsdpc.json").unlink()
            shutil.rmtree(path / "fsdpc")

    target, other = tmp_path / "a", tmp_path / "b"
    remove: Any = os.remove if form == "torch.save" else shutil.rmtree
    copy: Any = shutil.copy if form == "torch.save" else shutil.copytree

    def replace() -> None:
        _C.ckpt_rename(str(other), str(target), exchange=True)
        remove(other)

    def load() -> None:
        model, optimizer = make(0)
        found = checkpoint.load(target, model, None if form == "plain" else optimizer)
        values = [p for p in model.parameters()]
        if form != "plain":
            values += [state["momentum_buffer"] for state in optimizer.state.values()]
            values.append(torch.tensor(float(optimizer.param_groups[0]["lr"])))
        loaded.append({float(x) for value in values for x in value.detach().reshape(-1)})
        if form == "fsdpc":
            assert found.verified and [{found.step}, {found.extra["value"]}] == [loaded[-1]] * 2

    below = tmp_path if form == "torch.save" else target
    failing, loaded, errors = Failing(monkeypatch, below), [], []
    failing.act = replace
    for value in (1, 2):
        write(tmp_path / f"saved-{value}", value)
    copy(tmp_path / "saved-2", target)
    copy(tmp_path / "saved-1", other)
    for text in failing.sweep(load, False):
        errors += [text] if text else []
        remove(target)
        copy(tmp_path / "saved-2", target)
        copy(tmp_path / "saved-1", other)
    assert {1.0} in loaded and {2.0} in loaded, "it was always replaced too early, or too late"
    assert all(values in ({1.0}, {2.0}) for values in loaded), loaded
    assert not errors or (form == "dcp" and all("cannot be read" in text for text in errors))


@pytest.mark.parametrize(
    ("name", "later"), [("a", False), ("a", True), ("n\u00fc" * 80, False), ("step-000001", False)]
)
def test_whatever_file_operation_of_a_save_fails(
    tmp_path: Path, monkeypatch: Any, name: str, later: bool
):
    """The old checkpoint remains after a failed save, and the new one is there if `save` returns.
    Some saves replace an old checkpoint, other saves write to a path that does not exist yet. One
    name is so long that names derived from this name are cut. If all later operations fail, too,
    the new checkpoint may be there. In this case, the error says that the new checkpoint is there
    and where the old one is.
    """
    monkeypatch.setattr(folders, "_SYNCS_AT_ONCE", 1)
    target, free, model = tmp_path / name, tmp_path / f"{name[:-1]}2", nn.Linear(1, 1, bias=False)
    run = checkpoint.Checkpointer(tmp_path, keep=1)

    def value_at(path: Path) -> float:
        other = nn.Linear(1, 1, bias=False)
        assert checkpoint.load(path, other).verified
        return other.weight.item()

    def save(path: Path, value: float) -> None:
        model.weight.data.fill_(value)
        if name.startswith("step"):
            run.save(int(path.name[5:]), model)
        else:
            checkpoint.save(path, model, overwrite=True)

    failing, tried = Failing(monkeypatch, tmp_path), 0
    for path in (target, free):
        save(target, 1.0)
        for text in failing.sweep(lambda path=path: save(path, 2.0), later):
            folders.finish_removing()
            tried += 1
            stands = "the new checkpoint is" in text or "the latest: " in text
            if not text or stands:
                assert value_at(path) == 2.0, text
            elif path == target:
                assert value_at(target) == 1.0, text
            else:
                assert not path.exists(), text
            if "was to replace is " in text:
                old = re.search("replace is (.*)$", text)
                assert old and value_at(Path(old[1])) == 1.0
            assert not stands or later or name.startswith("step"), text
            save(path, 1.0)  # this save also removes what the failed save left
            if path == free:
                shutil.rmtree(free)
            folders.finish_removing()
            left = {item.name for item in tmp_path.iterdir()} - {"latest"}
            assert left <= {target.name}, (text, left)
    assert tried > 60


# --- hostile folders and files -------------------------------------------------------------------


def plain_folder(folder: Path, table: dict[str, str], files: dict[str, dict[str, Any]]) -> None:
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": table}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


A, B, AB = "a.safetensors", "b.safetensors", {"x": "a.safetensors", "y": "b.safetensors"}
FOLDERS: dict[str, tuple[dict[str, str], list[str], str]] = {
    "missing middle file": (AB, [A], "b.safetensors is missing"),
    "leaves the folder": ({"x": "../a.safetensors"}, [A], "not in its folder"),
    "absolute": ({"x": "/etc/passwd"}, [A], "not in its folder"),
    "wrong file in the index": ({"x": B, "y": A}, [A, B], "tensor 'x' should be in"),
    "tensor missing in the index": ({"x": A}, [A, B], ""),
    "tensor that no file has": ({**AB, "z": A}, [A, B], "tensor 'z' should be in"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_do_not_add_up(tmp_path: Path, name: str):
    table, names, text = FOLDERS[name]
    tensors = {A: {"x": torch.zeros(2)}, B: {"y": torch.ones(3)}}
    plain_folder(tmp_path / "in", table, {file: tensors[file] for file in names})
    if not text:  # a file that the index does not name is ignored
        assert list(Opened(tmp_path / "in").model.where) == ["x"]
        return
    with pytest.raises(checkpoint.CheckpointError, match=text):
        Opened(tmp_path / "in")


def test_links_pipes_and_two_sets_are_refused(tmp_path: Path):
    folder = tmp_path / "in"
    plain_folder(folder, {"x": A}, {A: {"x": torch.zeros(2)}})
    os.rename(folder / A, tmp_path / A)
    os.symlink(tmp_path / A, folder / A)
    with pytest.raises(checkpoint.CheckpointError, match="symbolic link"):
        Opened(folder)
    os.remove(folder / A)
    os.mkfifo(folder / A)
    with pytest.raises(checkpoint.CheckpointError, match="not a regular file"):
        Opened(folder)
    os.remove(folder / A)
    shutil.copy(tmp_path / A, folder / A)
    shutil.copy(tmp_path / A, folder / "model.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match="both model.safetensors and"):
        Opened(folder)


def set_header(file: Path, change: Callable[[dict[str, Any]], int | None]) -> None:
    """Rewrite a file's header. ``change`` edits the header and may return a wrong length for the
    first eight bytes.
    """
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    told = change(header)
    text = json.dumps(header).encode()
    count = len(text) if told is None else told
    file.write_bytes(struct.pack("<Q", count) + text + data[8 + length :])


def tensors_of(header: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for name, row in header.items() if name != "__metadata__"]


def offsets(header: dict[str, Any], row: int, begin: int, end: int) -> None:
    tensors_of(header)[row]["data_offsets"] = [begin, end]


def shape(header: dict[str, Any], *sizes: int) -> None:
    tensors_of(header)[0]["shape"] = list(sizes)


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], int | None], str]] = {
    "huge": (lambda header: 1 << 62, "a header of 4611686018427387904 bytes in a file of"),
    "longer than the file": (lambda header: 99_999_999, "a header of 99999999 bytes in a file of"),
    "empty": (lambda header: 0, "was never finished"),
    "overlap": (lambda header: offsets(header, 1, 0, 20), "overlaps|do not match"),
    "negative offset": (lambda header: offsets(header, 0, -140, 0), "not negative"),
    "negative size": (lambda header: shape(header, -5, -7), "not negative"),
    "beyond the end": (lambda header: offsets(header, 0, 1 << 40, (1 << 40) + 140), "[a-z]"),
    "overflow": (lambda header: shape(header, 1 << 32, 1 << 32), r"2\^63"),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_hostile_headers(saved: Path, part: str, name: str):
    """A hostile header is refused in a folder with a manifest, and also in a folder without a
    manifest, which another library may have written.
    """
    change, text = HEADERS[name]
    folder = saved / "optimizer" if part == "optimizer" else saved
    set_header(folder / f"{part}-00001-of-00001.safetensors", change)
    with pytest.raises(checkpoint.CheckpointError, match=f"{part}-00001-of-00001.safetensors"):
        Opened(saved)
    for name in ("fsdpc.json", "fsdpc/state.json", "optimizer/optimizer.json"):
        (saved / name).unlink()
    with pytest.raises(checkpoint.CheckpointError, match=f"{part}-00001-of-00001.*(?:{text})"):
        Opened(saved)


def resign(saved: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a matching checksum, as an attacker could."""
    body = json.loads((saved / "fsdpc.json").read_text())
    del body["crc32c"]
    change(body)
    text = json.dumps(body, indent=1, ensure_ascii=False)
    (saved / "fsdpc.json").write_bytes(manifest._signed(text))


@pytest.mark.parametrize("path", ["../evil.json", "/etc/evil.json", "a/b/evil.json", "..", ".git"])
@pytest.mark.parametrize("table", ["files", "headers", "tensors"])
def test_a_manifest_that_leaves_the_folder(saved: Path, table: str, path: str):
    evil = b"{}"
    (saved.parent / "evil.json").write_bytes(evil)
    crc = f"{_C.ckpt_crc32c(evil):08x}"
    resign(
        saved, lambda body: body[table].__setitem__(path, {} if table == "tensors" else [2, crc])
    )
    with pytest.raises(checkpoint.CheckpointError, match="names the file .* is not in the checkp"):
        Opened(saved)
    assert command("convert", saved, saved.parent / "to") == 2


MANIFESTS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda body: body.update(version=2), "has version 2; this fsdpc reads version 1"),
    (lambda body: body.update(block_bytes=-1), "has blocks of -1 bytes"),
    (lambda body: body.update(headers=[]), "is damaged or is not a manifest"),
    (lambda body: body.update(tensors={}), "the manifest does not fit tensor"),
    (lambda body: body["files"].clear(), "is not in the manifest"),
    (lambda body: body["headers"].popitem(), "size or header is not the manifest's"),
]


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_hostile_manifests(saved: Path, number: int):
    change, text = MANIFESTS[number]
    resign(saved, change)
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(saved, *trained(1))


@pytest.mark.parametrize("name", ["fsdpc.json", "optimizer", "fsdpc", "optimizer/optimizer.json"])
def test_links_inside_a_checkpoint_are_refused(saved: Path, name: str):
    os.rename(saved / name, saved.parent / "moved")
    os.symlink(saved.parent / "moved", saved / name)
    model, optimizer = trained(1)
    before = values(model, optimizer)
    with pytest.raises(checkpoint.CheckpointError, match="symbolic link"):
        checkpoint.load(saved, model, optimizer)
    assert same(values(model, optimizer), before)
    os.remove(saved / name)
    os.rename(saved.parent / "moved", saved / name)
    os.symlink(saved, saved.parent / "newest")  # the folder itself may be reached by a link
    checkpoint.load(saved.parent / "newest", model, optimizer)


PARTS = [
    ("fsdpc.json", "is a checkpoint of fsdpc without its fsdpc.json"),
    ("optimizer", "optimizer is no checkpoint"),
    ("fsdpc", "state.json is missing"),
]


@pytest.mark.parametrize(("what", "text"), PARTS)
def test_a_part_that_is_missing(saved: Path, what: str, text: str, capsys: Any):
    """A missing part is an error. An earlier version verified such a folder as good and loaded it
    as if the part had never been there.
    """
    shutil.rmtree(saved / what) if (saved / what).is_dir() else (saved / what).unlink()
    model, optimizer = trained(1)
    before = values(model, optimizer)
    for parts in ((model, optimizer), (model,)):
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.load(saved, *parts)
    assert same(values(model, optimizer), before)
    assert command("verify", saved) == (1 if what == "fsdpc" else 2)
    shown = capsys.readouterr()
    assert text in shown.out + shown.err


def test_a_plain_file_without_checksums_loads(tmp_path: Path):
    source = Net(4)
    save_file(dict(source.state_dict()), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        model = Net(5)
        assert not checkpoint.load(path, model).verified
        assert same(values(model), values(source))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return `data` with flipped bits, cuts, repeated pieces, or other digits or lengths. The
    changes are mostly in the header; in a file without a header they are anywhere.
    """
    found = bytearray(data)
    (length,) = struct.unpack_from("<Q", found)
    if length > len(data):  # a text
        at = rng.randrange(len(data))
        size = rng.randrange(1, 20)
        piece = bytes(rng.choice(b'0123456789{}[]",:-\\.eu \x00\xff') for _ in range(size))
        keep = rng.choice([data[at:], data[at + size :], data[at - size :] if at > size else b""])
        return data[:at] + rng.choice([piece, b""]) + keep
    for _ in range(rng.randint(1, 3)):
        kind, at = rng.randrange(6), rng.randrange(min(len(found), 8 + length))
        if kind == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at] = rng.choice(b'0123456789{}[]",:-\\.eu \x00\xff')
        elif kind == 2:
            piece = found[at : at + rng.randrange(40)]
            found[at:at] = piece
            found[:8] = struct.pack("<Q", length + len(piece) if rng.random() < 0.8 else length)
        elif kind == 3:
            size = rng.randrange(20)
            del found[at : at + size]
            found[:8] = struct.pack("<Q", max(0, length - size))
        elif kind == 4:
            del found[rng.randrange(8, len(found)) :]
        else:
            found[:8] = struct.pack("<Q", rng.choice([0, 1, length + 1, 1 << 40, 1 << 63]))
        if len(found) < 9:
            break
    return bytes(found)


def accepted_alone(lone: Path) -> bool:
    """Return whether fsdpc accepts a file without a manifest. The reference library must be able to
    read such a file, too.
    """
    try:
        where = Opened(lone).model.where
    except checkpoint.CheckpointError:
        return False
    try:
        with safe_open(str(lone), "np") as opened:
            assert sorted(opened.keys()) == sorted(where)
            for name, (_, place) in where.items():
                assert tuple(opened.get_slice(name).get_shape()) == tuple(place.shape)
    except SafetensorError as error:
        raise AssertionError(f"accepted, but not by safetensors: {lone.read_bytes()!r}") from error
    return True


def test_fuzzed_files_never_load_wrongly(saved: Path, tmp_path: Path):
    """Without a manifest, the reference library must read each changed file that fsdpc accepts,
    with equal names and shapes. With a manifest, no changed file is accepted. `FUZZ_SECONDS` sets
    for how long files are tried.
    """
    rng = random.Random(os.environ.get("FUZZ_SEED", "1"))
    originals = {file: file.read_bytes() for file in sorted(saved.rglob("*")) if file.is_file()}
    lone, (model, optimizer) = tmp_path / "model.safetensors", trained(1)
    before = values(model, optimizer)
    until = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", FUZZ_SECONDS))
    tried = accepted = 0
    while time.monotonic() < until:
        for file, original in originals.items():
            data = mutate(original, rng)
            if data == original:
                continue
            tried += 1
            file.write_bytes(data)
            with pytest.raises(checkpoint.CheckpointError):
                checkpoint.load(saved, model, optimizer)
            file.write_bytes(original)
            if file.suffix == ".safetensors":
                lone.write_bytes(data)
                accepted += accepted_alone(lone)
    assert same(values(model, optimizer), before)
    print(f"{tried} mutated files, {accepted} of them valid")
    assert tried > 50


def test_digests_do_not_depend_on_the_cut():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 300_000, dtype=np.uint8)
    whole = _C.ckpt_crc32c(data)
    for cuts in ([1000], [1, 2, 3], sorted(rng.integers(0, len(data), 50).tolist())):
        parts = np.split(data, cuts)
        crcs = np.array([_C.ckpt_crc32c(np.ascontiguousarray(p)) for p in parts], np.uint32)
        lengths = np.array([len(p) for p in parts], np.int64)
        counts = np.array([1, 0, len(parts) - 1], np.int64)
        digests = np.zeros(3, np.uint32)
        _C.ckpt_combine(crcs, lengths, counts, digests)
        assert (digests[0], digests[1]) == (crcs[0], 0)
        _C.ckpt_combine(crcs, lengths, np.array([len(parts)]), digests[:1])
        assert digests[0] == whole
        assert digests[2] == _C.ckpt_crc32c(data[lengths[0] :])
        with pytest.raises(ValueError, match="do not fit together"):
            _C.ckpt_combine(crcs, lengths, counts[:2], digests[:2])


@pytest.mark.parametrize("nbytes", [0, 7, 8, 6144, 6151, 100_003])
def test_digests_of_one_reading(nbytes):
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    words = data[: nbytes // 8 * 8].view(np.uint64)
    assert _C.ckpt_digest(data) == (_C.ckpt_crc32c(data), int(words.sum(dtype=np.uint64)))


def test_copies_of_memory():
    source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    one, other = source.ctypes.data, target.ctypes.data
    _C.ckpt_copy(np.array([[one + 8, other, 3], [one, other + 4, 2], [0, 0, 0]]))
    assert target.tolist() == [8, 9, 10, 0, 0, 1] + [0] * 10
    for moves in ([one, other], [[one, other, -1]], [[0, other, 1]], [[one, 0, 1]]):
        with pytest.raises(ValueError, match="moves must be rows of 3"):
            _C.ckpt_copy(np.array(moves))


MEMORY = """
import gc, sys
from pathlib import Path
import torch
from fsdpc import checkpoint

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))

def peak(call):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark becomes what there is
    before = status("VmRSS")
    call()
    return status("VmHWM") - before

torch.set_num_threads(1)
"""

SAVED = """
def make():
    model = torch.nn.Linear(4096, 2048)  # 32 MB, and twice that of moments
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    return model, optimizer, torch.nn.Linear(2, 2)
model, optimizer, small = make()
checkpoint.save(sys.argv[1] + "/small", small)  # what is made on first use
checkpoint.load(sys.argv[1] + "/small", small)
saved = peak(lambda: checkpoint.save(sys.argv[1] + "/a", model, optimizer))
loaded = peak(lambda: checkpoint.load(sys.argv[1] + "/a", model, optimizer))
cast = peak(lambda: checkpoint.save(sys.argv[1] + "/b", model, dtype=torch.bfloat16))
print(saved, loaded, cast)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_model(tmp_path: Path):
    """Saving and loading 96 MB takes staging buffers of 8 MB and little other memory."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("no high-water mark that can be reset")
    peaks = run_measured(SAVED, tmp_path)
    assert len(peaks) == 3 and all(peak < 20 for peak in peaks), peaks
    assert peaks[0] > 4, "the staging does not show, so nothing was measured"


def run_measured(code: str, tmp_path: Path) -> list[float]:
    """Run the program MEMORY + `code` and return the figures that it prints. The environment keeps
    the allocator's threshold for mappings fixed, so that the memory of a freed tensor goes back to
    the system. Otherwise the figures differed by 30 MB between runs, depending on whether heap
    memory was kept.
    """
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY + code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(256 * 1024)},
    )
    assert ended.returncode == 0, ended.stderr
    return [float(word) for word in ended.stdout.split()]


CONVERTED = """
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from fsdpc.checkpoint.convert import convert

def write(name, tensors, side):
    state = {f"{i}.weight": torch.full((side, side), float(i)) for i in range(tensors)}
    save_file(state, f"{sys.argv[1]}/{name}.safetensors")
    dcp.save(state, checkpoint_id=f"{sys.argv[1]}/{name}.dcp", no_dist=True)

def run(name, kind):
    convert(Path(f"{sys.argv[1]}/{name}.{kind}"), Path(f"{sys.argv[1]}/{name}-{kind}"), None,
            "safetensors", True)

write("small", 2, 4)  # what is made on first use
write("big", 16, 1024)  # 64 MB
for kind in ("safetensors", "dcp"):
    run("small", kind)
    print(peak(lambda: run("big", kind)))
"""


@pytest.mark.long
def test_the_memory_of_a_conversion_does_not_grow_with_the_checkpoint(tmp_path: Path):
    """Converting 64 MB in tensors of 4 MB takes at most one tensor, its read buffers and the
    staging buffers.
    """
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("no high-water mark that can be reset")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("ASan keeps memory that was freed")
    peaks = run_measured(CONVERTED, tmp_path)
    assert len(peaks) == 2 and all(3 < peak < 24 for peak in peaks), peaks
    assert not compare(tmp_path / "big-safetensors", tmp_path / "big-dcp")


# --- in the background, and folders of steps -----------------------------------------------------


def test_background_saves_hold_the_values_of_their_step(tmp_path: Path):
    model, optimizer = trained()
    expected = values(model, optimizer)
    handle = checkpoint.save(tmp_path / "a", model, optimizer, async_=True)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
            optimizer.state[param].clear()
    assert handle is not None
    handle.wait(60)
    assert handle.done
    model, optimizer = trained(1)
    checkpoint.load(tmp_path / "a", model, optimizer)
    assert same(values(model, optimizer), expected)


def test_a_save_in_the_background_has_the_lowest_priority(tmp_path: Path, monkeypatch: Any):
    found = []

    def look(*arguments: Any, **options: Any) -> None:
        tid = threading.get_native_id()
        call = priority._IOPRIO_SET[platform.machine()] + 1  # ioprio_get
        found.append((os.getpriority(os.PRIO_PROCESS, tid), LIBC.syscall(call, 1, tid)))

    monkeypatch.setattr(background, "write_plan", look)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    checkpoint.save(tmp_path / "a", Net(), async_=True).wait()
    assert found == [(19, 2 << 13 | 7)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_an_error_in_the_background_comes_out_at_the_next_call(tmp_path: Path):
    (tmp_path / "a").write_text("")
    checkpoint.save(tmp_path / "a" / "b", Net(), async_=True)
    with pytest.raises(checkpoint.CheckpointError, match="in the background.*File exists"):
        checkpoint.save(tmp_path / "c", Net())
    checkpoint.save(tmp_path / "c", Net())
    handle = checkpoint.save(tmp_path / "a" / "b", Net(), async_=True)
    assert handle is not None
    with pytest.raises(checkpoint.CheckpointError, match="File exists"):
        handle.wait()
    checkpoint.save(tmp_path / "d", Net())


@pytest.mark.long
def test_an_error_in_the_background_is_printed_at_exit(tmp_path: Path):
    (tmp_path / "a").write_text("")
    code = (
        "import sys, torch; from fsdpc import checkpoint;"
        "checkpoint.save(sys.argv[1] + '/good', torch.nn.Linear(2, 2), async_=True).wait();"
        "checkpoint.save(sys.argv[1] + '/a/b', torch.nn.Linear(2, 2), async_=True)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert "in the background: saving checkpoint" in ended.stderr, ended.stderr
    checkpoint.load(tmp_path / "good", nn.Linear(2, 2))


@pytest.mark.parametrize("async_", [False, True])
def test_folders_of_steps(tmp_path: Path, async_: bool):
    run = checkpoint.Checkpointer(tmp_path / "run", keep=2, every=10, async_=async_)
    model, optimizer = trained()
    assert run.resume(model, optimizer) is None
    for step in range(0, 41, 5):
        with torch.no_grad():
            model.scale.fill_(step)
        run.save(step, model, optimizer, extra={"step": step})
    run.wait()
    assert run.steps() == [30, 40]
    assert run.latest() == tmp_path / "run" / "step-000040"
    assert (tmp_path / "run" / "latest").read_text() == "step-000040\n"
    # These are the remains of a save that was killed midway and of one killed before `latest` was
    # written.
    (tmp_path / "run" / ".new-step-000050-12345678").mkdir()
    (tmp_path / "run" / "step-000060").mkdir()
    (tmp_path / "run" / "latest").write_text("step-000099\n")
    again = checkpoint.Checkpointer(tmp_path / "run", keep=2)
    model, optimizer = trained(1)
    found = again.resume(model, optimizer)
    assert found is not None and found.step == 40 and found.extra == {"step": 40}
    assert model.scale.item() == 40
    assert not list((tmp_path / "run").glob(".new-*"))
    for step in (41, 42, 43):
        again.save(step, model, optimizer)
    assert again.steps() == [40, 42, 43]  # the step that the run resumed from is kept


def test_a_run_that_goes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The step that was saved last is the newest one, also for a later process. `keep` counts the
    steps in this order.
    """

    def step_of(run: checkpoint.Checkpointer, **options: Any) -> tuple[int, float]:
        model = Net(1)
        found = run.resume(model, **options)
        assert found is not None and found.verified
        return found.step, model.scale.item()

    def save(run: checkpoint.Checkpointer, *steps: int) -> None:
        for step in steps:
            model = Net()
            model.scale.data.fill_(step)
            run.save(step, model)

    for how in ("by path", "by resume"):
        run = checkpoint.Checkpointer(tmp_path / how, keep=3)
        save(run, 100, 200, 300)
        if how == "by path":
            checkpoint.load(run.path(100), Net())
        else:
            assert step_of(run, step=100) == (100, 100.0)
            run = checkpoint.Checkpointer(tmp_path / how, keep=3)
            assert step_of(run) == (100, 100.0)  # as if it was killed before its first save
        save(run, 110)
        assert (run.steps(), run.abandoned()) == ([100, 110, 300], [300])
        (tmp_path / how / "latest").write_text("step-000300\n")  # as if `latest` was not rewritten
        run = checkpoint.Checkpointer(tmp_path / how, keep=3)
        assert step_of(run) == (110, 110.0)
        assert "latest names step 300, but step 110 was published after it" in caplog.text
        save(run, 120, 130)
        assert (run.steps(), run.abandoned()) == ([110, 120, 130], [])
        assert step_of(checkpoint.Checkpointer(tmp_path / how)) == (130, 130.0)
    assert "later steps [200, 300] are abandoned; keep=3 removes them first" in caplog.text
    with pytest.raises(checkpoint.CheckpointError, match=r"of step 5, only of \[110, 120, 130\]"):
        run.resume(Net(), step=5)
    checkpoint.save(run.path(90), Net())  # saved without a Checkpointer
    assert (run.latest(), run.abandoned()) == (run.path(90), [110, 120, 130])
    for path in tmp_path.rglob("fsdpc.json"):  # older versions did not number their checkpoints
        resign(path.parent, lambda body: body.pop("published"))
    (tmp_path / how / "latest").write_text("step-000120\n")
    assert (run.latest(), run.abandoned()) == (run.path(120), [130])


@pytest.mark.parametrize("how", ["bit", "lost"])
def test_a_run_whose_newest_step_is_not_known(tmp_path: Path, how: str):
    """If the newest step's manifest is damaged or lost, no other step is taken in its place."""

    def damage(step: int) -> None:
        path = run.path(step) / "fsdpc.json"
        if how == "lost":
            path.unlink()
        else:  # a changed number that would give the steps another order
            text = path.read_bytes()
            path.write_bytes(re.sub(rb'"published": \d+', b'"published": 9', text))

    run, model = checkpoint.Checkpointer(tmp_path / "run", keep=3), Net()
    for step in (10, 20, 30):
        run.save(step, model)
    damage(10)
    assert (run.latest(), run.steps()) == (run.path(30), [20, 30])  # `latest` names step 30, too
    damage(30)
    before = values(model)
    for call in (run.latest, lambda: run.resume(model)):
        with pytest.raises(
            checkpoint.CheckpointError, match=r"steps \[10, 30\] is damaged or missi"
        ):
            call()
    with pytest.raises(checkpoint.CheckpointError, match="damaged|without its fsdpc.json"):
        run.resume(model, step=30)
    assert same(values(model), before)
    found = run.resume(model, step=20)
    assert found is not None and found.step == 20 and run.latest() == run.path(20)
    for step in (40, 50, 60):
        run.save(step, model)
    assert run.steps() == [20, 40, 50, 60] and run.path(10).exists()  # the run resumed from step 20


REMOVING = """
import os, shutil, signal, sys, time
import torch
from fsdpc import checkpoint

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

def never_ends(path, quiet):  # with the folder half gone
    (path / "fsdpc.json").unlink()
    os.write(1, b"removing\\n")  # whole, beside the lines of other threads
    time.sleep(60)

shutil.rmtree = never_ends
run = checkpoint.Checkpointer(sys.argv[1], keep=1)
for step in (1, 2, 2, 3):
    run.save(step, torch.nn.Linear(2, 2))
os.write(1, b"saved\\n")
time.sleep(60)
"""


@pytest.mark.long
def test_ctrl_c_while_replaced_folders_are_removed(tmp_path: Path):
    """Each save begins while the folder that the previous save replaced still exists."""
    program = subprocess.Popen(
        [sys.executable, "-c", REMOVING, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert program.stdout is not None
    lines = [program.stdout.readline() for _ in range(4)]
    assert sorted(lines) == ["removing\n"] * 3 + ["saved\n"]
    deadline = time.monotonic() + 40
    while program.poll() is None and time.monotonic() < deadline:
        program.send_signal(signal.SIGINT)  # the second signal ends the wait at exit
        time.sleep(0.2)
    program.stdout.close()
    ended = program.poll() is not None
    program.kill()
    program.wait()
    assert ended, "Ctrl-C waits until folders are removed"
    assert len(list(tmp_path.glob(".old-*"))) == 3
    found = checkpoint.Checkpointer(tmp_path).resume(nn.Linear(2, 2))
    assert found is not None and (found.step, found.verified) == (3, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003"]


# --- conversion and the command ------------------------------------------------------------------


def test_conversions(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert command("convert", tmp_path / "model.pt", tmp_path / "from_pt") == 0
    assert not capsys.readouterr().out
    assert command("convert", saved, tmp_path / "dcp", "--to", "dcp") == 0
    shown = capsys.readouterr().out
    assert shown == "not converted: fsdpc/extra.json\nnot converted: step 5\n"
    assert command("convert", tmp_path / "dcp", tmp_path / "from_dcp") == 0
    assert command("diff", saved, tmp_path / "from_dcp") == 0
    assert command("diff", saved, tmp_path / "dcp") == 0
    assert not capsys.readouterr().out
    assert command("convert", saved, tmp_path / "low", "--dtype", "bfloat16") == 0
    for name in ("from_pt", "from_dcp"):
        other = Net(9)
        checkpoint.load(tmp_path / name, other)
        assert same(values(other), values(model))
    low, optimizer = trained(1)
    checkpoint.load(tmp_path / "low", low, optimizer, cast=True)
    assert torch.equal(low.one.weight, model.one.weight.bfloat16().float())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert command("diff", saved, tmp_path / "from_pt") == 1  # from_pt has no optimizer
    assert command("diff", tmp_path / "from_pt", tmp_path / "from_pt") == 0
    capsys.readouterr()
    assert command("inspect", saved) == 0
    assert "  one.weight  float32[5, 7]  140 bytes" in capsys.readouterr().out
    assert command("verify", saved) == command("verify", tmp_path / "low") == 0
    assert command("verify", tmp_path / "nowhere") == 2


def test_a_dcp_folder_of_a_model_and_its_optimizer(tmp_path: Path, capsys: Any):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    convert = ("convert", tmp_path / "dcp", tmp_path / "to")
    assert command(*convert, "--prefix", "net.") == 2
    assert "no tensor with the prefix 'net.'" in capsys.readouterr().err
    assert command(*convert, "--prefix", "model.") == 0
    states = [f"optimizer.state.{n}.{key}" for n in (0, 1, 2, 3)
              for key in ("step", "exp_avg", "exp_avg_sq")]  # fmt: skip
    shown = capsys.readouterr().out.splitlines()
    assert {f"not converted: {name}" for name in states} <= set(shown)
    assert command("convert", tmp_path / "dcp", tmp_path / "all") == 0
    assert "the optimizer's state, which is by numbers" in capsys.readouterr().out
    other = Net(9)
    checkpoint.load(tmp_path / "to", other)
    assert same(values(other), values(model))


def test_a_prefix_of_a_torch_save_file(tmp_path: Path, capsys: Any):
    model, _ = trained()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "ddp.pt")
    assert command("convert", tmp_path / "ddp.pt", tmp_path / "to", "--prefix", "net.") == 2
    assert "no tensor with the prefix 'net.'" in (error := capsys.readouterr().err)
    assert "there is 'state_dict.module.scale'" in error
    assert command("convert", tmp_path / "ddp.pt", tmp_path / "to", "--prefix", "module.") == 0
    assert capsys.readouterr().out == "not converted: epoch\n"
    other, again = Net(9), Net(8)
    checkpoint.load(tmp_path / "to", other)
    checkpoint.load(tmp_path / "ddp.pt", again, rename=lambda name: name.removeprefix("module."))
    assert same(values(other), values(model)) and same(values(again), values(model))


@pytest.mark.parametrize("how", ["numbers and names", "flat"])
def test_a_prefix_of_names_of_the_optimizer(tmp_path: Path, how: str):
    """The prefix is removed from the names of states, too. States under names without the prefix
    are left out and listed.
    """
    inner, other = Net(), nn.Linear(2, 2)
    model = nn.ModuleDict({"module": inner, "other": other})
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.5)
    (inner.norm(inner.one(torch.randn(4, 7))).sum() * inner.scale + other(torch.ones(2)).sum()
     ).backward()  # fmt: skip
    optimizer.step()
    weights, states = model.state_dict(), optimizer.state_dict()
    if how == "flat":
        weights, states = named_states(model, optimizer, flat=True)
    torch.save({"model": weights, "optimizer": states}, tmp_path / "a.pt")
    left = convert(tmp_path / "a.pt", tmp_path / "to", None, "safetensors", prefix="module.")
    assert left == [
        f"{start}other.{name}" for start in ("", "optimizer.state.") for name in ("weight", "bias")
    ]
    found, into = trained(1)
    checkpoint.load(tmp_path / "to", found, into)
    assert same(values(found), values(inner)) and into.param_groups[0]["lr"] == 0.5
    for (name, param), old in zip(found.named_parameters(), inner.parameters(), strict=True):
        for key, value in optimizer.state.get(old, {}).items():
            assert torch.equal(into.state[param][key], value), name
    kinds = Opened(tmp_path / "to").values("optimizer/optimizer.json", "kinds")
    assert kinds["one.weight"] == {"step": "whole", "exp_avg": "cut", "exp_avg_sq": "cut"}


# --- what torch has saved ------------------------------------------------------------------------


def named_states(model: nn.Module, optimizer: Any, flat: bool = False) -> tuple[Any, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return get_state_dict(model, optimizer, options=options)


def as_numbers(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def as_names(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, states = named_states(model, optimizer)
    return {"state_dict": weights, "optim_state_dict": states, "epoch": 7}


def as_flat_names(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, states = named_states(model, optimizer, flat=True)
    return {"app": {"model": weights, "optim": states}}


def beside_the_model(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, states = named_states(model, optimizer, flat=True)
    return {**weights, "optimizer": states, "train_state": {"step": torch.tensor(3)}}


@pytest.mark.parametrize("form", [as_numbers, as_names, as_flat_names, beside_the_model])
@pytest.mark.parametrize("how", ["dcp", "torch.save", "converted"])
def test_what_torch_has_saved_loads(tmp_path: Path, form: Any, how: str):
    """A load restores weights, moments, options and the scheduler to the bit."""
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, last_epoch=-1)
    scheduler.last_epoch = 2
    state = form(model, optimizer)
    state.get("app", state)["lr_scheduler"] = scheduler.state_dict()
    source = tmp_path / "source"
    if how == "torch.save":
        torch.save(state, source)
    else:
        dcp.save(state, checkpoint_id=str(source), no_dist=True)
    if how == "converted":
        if form is as_numbers:
            pytest.skip("there is no model to say which parameter has which number")
        assert command("convert", source, tmp_path / "to") == 0
        assert command("verify", tmp_path / "to") == 0
        source = tmp_path / "to"
    other, into = trained(1)
    later = torch.optim.lr_scheduler.StepLR(into, 3)
    found = checkpoint.load(source, other, into, later)
    assert found.verified is (how == "converted")
    assert same(values(other, into), values(model, optimizer))
    assert into.param_groups[0]["lr"] == 0.5 and later.last_epoch == 2
    into.step()


def test_parts_that_a_program_saves_one_by_one(tmp_path: Path):
    model, optimizer = trained()
    weights, states = named_states(model, optimizer)
    for folder, part in (("pytorch_model_fsdp_0", {"model": weights}),
                         ("optimizer_0", {"optimizer": states})):  # fmt: skip
        dcp.save(part, checkpoint_id=str(tmp_path / "a" / folder), no_dist=True)
    other, into = trained(1)
    checkpoint.load(tmp_path / "a", other, into)
    assert same(values(other, into), values(model, optimizer))
    shutil.copytree(tmp_path / "a" / "optimizer_0", tmp_path / "a" / "optimizer_1")
    with pytest.raises(checkpoint.CheckpointError, match="several folders with 'optimizer'"):
        checkpoint.load(tmp_path / "a", other, into)


def hostile_index(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {folder}/evil",)

    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))


def index_with(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        change(index)
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    return write


def cut_file(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)


def leave(index: Any) -> None:
    for info in index.storage_data.values():
        info.relative_path = "../" + info.relative_path


def attributes_of(module: str, name: str, attribute: str) -> Callable[[Path], None]:
    """Return a function that changes an index of DCP, so that pickle's opcode BUILD would set an
    attribute of an allowed class or function when the index is unpickled.
    """
    key = b"X" + struct.pack("<I", len(attribute)) + attribute.encode()
    target = f"c{module}\n{name}\n".encode()

    def write(folder: Path) -> None:
        index = folder / ".metadata"
        rest = pickle.dumps(pickle.loads(index.read_bytes()), protocol=2)[2:]
        index.write_bytes(b"\x80\x02" + target + b"N}" + key + target + b"s\x86b0" + rest)

    return write


def link_index(folder: Path) -> None:
    (folder / ".metadata").rename(folder / "elsewhere")
    (folder / ".metadata").symlink_to("elsewhere")


def name_by_path(index: Any) -> None:
    for info in index.storage_data.values():
        info.relative_path = PurePosixPath(info.relative_path)


METADATA = "torch.distributed.checkpoint.metadata"
REFUSED = "which is not of an index of torch's, .*--trust-pickle reads it all the same"
WRONG_FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "code in the index": (hostile_index, r"has posix.system, which is not of an index of torch's"),
    "attributes of a class": (
        attributes_of("pathlib", "PosixPath", "__planted__"), f"has attributes for .*, {REFUSED}"
    ),
    "attributes of an enumeration": (
        attributes_of(METADATA, "_MEM_FORMAT_ENCODING", "planted"), REFUSED
    ),
    "attributes of a function": (
        attributes_of("torch.serialization", "_get_layout", "planted"), REFUSED
    ),
    "attributes of a class of torch's": (
        attributes_of(METADATA, "StorageMeta", "planted"), REFUSED
    ),
    "an index by a link": (link_index, "is a symbolic link, and links are not followed"),
    "a huge index": (lambda folder: os.truncate(folder / ".metadata", 2 << 30), "is no index"),
    "a file that is no text": (index_with(name_by_path), "which is not in its folder"),
    "a cut index": (lambda folder: os.truncate(folder / ".metadata", 99), "is damaged"),
    "a part is missing": (
        index_with(lambda index: index.state_dict_metadata["model.one.weight"].chunks.clear()),
        "the parts of 'model.one.weight' have 0 elements, the tensor has 35",
    ),
    "no place": (index_with(lambda index: index.storage_data.clear()), "has no place of"),
    "a name at another place": (
        index_with(lambda i: i.planner_data.update({"model.one.bias": ("model", "one>bias")})),
        r"is damaged: 'model.one.bias' stands at \('model', 'one>bias'\)",
    ),
    "a value where a dict is": (
        index_with(lambda i: i.planner_data.update({"model.one.bias": ("model.one", "bias"),
                                                    "model.one.weight": ("model.one",)})),
        "is damaged: 'model.one.weight' stands at",
    ),
    "a name at no place": (
        index_with(lambda i: i.planner_data.update({"": ()})), r"is damaged: '' stands at \(\)"
    ),
    "a cut file": (cut_file, "the file was cut"),
    "a missing file": (lambda folder: next(folder.glob("*.distcp")).unlink(), "is missing"),
    "leaves the folder": (index_with(leave), "which is not in its folder"),
    "strange values": (
        index_with(lambda index: setattr(index, "storage_data", {1: 2})), "has no place of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FOLDERS)
def test_folders_of_dcp_that_do_not_add_up(tmp_path: Path, name: str):
    change, text = WRONG_FOLDERS[name]
    source = tmp_path / "in"
    dcp.save(as_numbers(*trained()), checkpoint_id=str(source), no_dist=True)
    change(source)
    model, optimizer = trained(1)
    before = values(model, optimizer)
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(source, model, optimizer)
    assert same(values(model, optimizer), before) and not (source / "evil").exists()
    assert not hasattr(PurePosixPath, "__planted__") and not hasattr(StorageMeta, "planted")


class EarlyPickler(pickle.Pickler):
    """A pickler that pickles members of enumerations as Python 3.11.2 does. If ``name`` is set,
    each member is pickled under this wrong name.
    """

    name = ""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), self.name or value.name)
        return NotImplemented


def test_an_index_that_an_early_python_3_11_has_written(tmp_path: Path):
    source = tmp_path / "in"
    dcp.save(as_numbers(*trained()), checkpoint_id=str(source), no_dist=True)
    index = pickle.loads((source / ".metadata").read_bytes())
    for name in ("", "mro"):
        with open(source / ".metadata", "wb") as file:
            pickler = EarlyPickler(file)
            pickler.name = name
            pickler.dump(index)
        assert b"getattr" in (source / ".metadata").read_bytes()
        model, optimizer = trained(1)
        with pytest.raises(checkpoint.CheckpointError, match=REFUSED) if name else nullcontext():
            checkpoint.load(source, model, optimizer)
        assert same(values(model, optimizer), values(*trained(1 if name else 0)))


def test_fuzzed_indexes_of_dcp_never_load_wrongly(tmp_path: Path):
    """A changed index is refused or loads the same values. `FUZZ_SECONDS` sets for how long indexes
    are tried.
    """
    rng = random.Random(os.environ.get("FUZZ_SEED", "1"))
    wanted = trained()
    weights, states = named_states(*wanted)
    source = tmp_path / "in"
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=str(source), no_dist=True)
    index, expected = source / ".metadata", values(*wanted)
    original, (model, optimizer) = index.read_bytes(), trained(1)
    before = values(model, optimizer)
    until = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", 0))
    tried = 0
    while tried < 100 or time.monotonic() < until:
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            piece = rng.choice([b"", bytes([data[at] ^ 1 << rng.randrange(8)]), data[:at][-9:]])
            data[at : at + rng.randrange(2)] = piece
        index.write_bytes(data)
        tried += 1
        try:
            checkpoint.load(source, model, optimizer)
        except checkpoint.CheckpointError as error:
            if "values were being read" not in str(error):
                assert same(values(model, optimizer), before), data
                continue
        else:
            assert same(values(model, optimizer), expected), data
        model, optimizer = trained(1)


def test_parts_of_a_tensor_that_are_not_the_whole():
    def problem(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
        size = torch.Size
        chunks = [ChunkStorageMetadata(size(offsets), size(sizes)) for offsets, sizes in boxes]
        return dcp_folder._gap((4, 6), chunks)

    assert problem(((0, 0), (2, 6)), ((2, 0), (2, 6))) == ""
    assert problem(((0, 3), (4, 3)), ((0, 0), (4, 3)), ((4, 0), (0, 6))) == ""
    quarters = [((i, j), (2, 3)) for i in (0, 2) for j in (0, 3)]
    assert problem(*quarters) == ""
    assert "is missing" in problem(*quarters[:3])
    assert "overlap" in problem(*quarters[:3], ((1, 3), (2, 3)))
    assert "overlap" in problem(((0, 0), (2, 6)), ((1, 0), (2, 6)))
    assert "outside of the tensor" in problem(((0, 0), (2, 6)), ((3, 0), (2, 6)))


def test_layouts_that_are_unknown_are_named(tmp_path: Path):
    model, optimizer = trained()
    torch.save({"net": model.state_dict(), "opt": 3}, tmp_path / "net.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"is under 'model'.*'net"):
        checkpoint.load(tmp_path / "net.pt", model)
    torch.save({"model": [model.state_dict()]}, tmp_path / "net.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"'model' is a list, not a state dict.*s"):
        checkpoint.load(tmp_path / "net.pt", model)
    torch.save({"model": model.state_dict(), "optimizer": {"steps": 3}}, tmp_path / "odd.pt")
    with pytest.raises(checkpoint.CheckpointError, match="has 'steps': load without optimizer="):
        checkpoint.load(tmp_path / "odd.pt", model, optimizer)
    torch.save(model, tmp_path / "module.pt")
    with pytest.raises(checkpoint.CheckpointError, match="save state dicts, not modules"):
        checkpoint.load(tmp_path / "module.pt", model)
    torch.save(as_numbers(*trained()), tmp_path / "two.pt")
    groups = [{"params": [model.scale]}, {"params": list(model.one.parameters())}]
    with pytest.raises(checkpoint.CheckpointError, match=r"by number, in groups of \[7\]"):
        checkpoint.load(tmp_path / "two.pt", model, torch.optim.AdamW(groups))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with pytest.raises(checkpoint.CheckpointError, match="holds no scheduler state"):
        checkpoint.load(tmp_path / "two.pt", model, scheduler=scheduler)


def test_wide_and_conjugate_tensors_of_torch(tmp_path: Path, monkeypatch: Any):
    """A complex128 tensor that follows a tensor of 8 bytes is read in several parts. A conjugate
    that shares memory with another tensor is read and converted.
    """
    monkeypatch.setattr(loading, "_WAVE_BYTES", 1 << 14)
    numbers = torch.randn(5000, dtype=torch.complex128)
    state = {"0": torch.ones(1, dtype=torch.float64), "1": numbers, "2": numbers.conj()}
    torch.save(state, tmp_path / "a.pt")
    model = nn.ParameterList([torch.zeros_like(value) for value in state.values()])
    checkpoint.load(tmp_path / "a.pt", model)
    assert same(values(model), state)
    small = {"0": torch.ones(3, dtype=torch.complex64)}
    torch.save({**small, "1": small["0"].conj()}, tmp_path / "b.pt")
    assert command("convert", tmp_path / "b.pt", tmp_path / "to") == 0
    assert set(Opened(tmp_path / "to").model.where) == {"0", "1"}


def test_large_ranges_of_gpus_are_cut_at_whole_elements():
    table = np.array([[8, 8, 3 << 14, 0, 4, 4, 0]])
    parts = [row for part in staging._parts(table, 1 << 14) for row in part]
    assert len(parts) > 3 and sum(row[write.NBYTES] for row in parts) == 3 << 14
    assert all(row[write.IN_TENSOR] % 16 == 0 for row in parts)


class Extra(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.zeros(2)), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_values_of_a_torch_save_file_do_not_change_with_the_file(tmp_path: Path):
    path, threes = tmp_path / "a.pt", torch.full((4096,), 3.0)
    torch.save({"model": Extra((threes, [threes])).state_dict()}, path)
    model = Extra(None)
    checkpoint.load(path, model)
    raw = path.read_bytes()
    nines = raw.replace(threes.numpy().tobytes(), (3 * threes).numpy().tobytes())
    with open(path, "r+b") as file:
        file.write(nines)
    assert nines != raw and torch.equal(model.extra[0], threes)
    assert torch.equal(model.extra[1][0], threes)


EXTRAS = {1: "one", 2: {(3, True): [5, {}], None: {"4": 0.5}}, "x": {}, "y": [{}, {7: 8}]}


@pytest.mark.parametrize("how", ["fsdpc", "dcp", "fsdpc to dcp", "torch.save", "torch's dcp"])
def test_dicts_with_other_keys_than_texts(tmp_path: Path, how: str):
    """A dict keeps keys that are not texts, as in MultiStepLR's Counter of epochs. torch's DCP
    writes every key as a text.
    """

    def make() -> tuple[nn.Module, Any, Any]:
        model = Extra(EXTRAS if how != "torch's dcp" else {"a": 1})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        model.weight.grad = torch.ones(2)
        optimizer.step()
        return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    model, optimizer, scheduler = make()
    scheduler.step()
    path = tmp_path / "a"
    state = {**as_numbers(model, optimizer), "scheduler": scheduler.state_dict()}
    if how == "torch.save":
        torch.save(state, path)
    elif how == "torch's dcp":
        dcp.save(state, checkpoint_id=str(path), no_dist=True)
    else:
        options = {"format": "dcp"} if how == "dcp" else {}
        checkpoint.save(path, model, optimizer, scheduler, **options)
    if how == "fsdpc to dcp":
        assert command("convert", path, path := tmp_path / "b", "--to", "dcp") == 0
    other, into, later = make()
    later.milestones, other.extra = Counter([3]), None
    assert checkpoint.load(path, other, into, later).unexpected == []
    assert other.extra == model.extra and later.milestones == scheduler.milestones
    assert type(later.milestones) is Counter
    for _ in range(3):
        into.step()
        later.step()
    assert into.param_groups[0]["lr"] == pytest.approx(0.01)


def test_keys_that_dcp_cannot_keep(tmp_path: Path):
    model = Extra({torch.float32: 1})
    with pytest.raises(checkpoint.CheckpointError, match="of model._extra_state .*without form"):
        checkpoint.save(tmp_path / "a", model, format="dcp")
    state = {"model": Extra({1: 2}).state_dict()}
    dcp.save(state, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    with pytest.raises(checkpoint.CheckpointError, match="keys '1', which may have been numbers"):
        checkpoint.load(tmp_path / "b", model)


def universal(folder: Path, model: nn.Module, optimizer: Any, stage: int) -> None:
    """Write a folder as DeepSpeed's ``ds_to_universal`` does."""
    for name, param in model.named_parameters():
        (folder / "zero" / name).mkdir(parents=True)
        state = dict(optimizer.state.get(param, {}))
        step = state.pop("step", None)
        for key, value in {"fp32": param.detach().float(), **state}.items():
            content = value.reshape(-1) if stage == 3 else {"param": value, "cat_dim": 0}
            torch.save(content, folder / "zero" / name / f"{key}.pt")
        if stage < 3 and step is not None:
            torch.save(int(step), folder / "zero" / name / "step.pt")
    groups = [{"lr": 0.5, "bias_correction": True, "weight_decay": wd, "params": [n]}
              for n, wd in enumerate((0.0, 0.1))]  # fmt: skip
    common = {"param_groups": groups, "optimizer_state_dict": {"state": {0: {"step": 1}}}}
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    shapes = {name: param.shape for name, param in model.named_parameters()}
    states = {"module": model.state_dict(), "param_shapes": [shapes] if stage == 3 else shapes}
    torch.save(states, folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints_of_deepspeed(tmp_path: Path, stage: int, capsys: Any):
    model, optimizer = trained()
    model.two.float()
    universal(tmp_path / "a", model, optimizer, stage)
    assert command("convert", tmp_path / "a", tmp_path / "b") == 0
    shown = capsys.readouterr().out
    assert "optimizer_state.pt: bias_correction, weight_decay of its groups" in shown
    for name in "ab":
        other, into = trained(1)
        other.two.float()
        checkpoint.load(tmp_path / name, other, into, strict=False)  # `two` has no states
        found = dict(other.named_parameters())
        for key, param in model.named_parameters():
            assert torch.equal(found[key], param)
            for kind, value in optimizer.state.get(param, {}).items():
                assert torch.equal(into.state[found[key]][kind], value)
        assert into.param_groups[0]["lr"] == 0.5
    if stage == 1:
        assert same(values(other), values(model))


def test_of_a_universal_checkpoint_no_file_stays_open(tmp_path: Path):
    model, optimizer = trained()
    universal(tmp_path / "a", model, optimizer, 3)
    before = len(os.listdir("/proc/self/fd"))
    found = torch_files.open_any(tmp_path / "a")
    assert len(os.listdir("/proc/self/fd")) == before + 1  # the folder's descriptor
    names = [name for name, _ in found.stamp[0]]
    assert "zero/scale/fp32.pt" in names and "mp_rank_00_model_states.pt" not in found.left
    (tmp_path / "a" / "zero" / "scale" / "fp32.pt").unlink()
    found.check_unwritten()
    os.utime(tmp_path / "a" / "zero" / "scale" / "exp_avg.pt", (1, 1))
    with pytest.raises(checkpoint.CheckpointError, match="scale/exp_avg.pt was written"):
        found.check_unwritten()


def test_tied_weights_of_a_universal_checkpoint_are_one_fp32_tensor(tmp_path: Path):
    model = nn.ModuleDict({name: nn.Linear(2, 3, bias=False) for name in "ab"}).bfloat16()
    model["b"].weight = model["a"].weight
    universal(tmp_path / "a", model, torch.optim.SGD(model.parameters()), 1)
    value = torch.rand(3, 2)
    torch.save({"param": value}, tmp_path / "a" / "zero" / "a.weight" / "fp32.pt")
    assert command("convert", tmp_path / "a", tmp_path / "b") == 0
    for name in "ab":
        other = nn.ModuleDict({name: nn.Linear(2, 3, bias=False) for name in "ab"})
        other["b"].weight = other["a"].weight
        checkpoint.load_pretrained(other, tmp_path / name)
        assert torch.equal(other["b"].weight, value), name


def test_a_file_called_zero_is_no_checkpoint_of_deepspeed(tmp_path: Path):
    (tmp_path / "zero").touch()
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        checkpoint.load(tmp_path, Net(0))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("objects", "zero/optimizer_state.pt: .*weights_only=True.* refuses"),
        ("no shapes", "exp_avg.pt has 5 elements and no shape.* have None"),
        ("no tensor", "zero/scale/fp32.pt has no tensor"),
        ("link", "zero/scale is a symbolic link"),
        ("parts of ranks", "parts of ranks of DeepSpeed's ZeRO.*ds_to_universal"),
    ],
)
def test_deepspeed_folders_that_do_not_add_up(tmp_path: Path, change: str, text: str):
    model, optimizer = trained()
    universal(tmp_path / "a", model, optimizer, 3)
    folder = tmp_path / "a"
    if change == "objects":
        torch.save({"loss_scaler": PurePosixPath("a")}, folder / "zero" / "optimizer_state.pt")
        left = "\n".join(convert(folder, tmp_path / "b", None, "safetensors"))
        assert re.search(text, left) and "one.bias: their step is not known" in left
        return
    if change == "no shapes":
        (folder / "mp_rank_00_model_states.pt").unlink()
    elif change == "no tensor":
        torch.save({"param": "text"}, folder / "zero" / "scale" / "fp32.pt")
    elif change == "link":
        (folder / "zero" / "scale").rename(tmp_path / "scale")
        (folder / "zero" / "scale").symlink_to(tmp_path / "scale")
    else:
        shutil.rmtree(folder / "zero")
        (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(folder, model)


def test_states_of_megatrons_optimizer_are_left_out(tmp_path: Path):
    state = {f"{start}w": torch.ones(2) for start in ("", "optimizer.state.exp_avg.")}
    dcp.save(state, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    (tmp_path / "a" / "common.pt").touch()
    left = convert(tmp_path / "a", tmp_path / "b", None, "safetensors")
    assert "the optimizer's 1 tensors" in left[0]
    assert set(Opened(tmp_path / "b").model.where) == {"w"}


def test_two_checkpoints_in_one_folder_are_refused(saved: Path):
    model, before = Net(1), values(Net(1))
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(saved), no_dist=True)
    with pytest.raises(checkpoint.CheckpointError, match="holds two checkpoints, .* to another"):
        checkpoint.load(saved, model)
    assert same(values(model), before)


def test_parts_of_a_part_are_read_from_the_file_once(tmp_path: Path, monkeypatch: Any):
    state = {"a": torch.randn(20, 8), "b": torch.randn(10, 4)}
    dcp.save(state, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    folder, reads = dcp_folder.Folder(tmp_path / "a"), []
    read = folder._reader.read_data
    monkeypatch.setattr(folder._reader, "read_data", lambda *args: reads.append(1) or read(*args))
    for name, leaf in folder.tree().items():
        half = state[name].shape[1] // 2
        found = torch.empty(len(state[name]), half)
        for row, target in enumerate(found):
            leaf.read((2 * row + 1) * half, target)
        assert torch.equal(found, state[name][:, half:])
    assert len(reads) == 2


def test_states_of_another_shape(tmp_path: Path):
    """States stored by number do not fit an optimizer that has its parameters in another order."""
    torch.save(as_numbers(*trained()), tmp_path / "a.pt")
    model = Net(1)
    before = values(model)
    one, params = model.one, list(model.parameters())
    params[1:3] = params[2:0:-1]
    optimizer = torch.optim.AdamW(params)
    text = r"exp_avg' has shape \(5, 7\), and parameter 'one.bias' \(5,\)"
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(tmp_path / "a.pt", model, optimizer)
    assert same(values(model), before)

    def small() -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        pair = nn.ParameterList([torch.ones(3), torch.ones(1)])
        optimizer = torch.optim.AdamW(pair.parameters())
        pair[0].sum().backward()
        optimizer.step()
        return pair, optimizer

    pair, optimizer = small()
    torch.save({"model": pair.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "b.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"\(3,\), and parameter '1' \(1,\)"):
        checkpoint.load(tmp_path / "b.pt", pair, torch.optim.AdamW([pair[1], pair[0]]))
    row = {"step": torch.tensor(1.0), "row_var": torch.ones(5, 1), "col_var": torch.ones(1, 7)}
    form = {"state": {0: row}, "param_groups": [{"params": [0]}]}
    torch.save({"model": one.state_dict(), "optimizer": form}, tmp_path / "c.pt")
    tables = torch.optim.Adafactor([one.weight])
    with pytest.raises(checkpoint.CheckpointError, match="strict=False takes"):
        checkpoint.load(tmp_path / "c.pt", one, tables)
    checkpoint.load(tmp_path / "c.pt", one, tables, strict=False)
    assert torch.equal(tables.state[one.weight]["row_var"], torch.ones(5, 1))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, fsdpc.optim.AdamW, torch.optim.SparseAdam])
def test_steps_that_are_integers(tmp_path: Path, kind: Any):
    """Old files have integers as steps. Most optimizers get a tensor instead, as after
    ``load_state_dict``.
    """
    model = nn.Linear(2, 2)
    state = {"step": 3, "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}
    form = {"state": {0: state}, "param_groups": [{"params": [0, 1]}]}
    torch.save({"model": model.state_dict(), "optimizer": form}, tmp_path / "a.pt")
    optimizer = kind(model.parameters())
    checkpoint.load(tmp_path / "a.pt", model, optimizer)
    step = optimizer.state[model.weight]["step"]
    assert step == 3 and isinstance(step, torch.Tensor) is (kind is not torch.optim.SparseAdam)
    if isinstance(step, torch.Tensor):
        assert step.dtype == torch.float32 and step.shape == ()


class Pair(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if tied:
            self.b.weight = self.a.weight


@pytest.mark.parametrize("how", ["fsdpc", "torch"])
def test_two_states_of_one_parameter(tmp_path: Path, how: str):
    model = Pair(False)
    optimizer = torch.optim.AdamW(model.named_parameters())
    (model.a.weight.sum() + 7 * model.b.weight.sum()).backward()
    optimizer.step()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint.save(tmp_path / "a", model, optimizer) if how == "fsdpc" else torch.save(
        parts, tmp_path / "a"
    )
    tied = Pair(True)
    again = torch.optim.AdamW(tied.named_parameters())
    checkpoint.load(tmp_path / "a", tied, again)
    moment = optimizer.state[model.a.weight]["exp_avg"]
    assert torch.equal(tied.a.weight, model.a.weight)
    assert torch.equal(again.state[tied.a.weight]["exp_avg"], moment)
    if how == "torch":
        torch.save({**parts, "model": {"c": torch.ones(2, 2)}}, tmp_path / "b")
        alone = nn.ParameterDict({"c": torch.zeros(2, 2)})
        with pytest.raises(checkpoint.CheckpointError, match="'a.weight' and 'b.weight'.*'c'"):
            checkpoint.load(
                tmp_path / "b", alone, torch.optim.AdamW(alone.parameters()), rename=lambda _: "c"
            )


def test_parts_of_tensors_are_read_as_blocks():
    for shape in [(), (7,), (3, 5), (2, 3, 4), (4, 1, 1), (1, 6)]:
        count = int(np.prod(shape))
        whole = np.arange(count).reshape(shape)
        for begin in range(count):
            for end in range(begin + 1, count + 1):
                found = [
                    whole[tuple(slice(o, o + n) for o, n in zip(*block, strict=True))].reshape(-1)
                    for block in blocks_of(shape, begin, end - begin)
                ]
                assert np.concatenate(found).tolist() == list(range(begin, end)), (shape, begin)


# --- models, folders and objects of other programs -----------------------------------------------


class Rotary(nn.Module):
    """A module with buffers that no checkpoint contains, as in models of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.compute()

    def compute(self) -> None:
        for name, value in (("inv_freq", torch.ones(3)), ("ids", torch.arange(3)),
                            ("mask", torch.ones(2, dtype=torch.bool))):  # fmt: skip
            self.register_buffer(name, value, persistent=False)


def test_buffers_that_nobody_has_written(tmp_path: Path):
    checkpoint.save(tmp_path / "a", nn.ModuleDict({"rope": Rotary()}))
    assert checkpoint.load(tmp_path / "a", nn.ModuleDict({"rope": Rotary()})).missing == []

    def empty() -> nn.Module:
        with torch.device("meta"):
            model = nn.ModuleDict({"rope": Rotary()})
        return model.to_empty(device="cpu")

    model, names = empty(), ["rope.inv_freq", "rope.ids", "rope.mask"]
    before = model["rope"].inner.weight.detach().clone()
    with pytest.raises(checkpoint.CheckpointError, match=f"nobody has .*{', '.join(names)}"):
        checkpoint.load(tmp_path / "a", copy.deepcopy(model))
    assert same_bits(model["rope"].inner.weight, before)
    assert sorted(checkpoint.load(tmp_path / "a", model, strict=False).missing) == sorted(names)
    for write_values in (
        lambda rope: rope.compute(),
        lambda rope: [b.copy_(v) for b, v in zip(rope.buffers(), Rotary().buffers(), strict=True)],
    ):
        model = empty()
        write_values(model["rope"])
        assert checkpoint.load(tmp_path / "a", model).missing == []
    model = empty()
    model["rope"].register_buffer("ids", torch.arange(3, device="meta"), persistent=False)
    assert "rope.ids" in checkpoint.load(tmp_path / "a", model, strict=False).missing
    with torch.device("meta"):
        model = Net()
    with pytest.raises(checkpoint.CheckpointError, match=r"on the meta device, .*model.to_empty"):
        checkpoint.load(tmp_path / "a", model)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.detach().view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("what", ["scheduler", "extra state"])
def test_what_raises_late_changes_nothing(tmp_path: Path, what: str):
    class Fussy(torch.optim.lr_scheduler.SequentialLR):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            self.optimizer.param_groups[0]["lr"] = 7.0
            if what == "scheduler":
                raise KeyError("warmup")

    class Picky(Counted):
        def set_extra_state(self, state: int) -> None:
            super().set_extra_state(state)
            if what == "extra state" and state == 5:
                raise ValueError("not 5")

    def make(count: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = nn.Sequential(Counted(2, 2), Picky(2, 2))
        model[0].count = model[1].count = count
        optimizer = torch.optim.SGD(model.parameters(), lr=count, momentum=0.5)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        parts = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for _ in range(2)]
        scheduler = Fussy(optimizer, parts, milestones=[count])
        for _ in range(count):
            scheduler.step()
        return model, optimizer, scheduler

    checkpoint.save(tmp_path / "a", *make(5))
    model, optimizer, scheduler = make(2)

    def everything() -> str:
        shown = [model.state_dict(), optimizer.state_dict(), scheduler.state_dict()]
        return repr([*shown, vars(scheduler._schedulers[0]), model[0].count, model[1].count])

    before = everything()
    with pytest.raises(checkpoint.CheckpointError, match="KeyError: 'warmup'|ValueError: not 5"):
        checkpoint.load(tmp_path / "a", model, optimizer, scheduler)
    assert everything() == before


def test_objects_that_are_none_or_several(tmp_path: Path):
    model = Net()
    one = torch.optim.AdamW(model.parameters())

    class Container(torch.optim.Optimizer):
        """An optimizer like torchtitan's: a list of optimizers that looks like one optimizer and
        whose own state is empty.
        """

        def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
            super().__init__(model.parameters(), {})
            self.optimizers = optimizers

    trained_one = trained()[1]
    checkpoint.save(tmp_path / "a", model, one)
    for parts, text in (
        ((model, [one, one]), "optimizer must be one torch.optim.Optimizer, not a list: save each"),
        ((model, {"adam": one}), "must be one torch.optim.Optimizer, not a dict"),
        ((model, Container([trained_one])), "optimizer is a Container of 1 optimizers: save each"),
        (
            (model, one, [1]),
            r"scheduler must have \w+\(\), and list has not",
        ),
        (([model],), "model must be a torch.nn.Module, not list"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.save(tmp_path / "b", *parts)
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.load(tmp_path / "a", *parts)
        if len(parts) < 3 and isinstance(parts[0], nn.Module):
            with pytest.raises(checkpoint.CheckpointError, match=text):
                checkpoint.save(tmp_path / "b", *parts, format="dcp")
    for dtype in ("bf16", torch.float8_e4m3fn, torch.int8):
        with pytest.raises(checkpoint.CheckpointError, match="dtype must be torch.float32, bfloat"):
            checkpoint.save(tmp_path / "b", model, dtype=dtype)
    for dtype in ("bf16", "bfloat16"):
        assert command("convert", tmp_path / "a", tmp_path / dtype, "--dtype", dtype) == 0
    assert command("diff", tmp_path / "bf16", tmp_path / "bfloat16") == 0
    assert command("convert", tmp_path / "a", tmp_path / "c", "--dtype", "int8") == 2


def test_a_folder_of_checkpoints_names_them(tmp_path: Path, capsys: Any):
    run = checkpoint.Checkpointer(tmp_path / "run")
    for step in (1, 3, 2):
        run.save(step, Net())
    text = r"in it, of which give one: step-000001, step-000002 \(the newest\), step-000003 \(aband"
    with pytest.raises(checkpoint.CheckpointError, match=text):
        checkpoint.load(tmp_path / "run", Net())
    for words in (["verify"], ["inspect"], ["convert", "to"]):
        assert command(words[0], tmp_path / "run", *[tmp_path / word for word in words[1:]]) == 2
        assert re.search(text, capsys.readouterr().err)
    save_file(dict(Net().state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    shutil.move(tmp_path / "model.safetensors", tmp_path / "out" / "checkpoint-5")
    with pytest.raises(checkpoint.CheckpointError, match="of which give one: checkpoint-5$"):
        checkpoint.load(tmp_path / "out", Net())


def test_folders_of_transformers_with_bin_files(tmp_path: Path, capsys: Any):
    source = dict(trained()[0].state_dict())
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    torch.save(source, one / "pytorch_model.bin")
    (one / "config.json").write_text("{}")
    names, table = list(source), {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: source[name] for name in part}, two / file)
        table |= dict.fromkeys(part, file)
    index = two / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": table}))
    for folder in (one, two):
        model = Net(1)
        assert not checkpoint.load(folder, model).verified
        assert same(values(model), source)
        assert command("verify", folder) == command("convert", folder, tmp_path / "to") == 0
        shown = capsys.readouterr().out.splitlines()[1:]
        assert shown == (["not converted: config.json"] if folder == one else [])
        shutil.rmtree(tmp_path / "to")
    for change, text in (
        ({names[0]: "../x.bin"}, "not in its folder"),
        ({names[0]: "pytorch_model-00002-of-00002.bin"}, "should be in"),
        ({"more": "pytorch_model-00002-of-00002.bin"}, "tensor 'more' is in no file"),
        ({"more": "pytorch_model-00003-of-00002.bin"}, "is missing"),
    ):
        index.write_text(json.dumps({"weight_map": table | change}))
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.load(two, Net())
    hostile_index(one)
    os.rename(one / ".metadata", one / "pytorch_model.bin")
    with pytest.raises(checkpoint.CheckpointError, match="pytorch_model.bin"):
        checkpoint.load(one, Net())
    assert not (one / "evil").exists()


def test_a_comparison_reads_what_it_compares(saved: Path, tmp_path: Path, capsys: Any):
    shutil.copytree(saved, tmp_path / "other")
    place = Opened(saved).model.where["one.bias"][1]
    flip(tmp_path / "other" / "model-00001-of-00001.safetensors", 8 * place.offset)
    assert command("diff", saved, tmp_path / "other") == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        f"one.bias: damaged in {tmp_path / 'other'}, not what its manifest says",
        "one.bias: values differ",
    ]
    assert command("diff", saved, tmp_path / "other", "--quick") == 0
    assert "the tensors were not read" in capsys.readouterr().err


def test_a_conversion_names_all_that_it_leaves_out(tmp_path: Path, capsys: Any):
    model = Pair(True)
    metadata = {"format": "pt", "trained_on": "tea", "b.weight": "a.weight"}
    (tmp_path / "hf").mkdir()
    save_file({"a.weight": model.a.weight}, tmp_path / "hf" / "model.safetensors", metadata)
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "hf" / name).write_text("{}")
    assert command("convert", tmp_path / "hf", tmp_path / "to") == 0
    assert capsys.readouterr().out.splitlines() == [
        "not converted: 'trained_on' in the metadata of model.safetensors",
        "not converted: config.json",
        "not converted: tokenizer.json",
    ]
    assert Opened(tmp_path / "to").aliases == {"b.weight": "a.weight"}
    state = {"model": model.state_dict(), "epoch": 3, "rng": torch.ones(2), "args": {"lr": 1}}
    torch.save(state, tmp_path / "a.pt")
    assert command("convert", tmp_path / "a.pt", tmp_path / "from") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"not converted: {name}" for name in ("epoch", "rng", "args")]


# --- some tensors, other names -------------------------------------------------------------------


def test_only_some_tensors(tmp_path: Path):
    """A save or load takes only the tensors that patterns or a function choose, and only the states
    of these parameters.
    """
    model, optimizer = trained()
    checkpoint.save(tmp_path / "part", model, optimizer, only=["one.*", "scale"])
    stored = Opened(tmp_path / "part")
    assert set(stored.model.where) == {"one.weight", "one.bias", "scale"}
    assert set(stored.values("optimizer/optimizer.json", "kinds")) == {
        "one.weight", "one.bias", "scale",
    }  # fmt: skip
    other, into = trained(1)
    before, expected = values(other, into), values(model, optimizer)
    with pytest.raises(checkpoint.CheckpointError, match="missing from the checkpoint: norm"):
        checkpoint.load(tmp_path / "part", other, into)
    with pytest.raises(checkpoint.CheckpointError, match="checkpoint: norm.weight, two.weight"):
        checkpoint.load(tmp_path / "part", other, only="*.weight")
    assert same(values(other, into), before)
    checkpoint.load(tmp_path / "part", other, into, only=lambda name: name.startswith("one."))
    names = [name for name, _ in other.named_parameters()]
    numbers = {str(i) for i, name in enumerate(names) if name.startswith("one.")}
    for name, value in values(other, into).items():
        ours = name.startswith("one.") or name.partition(".")[0] in numbers
        assert torch.equal(value, (expected if ours else before)[name]), name
    assert into.param_groups[0]["lr"] == 1.5  # unchanged: its group has other parameters, too
    run = checkpoint.Checkpointer(tmp_path / "run", only=(name for name in ["one.*"]))
    run.save(1, model)
    other = Net(1)
    assert run.resume(other).unexpected == []
    assert torch.equal(other.one.weight, model.one.weight)
    for bad, text in (("tow.*", "matches no name of the model"), ([3], "only must be a pattern")):
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.save(tmp_path / "none", model, only=bad)
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.load(tmp_path / "run" / "step-000001", model, only=bad)


def test_other_names(saved: Path, tmp_path: Path):
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(1)

    model, wanted = Inside(), trained()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.load(saved, model, optimizer, rename=lambda name: f"net.{name}")
    assert same(values(model.net, optimizer), values(*wanted))
    table = {"one.weight": "two.weight", "two.weight": "two.weight"}
    with pytest.raises(checkpoint.CheckpointError, match="gives two tensors the name 'two.weight'"):
        checkpoint.load(saved, Net(), rename=table)


class Counted(nn.Linear):
    count = 0

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def test_other_names_of_extra_states_are_known_before_the_load(tmp_path: Path):
    model = nn.ModuleDict({"a": Counted(2, 2), "b": Counted(2, 2)})
    checkpoint.save(tmp_path / "a", model)
    other = nn.ModuleDict({"a": Counted(2, 2), "b": Counted(2, 2)})
    before = [param.detach().clone() for param in other.parameters()]
    table = {name: name for name, _ in model.named_parameters()}
    with pytest.raises(checkpoint.CheckpointError, match="KeyError: 'a._extra_state'"):
        checkpoint.load(tmp_path / "a", other, rename=table.__getitem__)
    with pytest.raises(checkpoint.CheckpointError, match="two extra states the name 'a._extra"):
        checkpoint.load(tmp_path / "a", other, rename={"b._extra_state": "a._extra_state"})
    for param, value in zip(other.parameters(), before, strict=True):
        assert torch.equal(param, value)


def test_a_snapshot_does_not_disturb_other_hooks_of_optimizer_steps():
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer, calls = torch.optim.SGD([param], lr=0.1), []
    call_before_write(lambda: calls.append("copied"))
    user = register_optimizer_step_pre_hook(lambda *_: calls.append("user"))
    try:
        optimizer.step()
        optimizer.step()
    finally:
        user.remove()
    assert calls == ["copied", "user", "user"]


def test_a_step_that_is_removed_while_others_look(tmp_path: Path, monkeypatch: Any):
    """A step is removed after a reader of `latest` has seen the step's folder and before the reader
    opens the step's manifest.
    """
    run = checkpoint.Checkpointer(tmp_path, keep=None)
    for step in (1, 2):
        run.save(step, nn.Linear(2, 2))
    run.wait()
    read = Path.read_bytes

    def removed_first(path: Path) -> bytes:
        if path.parent.name == "step-000001" and path.exists():
            shutil.rmtree(path.parent)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", removed_first)
    assert run.latest() == tmp_path / "step-000002" and run.steps() == [2]
    shutil.rmtree(tmp_path / "step-000002")
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "model.safetensors").touch()  # counts as a damaged step
    with pytest.raises(checkpoint.CheckpointError, match=r"steps \[3\] is damaged or missing"):
        run.latest()


class Full(nn.Module):
    """A module with a buffer of ``n`` elements, which all have the value ``fill``."""

    def __init__(self, n: int, fill: float) -> None:
        super().__init__()
        self.register_buffer("w", torch.full((n,), fill))


class Interrupting:
    """An object that sends a signal to its own process while its state is read."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_save_that_begins_inside_of_another(tmp_path: Path, monkeypatch: Any):
    """The two saves must not share memory. In an earlier version, both saves copied to the same
    buffer: the first checkpoint got the second one's values, with matching checksums.
    """
    write, may_write = background.write_plan, threading.Event()

    def late(*arguments: Any, **more: Any) -> None:
        may_write.wait(60)
        write(*arguments, **more)

    monkeypatch.setattr(background, "write_plan", late)
    models = {"inner": Full(1000, 1.0), "outer": Full(1000, 2.0)}
    handles = []

    def save(*_: Any) -> None:
        handles.append(checkpoint.save(tmp_path / "inner", models["inner"], async_=True))

    before = signal.signal(signal.SIGUSR1, save)
    try:
        states = {"s": Interrupting()}
        path = tmp_path / "outer"
        handles.append(checkpoint.save(path, models["outer"], async_=True, states=states))
    finally:
        signal.signal(signal.SIGUSR1, before)
        may_write.set()
    for handle in handles:
        handle.wait()
    for name, model in models.items():
        found = Full(1000, 0.0)
        checkpoint.load(tmp_path / name, found)
        assert torch.equal(found.w, model.w), name


def wait_in_child(handle: Any, into: Any) -> None:
    try:
        handle.wait()
    except checkpoint.CheckpointError as error:
        into.send(str(error))
    checkpoint.load(Path(into.recv()), Full(3, 0.0))


def test_a_process_forked_during_a_save_in_the_background(tmp_path: Path, monkeypatch: Any):
    """A forked worker must not wait for a thread that exists only in the parent process. In an
    earlier version, a worker of a data loader waited at exit and never ended.
    """
    checkpoint.save(tmp_path / "before", Full(3, 1.0))
    write, may_write = background.write_plan, threading.Event()

    def late(*arguments: Any, **more: Any) -> None:
        may_write.wait(120)
        write(*arguments, **more)

    monkeypatch.setattr(background, "write_plan", late)
    handle = checkpoint.save(tmp_path / "a", Full(3, 2.0), async_=True)
    fork = multiprocessing.get_context("fork")
    ours, its = fork.Pipe()
    child = fork.Process(target=wait_in_child, args=(handle, its))
    child.start()
    try:
        assert ours.poll(60) and f"process {os.getpid()}" in ours.recv()
        ours.send(str(tmp_path / "before"))
        child.join(60)
        assert child.exitcode == 0
    finally:
        child.kill()
        may_write.set()
    handle.wait()
    checkpoint.load(tmp_path / "a", Full(3, 0.0))


@pytest.mark.parametrize("make", [np.int64, torch.tensor, int])
def test_steps_of_other_types(tmp_path: Path, make: Any):
    keeper = checkpoint.Checkpointer(tmp_path)
    keeper.save(make(5), Full(3, 1.0))
    assert keeper.steps() == [5] and keeper.resume(Full(3, 0.0)).step == 5
    checkpoint.save(tmp_path / "a", Full(3, 1.0), step=make(7))
    assert checkpoint.load(tmp_path / "a", Full(3, 0.0)).step == 7


@pytest.mark.parametrize("step, text", [(-1, "at least 0, not -1"), (1.5, "whole number, not 1.5")])
def test_steps_that_no_folder_has(tmp_path: Path, step: Any, text: str):
    """A save with a negative or fractional step is refused at once. ``resume`` would not find the
    folder of a negative step.
    """
    with pytest.raises((ValueError, TypeError), match=text):
        checkpoint.Checkpointer(tmp_path).save(step, Full(3, 1.0))
    assert not list(tmp_path.iterdir())


def test_a_name_that_headers_have_for_themselves(tmp_path: Path):
    """A tensor with the name ``__metadata__`` is refused at once. An earlier version saved such a
    tensor, and no reader accepted the file.
    """
    model = nn.Module()
    model.register_buffer("__metadata__", torch.ones(3))
    with pytest.raises(
        checkpoint.CheckpointError, match="'__metadata__' has no place in safetensors"
    ):
        checkpoint.save(tmp_path / "a", model)
    assert not (tmp_path / "a").exists()


def test_an_expanded_buffer_is_refused_before_anything_is_loaded(tmp_path: Path):
    model = Full(3, 1.0)
    model.register_buffer("mask", torch.ones(1).expand(4))
    checkpoint.save(tmp_path / "a", model)
    model.w.zero_()
    with pytest.raises(checkpoint.CheckpointError, match=r"mask of shape \(4,\) is expanded"):
        checkpoint.load(tmp_path / "a", model)
    assert not model.w.any()
    model.mask = model.mask.clone()
    checkpoint.load(tmp_path / "a", model)
    assert model.w.all()

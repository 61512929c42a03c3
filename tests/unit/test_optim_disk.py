"""Tests of fsdpc.optim with states on a disk, which must equal states in memory. Other tests are
about a full disk, an error in the middle of a step, damaged bytes and a fork.
"""

from __future__ import annotations

import copy
import errno
import gc
import mmap
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fsdpc import _C, checkpoint, optim
from fsdpc._companions.state_layout import ALIGN, PAGE, Wanted, lay_out
from fsdpc.optim import _disk

# pytest's temporary folders may be on a file system in memory. fsdpc warns of such a file system.
pytestmark = pytest.mark.filterwarnings("ignore:.*keeps files in memory")
SHAPES = ((300, 401), (7,), (0, 3), (128, 64), (5,), (90000,))
SMALL = 400_000  # bytes of buffers, so few that the first parameter takes several chunks
MAKERS: dict[str, tuple[torch.dtype, Callable[..., Any]]] = {
    "AdamW": (torch.float32, optim.AdamW),
    "AdamW amsgrad": (torch.float64, lambda p, **k: optim.AdamW(p, amsgrad=True, **k)),
    "Adam bf16": (torch.bfloat16, optim.Adam),
    "SGD": (torch.float32, lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.9, **k)),
    "SGD alone": (torch.float32, lambda p, **k: optim.SGD(p, lr=0.1, **k)),
    "Lion": (torch.float32, optim.Lion),
    "AdamWBF16": (torch.bfloat16, optim.AdamWBF16),
    "AdamMini": (
        torch.float32,
        lambda p, **k: optim.AdamMini(p, block=lambda _, shape: max(shape[-1], 1), **k),
    ),
}


def params_of(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def train(params: list[nn.Parameter], optimizer: Any, steps: range, **options: Any) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        if step == 2:
            params[1].grad = None
        optimizer.step(**options)


def same(one: Any, params: Any, other: Any, others: Any) -> None:
    for a, b in zip(params, others, strict=True):
        assert torch.equal(a, b)
        assert one.state[a].keys() == other.state[b].keys()
        values = (tree_leaves(each.state[p]) for each, p in ((one, a), (other, b)))
        for value, expected in zip(*values, strict=True):
            assert value.shape == expected.shape and torch.equal(value, expected)


@pytest.mark.parametrize("io", ["io_uring", "threads"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_equal_to_states_in_memory(name: str, io: str, tmp_path: Path):
    dtype, make = MAKERS[name]
    clip = {"max_norm": 1.0} if io == "threads" else {}
    disk = optim.Disk(tmp_path, SMALL, checksum=True, io=io, direct=name != "Lion")
    params, others = params_of(dtype), params_of(dtype)
    try:
        one = make(params, offload=disk)
    except NotImplementedError as error:
        pytest.skip(f"io_uring: {error}")
    other = make(others)
    train(params, one, range(4), **clip)
    train(others, other, range(4), **clip)
    same(one, params, other, others)
    assert one._table is None  # steps with states on a disk use no table
    assert os.listdir(tmp_path) == []  # the file of the states has no name


def test_two_groups_gradient_scaler_and_late_parameters(tmp_path: Path):
    ends = []
    for offload in (None, optim.Disk(tmp_path, SMALL)):
        params = params_of(torch.float32)
        optimizer = optim.AdamW(
            [{"params": params[:3], "lr": 1e-2}, {"params": params[3:4]}], offload=offload
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            if step == 1:
                optimizer.add_param_group({"params": params[4:], "weight_decay": 0.5})
            for param in params[: 4 if step == 0 else 6]:
                param.grad = torch.full_like(param, float(8 * (step + 1)))
            if step == 2:
                params[0].grad[0, 0] = float("inf")  # this step is skipped
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        ends.append((optimizer, params))
    same(*ends[0], *ends[1])


def test_state_dicts_from_and_to_torch(tmp_path: Path):
    params, others = params_of(torch.float32), params_of(torch.float32)
    one = optim.AdamW(params, offload=optim.Disk(tmp_path, SMALL))
    other = torch.optim.AdamW(others, fused=True)
    train(others, optim_first := optim.AdamW(others), range(2))
    other.load_state_dict(optim_first.state_dict())
    with torch.no_grad():
        for a, b in zip(params, others, strict=True):
            a.copy_(b)
    one.load_state_dict(other.state_dict())
    train(params, one, range(3, 4))
    train(others, optim_first, range(3, 4))
    same(one, params, optim_first, others)
    resumed = optim.AdamW(params, offload=optim.Disk(tmp_path, SMALL, checksum=True))
    resumed.load_state_dict(copy.deepcopy(one.state_dict()))
    train(params, resumed, range(4, 6))
    train(others, optim_first, range(4, 6))
    same(resumed, params, optim_first, others)
    resumed.state.clear()  # as in a new optimizer, states begin at zero
    optim_first.state.clear()
    train(params, resumed, range(6, 7))
    train(others, optim_first, range(6, 7))
    same(resumed, params, optim_first, others)


@pytest.mark.parametrize("where", ["disk", "host"])
def test_masters_of_narrow_parameters(tmp_path: Path, where: str):
    """A master in float32 trains as a float32 parameter does. Without a GPU, masters of ``Host``
    lie in memory beside the parameters.
    """
    params = params_of(torch.bfloat16)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    host = optim.Host(masters=True)
    away = host if where == "host" else optim.Disk(tmp_path, SMALL, masters=True)
    one = optim.AdamW(params, lr=1e-4, offload=away)
    other = optim.AdamW(wide, lr=1e-4)
    for step in range(4):
        for param, full in zip(params, wide, strict=True):
            generator = torch.Generator().manual_seed(step)
            param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            full.grad = param.grad.float()
        if step == 2:  # the master does not undo a value that the user sets
            with torch.no_grad():
                params[0][0, :5] = 3.0
                wide[0][0, :5] = 3.0
        one.step()
        other.step()
    for param, full in zip(params, wide, strict=True):
        assert torch.equal(param, full.bfloat16())
        assert torch.equal(one.state[param]["master"], full)
    with pytest.raises(ValueError, match="AdamWBF16 has no float32 masters"):
        optim.AdamWBF16(params, offload=away)


def test_states_of_8_bits(tmp_path: Path):
    """Chunks consist of whole blocks. A buffer that cannot hold a page of each state is refused."""
    buffers = 3 * 1024 * (2 * 256 + 2 * 4)
    disk, generator = optim.Disk(tmp_path, buffers, checksum=True), torch.Generator()
    shapes = ((700, 701), (5,), (5000,))
    drawn = [torch.randn(shape, generator=generator.manual_seed(0)) for shape in shapes]
    sets = [[nn.Parameter(value.clone()) for value in drawn] for _ in range(2)]
    kept, away = optim.AdamW8bit(sets[0]), optim.AdamW8bit(sets[1], offload=disk)
    for steps in (range(2), range(2, 4)):
        ends = []
        for params, optimizer in zip(sets, (kept, away), strict=True):
            train(params, optimizer, steps, max_norm=1.0)
            ends.append(tree_leaves([params, *optimizer.state.values()]))
        assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        away = optim.AdamW8bit(sets[1], offload=disk)
        away.load_state_dict(copy.deepcopy(kept.state_dict()))
    train(sets[1], away, range(4, 5))
    saved, before = copy.deepcopy(kept.state_dict()), copy.deepcopy(away.state_dict())
    saved["param_groups"][0].update(min_8bit_size=6000, lr=7.0)
    with pytest.raises(
        ValueError, match=r"group 0 has min_8bit_size=4096, but 6000.*\(5000,\).*new"
    ):
        away.load_state_dict(saved)
    torch.testing.assert_close(away.state_dict(), before, rtol=0, atol=0)
    train(sets[1], away, range(5, 6))
    # If min_8bit_size is 4097 instead of 4096, the same parameters have 8-bit states.
    saved["param_groups"][0]["min_8bit_size"] = 4097
    away.load_state_dict(saved)
    assert away.param_groups[0]["lr"] == 7.0
    other = optim.AdamW8bit(sets[1], offload=disk)  # has taken no step
    other.load_state_dict(
        saved | {"param_groups": [saved["param_groups"][0] | {"min_8bit_size": 6000}]}
    )
    train(sets[1], other, range(1))
    spans = other.state[sets[1][0]]["spans"]
    for wrong in ([], [{"values": spans[0]["codes"]}]):  # as if a user set these states
        other.state[sets[1][0]]["spans"] = wrong
        with pytest.raises(ValueError, match=r"\(700, 701\) .* must be \[\['codes', 'scales'\]\]"):
            train(sets[1], other, range(1, 2))
    other.state[sets[1][0]]["spans"] = spans
    train(sets[1], other, range(1, 2))
    small = optim.AdamW8bit(sets[0], offload=optim.Disk(tmp_path, buffers - 3 * PAGE))
    with pytest.raises(ValueError, match=f"buffer_bytes is too small.*has {buffers // 3}"):
        train(sets[0], small, range(1))


def test_layout_is_disjoint_in_whole_pages():
    rng = random.Random(1)
    for _ in range(200):
        page = rng.choice([PAGE, ALIGN])
        of_blocks = (256, 256, 4, 4) if page == ALIGN else (512, 32)
        items = rng.choice([(4, 4), (8, 8, 8), (2,), (4, 4, 4), (), of_blocks])
        states = tuple((str(k), item) for k, item in enumerate(items))
        wanted = [Wanted(rng.choice([0, 1, 63, 5000, 70000]), states) for _ in range(9)]
        chunk_bytes = rng.choice([32, 33, 50]) * PAGE
        found = lay_out(wanted, chunk_bytes, rng.choice([0, PAGE]), page)
        taken: list[tuple[int, int]] = []
        steps: dict[int, list[tuple[int, int]]] = {}
        for chunk in found.chunks:
            assert chunk.used <= chunk_bytes
            for at, count, place in chunk.parts:
                assert (at | count | place) % page == 0 and count > 0
                taken.append((at, at + count))
            for piece in chunk.slices:
                steps.setdefault(piece.number, []).append((piece.begin, piece.end))
                for place, offset, item in zip(
                    piece.places, found.offsets[piece.number], items, strict=True
                ):
                    # One part of the chunk contains all bytes of the piece's state. Its place in
                    # the buffer corresponds to its place in the file.
                    begin, end = (offset + k * item for k in (piece.begin, piece.end))
                    assert begin == end or any(
                        at <= begin and end <= at + count and place - to == begin - at
                        for at, count, to in chunk.parts
                    )
        taken.sort()
        assert all(a[1] <= b[0] for a, b in zip(taken, taken[1:], strict=False))
        assert not taken or taken[-1][1] <= found.end
        for number, want in enumerate(wanted):
            ends = sorted(steps[number])
            assert ends[0][0] == 0 and ends[-1][1] == want.numel
            assert all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))


# --- failures ------------------------------------------------------------------------------------


@pytest.fixture
def short_files() -> Iterator[Callable[[int], None]]:
    """Provide a function that limits the size of files: a write beyond the limit fails."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_an_error_in_the_middle_of_a_step(
    tmp_path: Path, short_files: Callable[[int], None], io: str
):
    params, others = params_of(torch.float32), params_of(torch.float32)
    disk = optim.Disk(tmp_path, SMALL, io=io)
    one, other = optim.AdamW(params, offload=disk), optim.AdamW(others)
    train(params, one, range(2))
    train(others, other, range(2))
    saved, states = [p.detach().clone() for p in params], copy.deepcopy(one.state_dict())
    short_files(500_000)  # the third chunk cannot be written
    with pytest.raises(OSError, match=r"rank 0: writing \d+ bytes at byte \d+") as error:
        train(params, one, range(2, 3))
    assert error.value.errno == errno.EFBIG
    short_files(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    for use in (lambda: train(params, one, range(3, 4)), one.state_dict, lambda: one.state.items()):
        with pytest.raises(optim.DiskError, match="ended in the middle.*Load a checkpoint"):
            use()
    with torch.no_grad():
        for param, value in zip(params, saved, strict=True):
            param.copy_(value)
    one.load_state_dict(states)
    train(params, one, range(2, 4))
    train(others, other, range(2, 4))
    same(one, params, other, others)


def test_an_error_before_the_first_write_changes_nothing(tmp_path: Path):
    params = params_of(torch.float32)
    optimizer = optim.AdamW(params, offload=optim.Disk(tmp_path, SMALL))
    train(params, optimizer, range(1))
    before = [p.detach().clone() for p in params]
    store = optimizer._store
    os.truncate(_C.disk_info(store.disk)["fd"], 0)
    with pytest.raises(OSError, match="rank 0: reading .* at byte 0 .*, which ends there"):
        train(params, optimizer, range(1, 2))
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert optimizer.state.broken is None


def test_a_full_disk(tmp_path: Path):
    optimizer = optim.AdamW(params_of(torch.float32), offload=optim.Disk(tmp_path))
    free = os.statvfs(tmp_path)
    bytes_needed = free.f_bavail * free.f_frsize + (1 << 40)
    with pytest.raises(OSError, match=rf"rank 0: reserving {bytes_needed} bytes .*bytes are free"):
        _C.disk_grow(optimizer._store.disk, bytes_needed)
    train(optimizer.param_groups[0]["params"], optimizer, range(1))
    with pytest.raises(OSError, match="rank 0: making a file of states in /nowhere"):
        optim.AdamW([nn.Parameter(torch.ones(3))], offload=optim.Disk("/nowhere"))


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="/dev/shm is no file system of its own")
def test_a_folder_in_memory_is_pointed_out():
    with pytest.warns(
        UserWarning, match="/dev/shm lies in a file system that keeps files in memory"
    ):
        optim.AdamW(params_of(torch.float32), offload=optim.Disk("/dev/shm", SMALL))


def test_damaged_bytes(tmp_path: Path):
    params = params_of(torch.float32)
    optimizer = optim.AdamW(params, offload=optim.Disk(tmp_path, SMALL, checksum=True))
    train(params, optimizer, range(2))
    optimizer.state[params[0]]["exp_avg"].zero_()  # a value that the user sets is no damage
    train(params, optimizer, range(2, 3))
    os.pwrite(_C.disk_info(optimizer._store.disk)["fd"], b"\x01\x02\x03", PAGE)
    with pytest.raises(optim.DiskError, match=r"are not what was written there \(checksum\)"):
        train(params, optimizer, range(3, 4))


def test_a_fork_cannot_use_the_file(tmp_path: Path):
    params = params_of(torch.float32)
    optimizer = optim.AdamW(params, offload=optim.Disk(tmp_path, SMALL))
    train(params, optimizer, range(1))
    child = os.fork()
    if child == 0:
        try:
            train(params, optimizer, range(1, 2))
        except _C.StateError as error:
            os._exit(0 if "belongs to the process" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(params, optimizer, range(1, 2))


@pytest.mark.parametrize("io", ["io_uring", "threads"])
def test_a_fork_that_frees_the_optimizer_keeps_its_own_memory(io: str, tmp_path: Path):
    """In an earlier version, a forked child had a hole in its memory where the buffers had been.
    The child mapped other memory into this hole and lost it when the child freed the optimizer.
    """
    params = params_of(torch.float32)
    optimizer = optim.AdamW(params, offload=optim.Disk(tmp_path, SMALL, io=io))
    train(params, optimizer, range(1))
    child = os.fork()
    if child == 0:
        later = [mmap.mmap(-1, SMALL // 3) for _ in range(100)]
        del params, optimizer
        gc.collect()
        for memory in later:
            memory[:] = bytes(SMALL // 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(params, optimizer, range(1, 2))


def test_refused(tmp_path: Path):
    params = params_of(torch.float32)
    with pytest.raises(ValueError, match="buffer_bytes must be at least"):
        optim.Disk(tmp_path, 1000)
    with pytest.raises(ValueError, match="io must be"):
        optim.Disk(tmp_path, io="aio")
    with pytest.raises(TypeError, match="offload must be a fsdpc.optim.Disk"):
        optim.AdamW(params, offload=str(tmp_path))
    optimizer = optim.AdamW(params, offload=optim.Disk(tmp_path, SMALL))
    train(params, optimizer, range(1))
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="max_exp_avg_sq.*before the first step"):
        train(params, optimizer, range(1, 2))


def test_buffers_and_transfers_are_refused_by_the_extension(tmp_path: Path):
    store = _disk.Store(optim.Disk(tmp_path, SMALL), "test")
    _C.disk_grow(store.disk, 4 * PAGE)
    for parts in ([(1, PAGE, 0)], [(0, PAGE, 1 << 40)], [(4 * PAGE, PAGE, 0)], [(0, 0, 0)]):
        with pytest.raises(ValueError, match="a part lies outside of the file"):
            _C.disk_start(store.disk, False, 0, parts)
    with pytest.raises(ValueError, match="buffer 3 does not exist"):
        _C.disk_start(store.disk, False, 3, [])
    for wrong in ([bytearray(PAGE + 1)], [bytearray(100)]):
        with pytest.raises(ValueError, match="buffers are needed, in whole pages"):
            _C.disk_open(str(tmp_path), 0, wrong)
    with pytest.raises(ValueError, match="io 'x'"):
        _C.disk_open(str(tmp_path), 0, store.buffers, "x")
    with pytest.raises((ValueError, TypeError)):
        _C.disk_wait(object(), 0)


# --- checkpoints ---------------------------------------------------------------------------------


def test_checkpoints_are_read_into_the_file(tmp_path: Path):
    (tmp_path / "states").mkdir()
    model = nn.Linear(300, 401)
    one = optim.AdamW(model.parameters(), offload=optim.Disk(tmp_path / "states", SMALL))
    params = list(model.parameters())

    def grads(step: int) -> None:
        for param in params:
            param.grad = torch.full_like(param, float(step))

    grads(1)
    one.step()
    checkpoint.save(tmp_path / "saved", model, one)
    values: list[Tensor] = [p.detach().clone() for p in params]
    grads(2)
    one.step()
    after = [p.detach().clone() for p in params]
    other = optim.AdamW(params, offload=optim.Disk(tmp_path / "states", SMALL, checksum=True))
    for _ in range(2):  # first into a new optimizer, then into one with states
        checkpoint.load(tmp_path / "saved", model, other)
        assert all(torch.equal(a, b) for a, b in zip(params, values, strict=True))
        own = other._store.held[params[0]][0]["exp_avg"]
        assert other.state[params[0]]["exp_avg"].data_ptr() == own.data_ptr()
        grads(2)
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(params, after, strict=True))
    last = optim.AdamW(params, offload=optim.Disk(tmp_path / "states", SMALL))
    checkpoint.load(tmp_path / "saved", model, last)
    last.state.clear()  # states begin at zero, not at the loaded values
    last.step()
    moved = 0.1 * params[0].grad
    torch.testing.assert_close(last.state[params[0]]["exp_avg"], moved)


@pytest.mark.parametrize("where", ["disk", "host"])
def test_narrow_states_of_a_checkpoint_become_wide_beside_masters(tmp_path: Path, where: str):
    """If an optimizer has float32 masters, it converts bfloat16 states that it loads to float32.
    This holds for states from a checkpoint and from a state dict. Without a GPU, ``Host`` keeps
    states beside the parameters.
    """
    model = nn.Linear(30, 40).bfloat16()
    params = list(model.parameters())
    plain = optim.AdamW(params)
    train(params, plain, range(1))
    checkpoint.save(tmp_path / "saved", model, plain)
    values = [p.detach().clone() for p in params]
    host = optim.Host(masters=True)
    away = host if where == "host" else optim.Disk(tmp_path, SMALL, masters=True)
    optimizers = [optim.AdamW(params, offload=away) for _ in range(3)]
    found = []
    for number, optimizer in enumerate(optimizers):
        if number == 0:
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        elif number == 1:
            checkpoint.load(tmp_path / "saved", model, optimizer)
        else:  # as if a user set the states
            for param in params:
                optimizer.state[param] = copy.deepcopy(plain.state[param])
        wide = {v.dtype for state in optimizer.state.values() for v in state.values()}
        assert number == 2 or wide == {torch.float32}
        with torch.no_grad():
            for param, value in zip(params, values, strict=True):
                param.copy_(value)
        train(params, optimizer, range(1, 2))
        found.append(
            {(i, k): v for i, p in enumerate(params) for k, v in optimizer.state[p].items()}
        )
    for other in found[1:]:
        assert other.keys() == found[0].keys() and len(other) == 8
        for key, value in found[0].items():
            assert other[key].dtype == torch.float32 and torch.equal(other[key], value), key

"""Tests of the memory that a state dict needs,
measured as the peak of the process above its steady state.

The kernel records the peak (VmHWM) and lets a process set it back to the present size (clear_refs).
"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from checkpoints import FULL, SHARDED, typed
from harness import run_ranks
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from toys import wrap

UNITS = 8  # seven layers and the root's own parameters
UNIT_MB = 8
MODEL_MB = UNITS * UNIT_MB
NOISE_MB = 1.0
ON_RANK_0 = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, UNIT_MB * 256))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(UNITS - 1))
        self.weight = nn.Parameter(torch.ones(1024, UNIT_MB * 256))


def megabytes(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def peak_of(call) -> float:
    """Return the peak growth of this process during the call, in MB, with the call's result."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = megabytes("VmRSS")
    result = call()
    peak = megabytes("VmHWM") - before
    del result
    return peak


def give_back_at_once() -> None:
    """Make malloc map every large block separately, so that no freed memory stays in the heap."""
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 20) == 1


def measure(rank, world, kind, config, engine, load):
    give_back_at_once()
    model = wrap(engine, Stack(), auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True)
    with typed(model, kind, config):
        # This call maps pages of other ranks before the peak is measured. Such pages count as
        # memory of this process, but they exist anyway.
        kept = [model.state_dict()]
        if load:
            return peak_of(lambda: model.load_state_dict(kept[0]))
        kept.clear()
        return peak_of(model.state_dict)


def peaks(kind, config=None, *, wire=None, engine="fsdpc", load=False, world=2):
    env = {"FSDPC_COLLECTIVES": wire} if wire else {}
    found = run_ranks(measure, world, env=env, kind=kind, config=config, engine=engine, load=load)
    what = "load" if load else "save"
    print(
        f"\n{engine} {kind.name} {what}, {wire or 'shared memory'}: peak above the steady state "
        f"{', '.join(f'{p:.1f}' for p in found)} MB (unit {UNIT_MB} MB, model {MODEL_MB} MB)"
    )
    return found


@pytest.mark.parametrize("wire", [None, "wire"])
def test_full_on_ranks_that_do_not_keep_it(wire):
    keeping, other = peaks(FULL, ON_RANK_0, wire=wire)
    assert MODEL_MB - NOISE_MB < keeping < MODEL_MB + UNIT_MB + NOISE_MB
    assert other < (UNIT_MB + NOISE_MB if wire else NOISE_MB)


@pytest.mark.parametrize("wire", [None, "wire"])
def test_sharded_gathers_nothing(wire):
    """A save costs a rank the memory of its own rows and, over a wire, also a transfer buffer."""
    extra = UNIT_MB + NOISE_MB if wire else NOISE_MB
    for peak in peaks(SHARDED, wire=wire):
        assert peak < MODEL_MB / 2 + extra


@pytest.mark.parametrize("wire", [None, "wire"])
def test_loading_sharded_gathers_nothing(wire):
    """A rank holds rows of two units at a time, those of the root and of one layer. The dict is not
    counted, because it exists before the load.
    """
    extra = UNIT_MB + NOISE_MB if wire else NOISE_MB
    for peak in peaks(SHARDED, wire=wire, load=True):
        assert peak < 2 * UNIT_MB / 2 + extra


def test_loading_full():
    """A rank holds full copies of two units at a time. The dict exists before the load."""
    for peak in peaks(FULL, load=True):
        assert peak < 2 * UNIT_MB + NOISE_MB

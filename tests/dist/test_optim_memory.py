"""Tests of the memory that an optimizer state dict needs, measured as in test_state_memory."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from test_state_memory import (
    MODEL_MB,
    NOISE_MB,
    UNIT_MB,
    Layer,
    Stack,
    give_back_at_once,
    peak_of,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from toys import wrap

from fsdpc._spans.window import WINDOW_BYTES

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
WINDOW_MB = WINDOW_BYTES / 2**20
OWN_MB = 2 * MODEL_MB / 2  # a rank's shards of both moments


def measure(rank, world, config, use_orig_params, load):
    give_back_at_once()
    model = wrap(
        "fsdpc",
        Stack(),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=use_orig_params,
    )
    optim = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optim.step()
    optim.zero_grad()
    kind = FULL if isinstance(config, FullOptimStateDictConfig) else SHARDED
    with type(model).state_dict_type(model, kind, None, config):
        held = [type(model).optim_state_dict(model, optim)]
        if load:
            return peak_of(lambda: type(model).optim_state_dict_to_load(model, optim, held[0]))
        held.clear()
        return peak_of(lambda: type(model).optim_state_dict(model, optim))


def peaks(config, *, wire, use_orig_params, load=False):
    env = {"FSDPC_COLLECTIVES": wire} if wire else {}
    found = run_ranks(
        measure, 2, env=env, config=config, use_orig_params=use_orig_params, load=load
    )
    print(
        f"\n{type(config).__name__} {'load' if load else 'save'}, {wire or 'shared memory'}: "
        f"peak {', '.join(f'{p:.1f}' for p in found)} MB (unit {UNIT_MB}, moments of a rank "
        f"{OWN_MB:.0f} MB)"
    )
    return found


def cases(function):
    function = pytest.mark.parametrize("use_orig_params", [True, False], ids=["orig", "flat"])(
        function
    )
    return pytest.mark.parametrize("wire", [None, "wire"], ids=["shared", "wire"])(function)


@pytest.mark.long
@cases
def test_a_rank_that_keeps_nothing_holds_a_window(wire, use_orig_params):
    config = FullOptimStateDictConfig(rank0_only=True)
    saved = peaks(config, wire=wire, use_orig_params=use_orig_params)
    # Over a wire, torch has a buffer of one window, too.
    assert saved[1] <= 2 * WINDOW_MB + NOISE_MB
    assert saved[0] <= 2 * MODEL_MB + 2 * WINDOW_MB + NOISE_MB
    loaded = peaks(config, wire=wire, use_orig_params=use_orig_params, load=True)
    assert max(loaded) <= OWN_MB + 2 * WINDOW_MB + NOISE_MB


@pytest.mark.long
@cases
def test_rows_cost_themselves_and_a_window(wire, use_orig_params):
    config = ShardedOptimStateDictConfig()
    for load in (False, True):
        found = peaks(config, wire=wire, use_orig_params=use_orig_params, load=load)
        assert max(found) <= OWN_MB + 2 * WINDOW_MB + NOISE_MB

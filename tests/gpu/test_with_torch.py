"""Tests of what torch does differently on a GPU, around sharded modules: autocast, loss scaling,
compiling.
"""

from __future__ import annotations

import pytest
import runs
import torch
from torch import nn

import fsdpc
from fsdpc.sharded_grad_scaler import ShardedGradScaler


@pytest.fixture
def place(device, group) -> torch.device:
    """Return the device for the models. This fixture also starts the process group."""
    return device.device


def test_autocast(place):
    def losses(module: nn.Module) -> list[float]:
        optimizer, found = runs.adamw(module), []
        for step in range(runs.STEPS):
            with torch.autocast(place.type, dtype=torch.bfloat16):
                loss = runs.loss_of(module, place, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    want = losses(runs.model(place))
    runs.close(losses(runs.wrap(runs.model(place), place)), want, 1e-2)


def test_scaled_losses_in_fp16(place):
    """If a gradient is not finite, the scaler skips the step and halves the scale. Then training
    goes on."""
    half = fsdpc.MixedPrecision(torch.float16, torch.float32)
    model = runs.wrap(runs.model(place), place, mixed_precision=half)
    optimizer, losses = runs.adamw(model), []
    scaler = ShardedGradScaler(place.type, init_scale=1024.0)
    for step in range(3):
        loss = runs.loss_of(model, place, 0)
        losses.append(float(loss.detach()))
        scaler.scale(loss * float("inf") if step == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    runs.close(losses[:1], losses[1:2])
    assert losses[2] < losses[1]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.real_gpu
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiled(place, precision):
    options = {}
    if precision is not None:
        options["mixed_precision"] = fsdpc.MixedPrecision(precision, torch.float32)
    want = runs.train(runs.wrap(runs.model(place), place, **options), place)
    module = runs.model(place)
    for block in module.blocks:
        block.compile()
    got = runs.train(runs.wrap(module, place, **options), place)
    runs.close(got, want, 1e-4 if precision is None else 2e-2)

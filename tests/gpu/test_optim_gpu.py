"""Tests of fsdpc's optimizers on a GPU: their results are those of the same optimizers on the CPU,
and those of torch's fused optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import runs
import torch
from torch import Tensor, nn

from fsdpc import optim

SHAPES = [(3, 5), (1,), (257, 33), (5000,), (0,), (64, 512)]
KINDS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1},
    "SGD": {"lr": 1e-1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "AdamW8bit": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamWBF16": {"lr": 1e-2, "weight_decay": 0.1},
    "AdamMini": {"lr": 1e-2, "weight_decay": 0.1},
}
STEPS = 4


@contextmanager
def no_host_sync(place: torch.device) -> Iterator[None]:
    """Make torch raise an error where the host waits for a GPU."""
    if place.type != "cuda":
        yield
        return
    torch.cuda.synchronize(place)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def place(device, group) -> torch.device:
    return device.device


def stepped(make: Any, place: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Return parameters after some steps, whose gradients depend only on the step."""
    rng = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=rng).to(place, dtype)) for shape in SHAPES]
    optimizer = make([(str(i), p) for i, p in enumerate(params)])
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn(param.shape, generator=rng).to(place, dtype)
        optimizer.step()
    return [param.detach().cpu() for param in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_processors(place, kind, dtype):
    """The parameters on the GPU are bitwise those on the CPU. AdamMini is an exception, because the
    GPU adds sums of squares in another order."""

    def make(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        return getattr(optim, kind)(named, **KINDS[kind])

    on_gpu, on_cpu = (stepped(make, where, dtype) for where in (place, torch.device("cpu")))
    for shape, got, want in zip(SHAPES, on_gpu, on_cpu, strict=True):
        if kind == "AdamMini":
            torch.testing.assert_close(got, want)
            continue
        different = int((got != want).sum())
        assert not different, (
            f"{shape}: {different} of {got.numel()} elements differ, by "
            f"{float((got - want).abs().max())} at most"
        )


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD"])
def test_values_are_torchs(place, kind):
    def ours(named):
        return getattr(optim, kind)(named, **KINDS[kind])

    def theirs(named):
        fused = place.type == "cuda"
        return getattr(torch.optim, kind)([p for _, p in named], **KINDS[kind], fused=fused)

    for got, want in zip(*(stepped(m, place, torch.float32) for m in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offload", [None, optim.Host()], ids=["device", "host"])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Lion", "AdamW8bit", "AdamMini"])
def test_a_sharded_model_trains(place, kind, offload):
    """Losses fall, and the host does not wait. Optimizer states that are kept in host memory give
    the same losses."""
    found = []
    for where in dict.fromkeys((None, offload)):
        model = runs.wrap(runs.model(place), place)
        options = {} if where is None else {"offload": where}
        optimizer = getattr(optim, kind)(model.parameters(), lr=1e-2, **options)
        losses = runs.train(model, place, optimizer=optimizer, steps=[0, 0])
        if place.type == "cuda":
            runs.loss_of(model, place, 0).backward()
            with no_host_sync(place):
                norm = optimizer.step_and_clip(0.5)
            optimizer.zero_grad()
            assert float(norm) > 0
        losses += runs.train(model, place, optimizer=optimizer, steps=[0, 0])
        assert losses[-1] < losses[0], losses
        found.append(losses)
    if len(found) > 1:
        runs.close(*found)


def test_muon_is_torchs(place):
    """The parameters are bitwise equal, because fsdpc and torch make the same products of the same
    matrices."""
    found = []
    for library in (optim, torch.optim):
        rng = torch.Generator().manual_seed(0)
        shapes = [(64, 512), (257, 33), (24, 24)]
        params = [nn.Parameter(torch.randn(shape, generator=rng).to(place)) for shape in shapes]
        optimizer = library.Muon(params, lr=1e-2)
        for _ in range(STEPS):
            for param in params:
                param.grad = torch.randn(param.shape, generator=rng).to(place)
            optimizer.step()
        found.append([param.detach().cpu() for param in params])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want), float((got - want).abs().max())


def test_a_sharded_model_trains_by_muon(place):
    """The sharded model trains as the plain one does, and the host does not wait."""
    found = []
    for model in (runs.model(place), runs.wrap(runs.model(place), place)):
        optimizer = optim.Muon(model.named_parameters(), lr=1e-2)
        losses = runs.train(model, place, optimizer=optimizer, steps=[0, 1])
        runs.loss_of(model, place, 2).backward()
        with no_host_sync(place):
            optimizer.step()
        optimizer.zero_grad()
        found.append(losses + runs.train(model, place, optimizer=optimizer, steps=[2, 0]))
    runs.close(*found, tolerance=1e-3)
    assert found[0][-1] < found[0][0], found


def test_averages(place):
    """The averages of the parameters are bitwise those that this test computes. The host does not
    wait when the averages are updated, nor when they replace the parameters."""
    model = runs.wrap(runs.model(place), place)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    average, by_hand = optim.Average(optimizer, 0.75), []
    for step in range(STEPS):
        runs.loss_of(model, place, step).backward()
        with no_host_sync(place):
            optimizer.step()
        optimizer.zero_grad()
        values = [p.detach().clone() for p in model.parameters()]
        earlier = by_hand or values
        by_hand = [a.lerp(v, 0.25) for a, v in zip(earlier, values, strict=True)]
    with no_host_sync(place):
        applied = average.applied(model)
        applied.__enter__()
    for param, value in zip(model.parameters(), by_hand, strict=True):
        assert torch.equal(param, value)
    applied.__exit__(None, None, None)
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(param, value)


def test_stepped_in_backward(place):
    def losses(in_backward: bool) -> list[float]:
        model = runs.wrap(runs.model(place), place)
        if not in_backward:
            return runs.train(model, place, optimizer=optim.AdamW(model.parameters(), lr=1e-2))
        optimizer = optim.in_backward(model, lambda named: optim.AdamW(named, lr=1e-2))
        return runs.train(model, place, optimizer=optimizer)

    runs.close(losses(True), losses(False))


def test_states_go_on_in_torchs_class(place):
    model = runs.wrap(runs.model(place), place)
    ours = optim.AdamW(model.parameters(), lr=1e-2)
    runs.train(model, place, optimizer=ours, steps=[0, 1])
    weights = [p.detach().clone() for p in model.parameters()]
    state = ours.state_dict()
    found = []
    for cls in (optim.AdamW, torch.optim.AdamW):
        with torch.no_grad():
            for param, value in zip(model.parameters(), weights, strict=True):
                param.copy_(value)
        other = cls(model.parameters(), lr=1e-2)
        other.load_state_dict(state)
        found.append(runs.train(model, place, optimizer=other, steps=[2, 3]))
    runs.close(*found)

"""Tests that a step allocates no memory, and that the host does not wait for the GPU in a step."""

from __future__ import annotations

import gc

import pytest
import runs
import torch

from fsdpc import _C


@pytest.fixture
def trained(device, group):
    """A model after three steps in bf16, and its optimizer."""
    import fsdpc

    precision = fsdpc.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = runs.wrap(runs.model(device.device), device.device, mixed_precision=precision)
    optimizer = runs.adamw(model)
    runs.train(model, device.device, optimizer=optimizer, steps=range(3))
    device.synchronize()
    return model, optimizer


def test_memory_stays(trained, device):
    model, optimizer = trained
    gc.collect()
    before = device.memory()
    runs.train(model, device.device, optimizer=optimizer, steps=range(3, 9))
    gc.collect()
    device.synchronize()
    after = device.memory()
    assert after["peak_reserved"] == before["peak_reserved"]
    assert after["allocated"] == before["allocated"]


@pytest.mark.real_gpu
def test_the_driver_gives_nothing_more(trained, device):
    """The memory in use on the whole device does not grow, even outside of torch's allocator."""
    model, optimizer = trained
    gc.collect()  # else objects of earlier tests might be freed during this test, and hide growth
    before = device.memory()["in_use"]
    runs.train(model, device.device, optimizer=optimizer, steps=range(3, 9))
    device.synchronize()
    assert device.memory()["in_use"] <= before


@pytest.mark.real_gpu
def test_the_host_does_not_wait(trained, device):
    """The test would notice a wait of the host in three ways. torch raises an error where its
    operators wait. The profiler sees other calls of CUDA's runtime that wait. The engine, which
    waits by polling, counts its own waits.
    """
    from gpu import timeline

    model, optimizer = trained
    inputs, targets = runs.batch(device.device, 5)

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(
            model(inputs).float().flatten(0, 1), targets.flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    before = _C.cuda_waits(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert timeline.record(step, device).waits == 0
    assert _C.cuda_waits(0) == before


def test_waits_are_counted(device, group):
    """Gradients are offloaded, and the optimizer reads them on the host, so the host must wait for
    the GPU in each step. The engine counts these waits."""
    import fsdpc

    offload = fsdpc.CPUOffload(offload_params=True)
    model = runs.wrap(runs.model(device.device), device.device, cpu_offload=offload)
    optimizer = runs.adamw(model)
    runs.train(model, device.device, optimizer=optimizer, steps=[0])
    before = _C.cuda_waits(0)
    runs.train(model, device.device, optimizer=optimizer, steps=[1])
    assert _C.cuda_waits(0) > before


def test_counted_by_the_simulated_gpu(trained, device):
    """The simulated GPU counts every driver call: a step has no waits and no allocations."""
    if not device.dry:
        pytest.skip("a real GPU does not count calls")
    import simgpu

    model, optimizer = trained
    before = _C.cuda_waits(0)
    with simgpu.counting() as cost:
        runs.train(model, device.device, optimizer=optimizer, steps=[3])
    assert _C.cuda_waits(0) == before
    assert cost["launches"] > 0
    assert cost["host_syncs"] == 0
    assert cost["allocations"] == 0

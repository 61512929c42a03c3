"""What a step costs beside its work: no memory asked for, no wait of the host."""

from __future__ import annotations

import gc

import pytest
import runs
import torch

from fsdpc import _C


@pytest.fixture
def trained(device, group):
    """A model after three steps in bf16, its optimizer and its place."""
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
    """Memory in use on the whole device, not only by torch's allocator, does not grow."""
    model, optimizer = trained
    gc.collect()  # what other tests left may end in this one, and give memory back
    before = device.memory()["in_use"]
    runs.train(model, device.device, optimizer=optimizer, steps=range(3, 9))
    device.synchronize()
    assert device.memory()["in_use"] <= before


@pytest.mark.real_gpu
def test_the_host_does_not_wait(trained, device):
    """torch raises where its operators wait, the profiler sees what else calls CUDA's runtime, and
    the engine, which waits by asking again and again, counts by itself.
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
    """The optimizer reads offloaded gradients on the host: each step waits, which is counted."""
    import fsdpc

    offload = fsdpc.CPUOffload(offload_params=True)
    model = runs.wrap(runs.model(device.device), device.device, cpu_offload=offload)
    optimizer = runs.adamw(model)
    runs.train(model, device.device, optimizer=optimizer, steps=[0])
    before = _C.cuda_waits(0)
    runs.train(model, device.device, optimizer=optimizer, steps=[1])
    assert _C.cuda_waits(0) > before


def test_counted_by_the_simulated_gpu(trained, device):
    """On the simulated GPU every driver call is counted: a step has no waits and no allocations."""
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

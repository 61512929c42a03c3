"""Memory of a simulated GPU that comes from an allocator in Python, such as torch's."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import ranks
from torch import nn

from fsdpc import _C, FullyShardedDataParallel, OutOfMemoryError, memory_stats

sys.path.append(str(Path(__file__).parents[1] / "simgpu" / "python"))
import env
import simgpu

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
GPU = env.environment()
SPECS = [("weight", 1000, "float32", "bfloat16", "float32", True)]


class Cache:
    """A substitute for torch's caching allocator, which calls the driver for each block."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL(os.environ["FSDPC_LIBCUDA"])
        self.sizes: dict[int, int] = {}
        self.calls: Counter[str] = Counter()
        self.streams: set[int] = set()
        self.full = False

    def alloc(self, size: int, stream: int) -> int:
        self.calls["alloc"] += 1
        self.streams.add(stream)
        if self.full:
            raise torch.OutOfMemoryError("GPU 0 has a total capacity of nothing")
        address = ctypes.c_uint64()
        assert self.driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        self.sizes[address.value] = size
        return address.value

    def free(self, address: int) -> None:
        self.calls["free"] += 1
        del self.sizes[address]
        assert self.driver.cuMemFree_v2(ctypes.c_uint64(address)) == 0

    def trim(self) -> None:
        self.calls["trim"] += 1

    def serve(self) -> None:
        _C.set_cuda_allocator(0, self.alloc, self.free, self.trim)

    def out(self) -> int:
        return sum(self.sizes.values())


@ranks(1, env=GPU)
def test_a_unit_comes_from_it_and_goes_back(rank, world):
    cache = Cache()
    comm = _C.Comm.self_(0)
    before = simgpu.count()["device_bytes"]
    cache.serve()
    flat = _C.FlatParameter("layer", comm, SPECS)
    assert cache.out() == _C.cuda_allocated(0) > 2 * 4000
    assert cache.streams == {0}
    flat.write(0, torch.arange(1000.0))
    flat.read([there := torch.zeros(1000)])
    assert torch.equal(there, torch.arange(1000.0))
    del flat
    gc.collect()
    assert (cache.out(), _C.cuda_allocated(0)) == (0, 0)
    assert cache.calls["alloc"] == cache.calls["free"] > 0
    assert simgpu.count()["device_bytes"] == before
    _C.set_cuda_allocator(0, None, None)
    calls = cache.calls.total()
    _flat = _C.FlatParameter("layer", comm, SPECS)
    assert cache.calls.total() == calls
    assert sys.getrefcount(cache) == 2  # nothing keeps references to its methods
    simgpu_is_content()


@ranks(1, env=GPU)
def test_a_block_keeps_its_allocator(rank, world):
    first, second = Cache(), Cache()
    comm = _C.Comm.self_(0)
    first.serve()
    flat = _C.FlatParameter("layer", comm, SPECS)
    second.serve()
    assert first.out() > 0 == second.out()
    del flat
    gc.collect()
    assert first.out() == second.calls.total() == 0


@ranks(1, env=GPU)
def test_what_it_raises_comes_out(rank, world):
    cache = Cache()
    comm = _C.Comm.self_(0)
    cache.serve()
    cache.full = True
    with pytest.raises(torch.OutOfMemoryError, match="unit layer: .*total capacity") as caught:
        _C.FlatParameter("layer", comm, SPECS)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    _C.set_cuda_allocator(0, lambda size, stream: 1 / 0, cache.free)
    with pytest.raises(RuntimeError, match="unit layer: .*division") as failed:
        _C.FlatParameter("layer", comm, SPECS)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    _C.set_cuda_allocator(0, lambda size, stream: "no address", cache.free)
    with pytest.raises(RuntimeError, match="TypeError"):
        _C.FlatParameter("layer", comm, SPECS)

    def interrupted(size, stream):
        raise KeyboardInterrupt

    _C.set_cuda_allocator(0, interrupted, cache.free)
    with pytest.raises(KeyboardInterrupt):
        _C.FlatParameter("layer", comm, SPECS)
    with pytest.raises(TypeError, match="callable"):
        _C.set_cuda_allocator(0, cache.alloc, 3)
    with pytest.raises(NotImplementedError, match="CUDA device 7"):
        _C.set_cuda_allocator(7, cache.alloc, cache.free)
    _C.set_cuda_allocator(0, None, None)
    _C.FlatParameter("layer", comm, SPECS)


@ranks(1, env=GPU)
def test_a_failure_halfway_gives_back_what_there_was(rank, world):
    cache = Cache()
    comm = _C.Comm.self_(0)
    served = 0

    def second_fails(size, stream):
        nonlocal served
        served += 1
        cache.full = served == 2
        return cache.alloc(size, stream)

    _C.set_cuda_allocator(0, second_fails, cache.free)
    with pytest.raises(torch.OutOfMemoryError):
        _C.FlatParameter("layer", comm, SPECS)
    assert (served, cache.out(), cache.calls["free"]) == (2, 0, 1)


@ranks(1, 2, env=GPU)
def test_a_model_trains_on_it_and_says_what_it_holds(rank, world):
    cache = Cache()
    _C.Comm.self_(0)
    before = simgpu.count()["device_bytes"]
    cache.serve()
    torch.manual_seed(0)
    model = nn.Sequential(*(FullyShardedDataParallel(nn.Linear(32, 32)) for _ in range(3)))
    model = FullyShardedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = 0
    for step in range(4):
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > 0:
            assert cache.calls.total() == calls, "an allocation in a step"
        calls = cache.calls.total()
    held = memory_stats(model)
    kept = sum(held[f"{name}_bytes"] for name in ("master", "grad", "local"))
    slots = held["gather_bytes"] + held["reduce_bytes"]
    assert kept <= cache.out() < kept + 2000  # 2000: records of used parameters
    # The slots come from the driver, because their memory is mapped at several addresses, and no
    # allocator has such memory.
    assert held["gather_bytes"] % env.GRANULE == 0
    assert held["spare_bytes"] == 0
    device_bytes = simgpu.count()["device_bytes"] - before
    others = 3 << 20  # windows of the communicators, lists for launches, rounding
    assert kept + slots <= device_bytes < kept + slots + others
    simgpu_is_content()


@ranks(1, env=GPU)
def test_a_unit_waits_until_its_tree_is_closed(rank, world):
    cache = Cache()
    flat = _C.FlatParameter("layer", _C.Comm.self_(0), SPECS)
    done: list[bytes] = []
    other = threading.Thread(target=lambda: done.append(flat.grad_bits()))
    was_in: list[bool] = []

    def free(address):
        if not was_in:
            other.start()
            other.join(0.3)
            was_in.append(not other.is_alive())
        cache.free(address)

    _C.set_cuda_allocator(0, cache.alloc, free)
    tree = _C.Tree([flat], [0])
    tree.close()
    other.join()
    assert (was_in, done) == ([False], [b"\0"])


@ranks(1, env=GPU)
def test_a_failure_of_the_gpu_is_no_error_in_the_users_gradient(rank, world):
    model = FullyShardedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    simgpu.fail("cuLaunchKernel", 1, 719)
    with pytest.raises(RuntimeError, match="719|LAUNCH_FAILED|cuLaunchKernel"):
        model._unit.flat.adopt_grads()


@ranks(1, env=GPU)
def test_nothing_is_called_when_the_interpreter_ends(rank, world):
    cache = Cache()
    cache.serve()
    globals()["kept"] = _C.FlatParameter("layer", _C.Comm.self_(0), SPECS)


def test_without_a_gpu_it_says_so():
    if not os.environ.get("FSDPC_LIBCUDA"):
        with pytest.raises(NotImplementedError):
            _C.set_cuda_allocator(-1, None, None)
    assert issubclass(OutOfMemoryError, MemoryError)


def simgpu_is_content() -> None:
    counters = simgpu.count()
    assert (counters["races"], counters["faults"]) == (0, 0)

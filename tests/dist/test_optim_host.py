"""On the simulated GPU: optimizer states of a GPU's parameters in pinned host memory. Equal to the
bit to states on the GPU, copies beside the steps, no host sync, and each wait that is left out is
found.
"""

from __future__ import annotations

import copy
import ctypes
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import env
import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks
from toys import wrap

import fsdpc
from fsdpc import checkpoint, fully_shard, optim
from fsdpc.optim import _host
from torch import nn

ON_GPU = env.environment() | {"FSDPC_TEST_WATCH": "0", "FSDPC_POISON": "0"}
on_gpu = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
SHAPES = {"a": (300, 401), "b": (7,), "c": (128, 64), "d": (5,), "e": (90000,)}
SMALL = 2 * 131072  # bytes of buffers: "a" and "e" take several chunks on each of two ranks
KINDS: dict[str, tuple[Any, torch.dtype]] = {
    "AdamW": (partial(optim.AdamW, amsgrad=True), torch.float32),
    "Adam": (optim.Adam, torch.bfloat16),
    "SGD": (partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5), torch.float32),
    "Lion": (optim.Lion, torch.float32),
    "AdamWBF16": (optim.AdamWBF16, torch.bfloat16),
}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            self.register_parameter(name, nn.Parameter(values.to(dtype)))

    def forward(self, step: int) -> torch.Tensor:
        factors = torch.randn(len(SHAPES), generator=torch.Generator().manual_seed(step))
        params = zip(SHAPES, factors.tolist(), strict=True)
        # In the second step one parameter has no gradient.
        return sum(
            (getattr(self, n).square() * f).sum() for n, f in params if step != 1 or n != "c"
        )


def made(how: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    if how == "rows":
        model = Model(dtype)
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        return model
    return wrap("fsdpc", Model(dtype), use_orig_params=how == "units")


def train(model: nn.Module, optimizer: Any, steps: range, **options: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step(**options)


def same(one: Any, other: Any) -> None:
    """Parameters and states."""
    for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"], strict=True):
        a_state, b_state = one.state[a], other.state[b]
        assert a_state.keys() == b_state.keys()
        for x, y in ((a, b), *((a_state[k], b_state[k]) for k in a_state)):
            x, y = (t.to_local() if hasattr(t, "to_local") else t for t in (x, y))
            assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)


@on_gpu
@ranks(1, 2, env=ON_GPU)
def test_equal_to_states_on_the_gpu(rank: int, world: int):
    import simgpu

    cases = [("AdamW", how, ratio) for how in ("units", "rows") for ratio in (0, 0.5, 1)]
    cases += [("AdamW", "flat", 1), ("Adam", "flat", 1), ("SGD", "rows", 0.5), ("SGD", "units", 1)]
    cases += [("Lion", "units", 1), ("AdamWBF16", "units", 1), ("AdamWBF16", "rows", 0.5)]
    policies = ("lazy", "eager", "random:1", "order:host,2,1,0")
    for number, (name, how, ratio) in enumerate(cases):
        simgpu.policy(policies[number % len(policies)])
        kind, dtype = KINDS[name]
        clip = {"max_norm": 1.0} if name == "AdamW" else {}
        models = [made(how, dtype) for _ in range(2)]
        kept = kind(models[0].parameters())
        away = kind(models[1].parameters(), offload=optim.Host(ratio, SMALL))
        for model, optimizer in zip(models, (kept, away), strict=True):
            train(model, optimizer, range(4), **clip)
        same(away, kept)
        here, total = away._store.chosen_bytes
        assert here <= ratio * total and (here == total) == (ratio == 1), (name, how)
        assert (away._store.host_bytes > 0) == (here > 0)


def count_a_step(rank: int, world: int, ratio: float) -> dict[str, Any]:
    import simgpu

    from fsdpc import _C

    simgpu.policy("lazy")
    model = made("units")
    optimizer = optim.AdamW(model.parameters(), offload=optim.Host(ratio, SMALL))
    train(model, optimizer, range(2))
    model(2).backward()
    store = optimizer._store
    lanes = [lane.counts() for lane in (store.incoming, store.outgoing)]
    early: list[bool] = []
    real = optim.AdamW._step_group

    def step_group(self: Any, *args: Any) -> None:
        """Whether the next chunk has come already when this one is stepped."""
        if self is not optimizer:
            after = len(early) + 1
            early.append(after < chunks and has_come(store, after))
        real(self, *args)

    chunks = len(store.chunks)
    found: dict[str, Any] = {"chunks": chunks, "bytes": store.chosen_bytes[0]}
    for policy in ("lazy", "eager"):
        simgpu.policy(policy)
        early.clear()
        optim.AdamW._step_group = step_group  # type: ignore[method-assign]
        for buffer in store.buffers:
            buffer.fill_(171)
        waits = _C.cuda_waits(0)
        with simgpu.counting() as driver:
            optimizer.step()
        optim.AdamW._step_group = real  # type: ignore[method-assign]
        found[policy] = {"early": list(early), "host_syncs": _C.cuda_waits(0) - waits, **driver}
    found["lanes"] = [
        {name: value - before[name] for name, value in lane.counts().items()}
        for lane, before in zip((store.incoming, store.outgoing), lanes, strict=True)
    ]
    return found


def has_come(store: Any, number: int) -> bool:
    """Whether a chunk's first state is in its buffer."""
    there, host, nbytes = next(iter(store.addresses(number % 2, store.chunks[number])))
    return ctypes.string_at(there, nbytes) == ctypes.string_at(host, nbytes)


@on_gpu
def test_counts():
    """The next chunk is on its way while one is stepped, and the step does not wait for it."""
    found = run_ranks(count_a_step, 1, env=ON_GPU, ratio=1)[0]
    print(found)
    chunks, (came, went) = found["chunks"], found["lanes"]
    assert chunks >= 10
    for policy in ("lazy", "eager"):
        assert found[policy]["host_syncs"] == found[policy]["host_allocations"] == 0
        assert found[policy]["allocations"] == found[policy]["pageable"] == 0
    assert found["eager"]["early"] == [True] * (chunks - 1) + [False]
    assert not any(found["lazy"]["early"])
    two = 2 * found["bytes"]  # of two steps
    assert two <= came["bytes_in"] == went["bytes_out"] <= 1.05 * two
    assert came["marks"] == went["marks"] == came["joins"] == 2 * chunks
    assert went["begins"] == 2 * chunks and came["begins"] == 2 * (chunks - 1)
    assert went["joins"] == 2 * (chunks - 1) and came["finishes"] == went["finishes"] == 0


def leave_out_each(rank: int, world: int) -> list[tuple[Any, list[str]]]:
    import simgpu
    from watch import Operators

    simgpu.policy("lazy")
    simgpu.options().quiet = True
    model = made("units")
    optimizer = optim.AdamW(model.parameters(), offload=optim.Host(1, 3 * SMALL))
    train(model, optimizer, range(2))
    found: list[tuple[Any, list[str]]] = []
    model(2).backward()
    with Operators():
        for left_out in ("none", "none", "read", *range(1, 1000)):
            assert simgpu.drain()
            optimizer.step()  # on its way while the next one begins
            if left_out == "read":
                states = dict.values(optimizer.state)  # of which the optimizer knows nothing
                next(iter(states))["exp_avg"].sum()
            elif left_out != "none":
                simgpu.skip_wait(left_out)
            before = simgpu.calls("cuStreamWaitEvent")
            optimizer.step()
            waits = simgpu.calls("cuStreamWaitEvent") - before
            assert simgpu.drain()
            found.append((left_out, simgpu.take_reports()))
            if left_out == waits:
                return found
    raise AssertionError("waits that do not end")


@on_gpu
def test_each_wait_that_is_left_out_is_found():
    found = run_ranks(leave_out_each, 1, env=ON_GPU)[0]
    for left_out, reports in found:
        print(f"{left_out}: {(reports or ['-'])[0]}")
    assert found[0][1] == found[1][1] == [] and len(found) > 15
    assert [left_out for left_out, reports in found[2:] if not reports] == []

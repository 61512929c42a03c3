"""Activations in pinned host memory, on the simulated GPU.

Gradients equal those without offloading, and the host never waits for the GPU. If a test leaves out
a wait of one stream for another, the simulator reports a race.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import env
import pytest
import torch
from harness import ranks, run_ranks
from torch import nn

from fsdpc import FullyShardedDataParallel as FSDP
from fsdpc._companions.saved import away
from fsdpc.activations import checkpoint, offload, offloading

pytestmark = pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
ON_GPU = env.environment() | {"FSDPC_TEST_WATCH": "0", "FSDPC_POISON": "0"}
ROWS, WIDTH, BLOCKS = 32, 24, 6
EACH = 4 * ROWS * WIDTH  # bytes of one activation


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(nn.functional.gelu(self.a(x)))


def model(sharded: bool = True) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(BLOCKS)]
    if not sharded:
        return nn.Sequential(*blocks)
    return FSDP(
        nn.Sequential(*(FSDP(block, use_orig_params=True) for block in blocks)),
        use_orig_params=True,
    )


def step(trained: nn.Module, around: Any = None) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH)
    trained.zero_grad()
    with around or nullcontext():
        loss = trained(x).square().mean()
    loss.backward()
    return [p.grad.detach().clone() for p in trained.parameters() if p.grad is not None]


@pytest.mark.long
@ranks(1, 2, env=ON_GPU)
def test_gradients_are_equal_in_every_order(rank: int, world: int):
    import simgpu

    for policy in ("lazy", "eager", "random:1", "random:2", "order:host,2,1,0"):
        simgpu.policy(policy)
        for sharded in (True, False):
            expected = step(model(sharded))
            for how in ("offload", "bounded", "checkpoint"):
                trained = model(sharded)
                if how == "checkpoint":
                    checkpoint(trained, ratio="1/2", blocks=Block)
                options = {"max_pinned_bytes": 4 * EACH} if how == "bounded" else {}
                offloading._pool_of.cache_clear()
                found = step(trained, offload(trained, min_bytes=1024, **options))
                assert len(found) == len(expected)
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), how


def count_a_step(rank: int, world: int) -> dict[str, Any]:
    import simgpu

    from fsdpc import _C

    trained = model(sharded=False)
    step(trained, offload(trained, min_bytes=1024))
    pool = offloading._pool_of(0)
    before, waits = pool.lane.counts(), _C.cuda_waits(0)
    with simgpu.counting() as driver:
        torch.manual_seed(1)
        trained.zero_grad()
        with offload(trained, min_bytes=1024) as counts:
            loss = trained(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
    lane = {name: value - before[name] for name, value in pool.lane.counts().items()}
    return {
        "counts": vars(counts),
        "lane": lane,
        "host_syncs": _C.cuda_waits(0) - waits,
        "new_pinned": driver["host_allocations"],
        "pageable": driver["pageable"],
    }


def test_counts():
    found = run_ranks(count_a_step, 1, env=ON_GPU)[0]
    print(found)
    counts, lane = found["counts"], found["lane"]
    # Each block saves its input, gelu's input and gelu's result, and the loss saves its input. Each
    # of these tensors is copied once.
    assert counts["tensors"] == 3 * BLOCKS + 1 and counts["nbytes"] == counts["tensors"] * EACH
    assert lane["bytes_out"] == counts["nbytes"]
    planned = away([EACH] * counts["tensors"], 1024)  # the planner's count
    assert (counts["nbytes"], counts["pinned_bytes"]) == (planned.copied, planned.pinned)
    assert counts["resident"] * EACH == planned.resident and counts["late"] == 0
    assert lane["copies_in"] == counts["ahead"] == counts["tensors"] - counts["resident"]
    assert found["host_syncs"] == lane["finishes"] == 0
    assert found["new_pinned"] == found["pageable"] == 0


def leave_out_each(rank: int, world: int) -> list[tuple[Any, list[str]]]:
    import simgpu
    from watch import Operators

    from fsdpc._companions.lane import Lane

    offloading._pool_of(0)  # starts the driver
    kept: list[Any] = []
    state = {"during": "", "left out": None}
    for name in ("begin", "join"):
        real = getattr(Lane, name)

        def call(self: Any, *args: Any, name: str = name, real: Any = real) -> Any:
            left_out = (state["during"], name) == state["left out"]
            return None if left_out else real(self, *args)

        setattr(Lane, name, call)
    fetch = offloading._Away.fetch

    def keeping(self: Any) -> None:
        fetch(self)
        kept.append(self.here)  # so that a late copy does not write the memory of another tensor

    offloading._Away.fetch = keeping  # type: ignore[method-assign]
    simgpu.policy("lazy")
    simgpu.options().quiet = True
    found = []
    planted = [(when, name) for when in ("forward", "backward") for name in ("begin", "join")]
    with Operators(everywhere=True):

        def reports(left_out: tuple[str, str] | None) -> list[str]:
            trained = model(sharded=False)
            assert simgpu.cuda().cuCtxSynchronize() == 0
            simgpu.take_reports()
            state["left out"] = left_out
            backward_of(trained, state, kept, fails=(left_out or ("",))[0] == "dropped")
            state["left out"] = None
            assert simgpu.drain()
            return simgpu.take_reports()

        reports(None)
        for right in (None, ("dropped", "nothing")):
            found.append((right, reports(right)))
        for left_out in (("dropped", "join"), *planted):
            # A missing wait is visible only if the allocator gives the freed memory to another
            # tensor. Whether it does can differ from run to run.
            runs = (reports(left_out) for _ in range(8))
            found.append((left_out, next(filter(None, runs), [])))
    return found


def backward_of(trained: Any, state: dict[str, Any], kept: list[Any], fails: bool) -> None:
    """Run forward and backward; if `fails`, backward raises while copies are in flight."""
    state["during"] = "forward"
    with offload(trained, min_bytes=1024):
        loss = trained(torch.randn(ROWS, WIDTH)).square().mean()
    state["during"] = "backward"
    kept.clear()
    if not fails:
        loss.backward()
        return

    def fail(grad: Any) -> None:
        raise ArithmeticError

    trained[2].a.weight.register_hook(fail)
    with suppress(ArithmeticError):
        loss.backward()
    state["during"] = "dropped"
    del loss
    torch.ones(1, requires_grad=True).sum().backward()  # makes torch free the dropped graph
    for tensor in kept:
        tensor.zero_()  # like an operator whose output reuses the memory


def test_each_wait_that_is_left_out_is_found():
    found = run_ranks(leave_out_each, 1, env=ON_GPU)[0]
    for left_out, reports in found:
        print(f"{left_out}: {(reports or ['-'])[0]}")
    assert found[0][1] == found[1][1] == []
    assert [left_out for left_out, reports in found[2:] if not reports] == []


@ranks(1, env=ON_GPU)
def test_changes_in_place_are_found(rank: int, world: int):
    for when in ("held", "resident"):
        weight = nn.Parameter(torch.ones(64, 64))
        with offload(nn.ParameterList([weight]), min_bytes=1024):
            x = torch.randn(64, 64)
            y = x @ weight
            if when == "held":
                x.add_(1)
        if when == "resident":
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

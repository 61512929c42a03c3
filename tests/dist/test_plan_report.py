"""Tests of memory_report: the plan is shown beside the memory that a model holds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from toys import PRECISIONS, loss_of, tokens, toy, wrap_blocks

import fsdpc
from fsdpc.plan.sources.held import fragmentation

sys.path.append(str(Path(__file__).parents[1] / "simgpu" / "python"))
import env


def by_role(report):
    return {line.role: line for line in report.lines}


@ranks(1, 3)
def test_plan_and_run_are_equal(rank, world):
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for precision in PRECISIONS[:3]:
            model = wrap_blocks(
                "fsdpc",
                toy(blocks=3),
                use_orig_params=True,
                sharding_strategy=strategy,
                **precision.options(),
            )
            optimizer = torch.optim.AdamW(model.parameters())
            with pytest.raises(fsdpc.StateError, match="run one forward"):
                fsdpc.memory_report(model)
            with model.no_sync():
                loss_of(model, tokens(rank, 0)).backward()
            loss_of(model, tokens(rank, 0, 1)).backward()
            assert not by_role(fsdpc.memory_report(model, optimizer))["optimizer states"].differs
            optimizer.step()
            report = fsdpc.memory_report(model, optimizer)
            assert report.equal, str(report)
            assert {line.role: line.planned for line in report.lines}["no_sync gradients"] > 0
            assert "AdamW: 2 moments" in str(report) and "equal" in str(report)
            stats = fsdpc.memory_stats(model)
            assert report.lines[0].actual == stats["master_bytes"] > 0


@ranks(2)
def test_a_difference_is_marked(rank, world):
    """Unfreezing a parameter keeps the old gradient buffers, which are in no plan."""
    plain = toy(blocks=3)
    plain.blocks[1].up.bias.requires_grad_(False)
    model = wrap_blocks("fsdpc", plain, use_orig_params=True)
    loss_of(model, tokens(rank, 0)).backward()
    assert fsdpc.memory_report(model).equal
    for name, param in model.named_parameters():
        if name.endswith("1._fsdp_wrapped_module.up.bias"):
            param.requires_grad_(True)
    loss_of(model, tokens(rank, 1)).backward()
    report = fsdpc.memory_report(model)
    assert not report.equal and "DIFFERS by +" in str(report)
    assert [line.role for line in report.lines if line.differs] == ["gradient shards"]


@ranks(1)
def test_what_is_no_model_is_refused(rank, world):
    with pytest.raises(TypeError, match="nn.Module"):
        fsdpc.memory_report([])
    with pytest.raises(fsdpc.StateError):
        fsdpc.memory_report(nn.Linear(2, 2))
    stats = {"reserved_bytes.all.current": 100, "active_bytes.all.current": 40}
    assert "not fragmented" in fragmentation(stats)
    stats["inactive_split_bytes.all.current"] = 50
    assert "expandable_segments" in fragmentation(stats)


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@ranks(2, env=env.environment())
def test_what_the_driver_and_nccl_hold_is_measured(rank, world):
    """On the simulated GPU, a context and each communicator hold the bytes that this test sets."""
    import simgpu

    simgpu.cuda().simgpu_get_options().contents.foreign_bytes = 7 << 20
    simgpu.nccl().simnccl_get_options().contents.comm_bytes = 3 << 20
    model = wrap_blocks("fsdpc", toy(blocks=3), use_orig_params=True)
    loss_of(model, tokens(rank, 0)).backward()
    report = fsdpc.memory_report(model)
    lines = by_role(report)
    comms, context = lines["communicators"], lines["device context"]
    # There are two communicators, one for gathers and one for reductions.
    assert (comms.planned, comms.actual) == (544_000_000, 2 * 3 << 20)
    assert context.planned == 500_000_000 and 0 <= context.actual - (7 << 20) < 1 << 20
    assert report.equal and str(report).count("assumed") == 2, str(report)
    simgpu.cuda().simgpu_get_options().contents.foreign_bytes += 5 << 20
    later = by_role(fsdpc.memory_report(model))["device context"]
    assert later.actual - context.actual == 5 << 20

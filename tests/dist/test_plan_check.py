"""Tests of ``fsdpc check``: planted mistakes are named, and correct training has no findings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from harness import ranks
from torch import nn
from toys import Block, Toy, shard_blocks, tokens

import fsdpc
from fsdpc.plan.compare import compare, fault
from fsdpc.wrap import ModuleWrapPolicy


def loss(output, inputs):
    return nn.functional.cross_entropy(output.float().flatten(0, -2), inputs[0].flatten())


def sharded(model, **options):
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    return fsdpc.FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def base(rank=0, **more):
    torch.manual_seed(1)
    return {
        "model": Toy(blocks=3),
        "inputs": (tokens(rank, 0),),
        "loss": loss,
        "shard": sharded,
        **more,
    }


def right(rank):
    return base(
        rank,
        clip=lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    )


def right_with_dropout(rank):
    made = base(rank)
    made["model"].blocks[1].down = nn.Sequential(made["model"].blocks[1].down, nn.Dropout(0.3))
    return made


def right_in_bf16(rank):
    mixed = fsdpc.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return base(rank, shard=lambda m: sharded(m, mixed_precision=mixed))


def hooked(rank, hook):
    def shard(model):
        model = sharded(model)
        model.register_comm_hook(None, hook)
        return model

    return base(rank, shard=shard)


def factor(rank):
    """Return a program whose hook does not divide the sum over ranks."""

    def hook(state, grad, out):
        torch.distributed.all_reduce(grad)
        out.copy_(grad.chunk(2)[rank])

    return hooked(rank, hook)


def lost_batch(rank):
    """Return a program whose hook leaves out the gradients of the other rank."""

    def hook(state, grad, out):
        out.copy_(grad.chunk(2)[rank])

    return hooked(rank, hook)


def local_clip(rank):
    def clip(model):
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.05 / norm)

    return base(rank, clip=clip)


def early_optimizer(rank):
    made = base(rank, shard=lambda m: sharded(m, use_orig_params=False))
    return {**made, "optimizer": torch.optim.SGD(made["model"].parameters(), lr=0.1)}


def frozen_late(rank):
    def shard(model):
        model = sharded(model)
        next(
            p for n, p in model.named_parameters() if "blocks.2" in n and "up.weight" in n
        ).requires_grad_(False)
        return model

    return base(rank, shard=shard)


def untied(rank):
    def shard(model):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return sharded(model)

    made = base(rank, shard=shard)
    made["model"].head.weight = made["model"].embed.weight
    return made


def other_values(rank):
    made = base(rank)
    with torch.no_grad():
        made["model"].blocks[0].down.weight.add_(0.1 * rank)
    return made


def other_buffers(rank):
    made = base(rank)
    made["model"].register_buffer("scale", torch.tensor(float(rank)))
    return made


def equal_data(rank):
    return {**base(rank), "inputs": (tokens(0, 0),)}


def unused(rank):
    made = base(rank)
    made["model"].extra = nn.Linear(3, 3)
    return made


def seeded_by_rank(rank):
    made = base(rank)
    torch.manual_seed(rank)
    for module in made["model"].modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return made


def synchronised(rank):
    return {**seeded_by_rank(rank), "shard": lambda m: sharded(m, sync_module_states=True)}


class Batches(nn.BatchNorm1d):
    """A batch norm over the rows of a batch of sequences."""

    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view(x.shape)


def drifting(rank):
    made = base(rank)
    made["model"].norm = Batches(6)
    return made


def divided_twice(rank):
    def by_world(output, inputs):
        return loss(output, inputs) / torch.distributed.get_world_size()

    return base(rank, loss=by_world)


def narrow(rank):
    mixed = fsdpc.MixedPrecision(reduce_dtype=torch.bfloat16)
    return base(rank, shard=lambda m: sharded(m, mixed_precision=mixed))


def rates_by_rank(rank):
    return base(rank, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1 * (rank + 1)))


def ignored(rank):
    return base(rank, shard=lambda m: sharded(m, ignored_modules=[m.blocks[2].up]))


PLANTED = [
    (seeded_by_rank, "initial-values", "", "embed.weight", "sync_module_states"),
    (drifting, "buffers-drift", "", "norm.running_mean", "SyncBatchNorm"),
    (divided_twice, "divided-twice", "", "", "must not be divided"),
    (narrow, "narrow-reduction", "the root unit", "", "summed over ranks in torch.bfloat16"),
    (rates_by_rank, "optimizer-options", "", "", "lr of parameter group 0 is 0.1 on rank 0"),
    (ignored, "gradient", "", "blocks.2.up.weight", "(in no unit: ignored)"),
    (factor, "gradient", "the root unit", "embed.weight", "2 times as long"),
    (lost_batch, "gradient", "the root unit", "embed.weight", "direction"),
    (local_clip, "clipped-gradient", "the root unit", "embed.weight", "local norm"),
    (early_optimizer, "optimizer-before-wrap", "", "", "after wrapping"),
    (frozen_late, "frozen-after-wrap", "blocks.2", "blocks.2.up.weight", "freeze before wrapping"),
    (untied, "tied-weights", "the root unit", "embed.weight", "head.weight"),
    (other_values, "initial-values", "", "blocks.0.down.weight", "sync_module_states"),
    (other_buffers, "buffers-differ", "", "scale", "sync_module_states"),
    (equal_data, "equal-data", "", "", "DistributedSampler"),
    (unused, "unused", "", "extra.weight", "no gradient on any rank"),
]


@pytest.mark.long
@ranks(2)
@pytest.mark.parametrize("planted", [PLANTED])
def test_planted_mistakes_are_found_and_named(rank, world, planted):
    for training, kind, unit, parameter, text in planted:
        result = compare(training, rank, world)
        found = [f for f in result.findings if f.kind == kind]
        assert found, (training.__name__, result.findings)
        assert (found[0].unit, found[0].parameter) == (unit, parameter), found
        assert text in found[0].text, found


@pytest.mark.long
@ranks(1, 2, 3)
def test_right_trainings_pass(rank, world):
    for training in (right, right_with_dropout, right_in_bf16, synchronised):
        result = compare(training, rank, world, steps=2)
        assert [f for f in result.findings if f.level == "error"] == [], training.__name__
        if training is not right_in_bf16:
            assert max(result.figures.values()) < 5e-6, result.figures


def local_clip_of_rows(rank):
    def clip(model):
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        grads = [g.to_local() if hasattr(g, "to_local") else g for g in grads]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for grad in grads:
            grad.mul_(0.05 / norm)

    return base(rank, clip=clip)


def no_division(rank):
    def shard(model):
        model = shard_blocks(model)
        model.blocks[1].set_gradient_divide_factor(1.0)
        return model

    return base(rank, shard=shard)


def frozen_row(rank):
    def shard(model):
        model = shard_blocks(model)
        model.blocks[2].up.weight.requires_grad_(False)
        return model

    return base(rank, shard=shard)


def early_sgd(rank):
    made = base(rank)
    optimizer = torch.optim.SGD(made["model"].parameters(), lr=0.1)
    return {**made, "shard": shard_blocks, "optimizer": optimizer}


ROWS = [  # a program and its expected finding: kind, unit, parameter, a part of the text
    (no_division, "gradient", "blocks.1", "blocks.1", "2 times as long"),
    (local_clip_of_rows, "clipped-gradient", "the root unit", "embed.weight", "local norm"),
    (frozen_row, "frozen-after-wrap", "blocks.2", "blocks.2.up.weight", "freeze before wrapping"),
    (early_sgd, "optimizer-before-wrap", "", "", "after wrapping"),
    (other_values, "initial-values", "", "blocks.0.down.weight", "sync_module_states"),
]


@ranks(2)
def test_fully_shard_too(rank, world):
    for training, kind, unit, parameter, text in ROWS:
        made = training(rank)
        if "shard" not in made or made["shard"] is sharded:
            made["shard"] = shard_blocks
        result = compare(lambda rank, made=made: made, rank, world)
        found = [f for f in result.findings if f.kind == kind]
        assert found, (training.__name__, result.findings)
        assert found[0].unit == unit and found[0].parameter.startswith(parameter), found
        assert text in found[0].text, found

    def plain(rank):
        return {key: value for key, value in right(rank).items() if key != "shard"}

    result = compare(plain, rank, world, 2, "fully_shard")
    assert [f for f in result.findings if f.level == "error"] == [], result.findings
    assert max(result.figures.values()) < 5e-6, result.figures


def test_two_numbers_give_the_kind_of_fault():
    assert "factor" in fault(2.0, 1.0)
    assert "nothing" in fault(0.0, 0.0)
    assert "another direction" in fault(0.7, 0.64)
    assert "rounding" in fault(1.0, 0.9999)


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "fsdpc", "check", *arguments],
        text=True,
        capture_output=True,
        timeout=200,
        **options,
    )


@pytest.mark.long
def test_the_command_reports_and_exits(monkeypatch):
    """The command runs as users call it, with two processes per call."""
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    run = command("test_plan_check:factor", "--json")
    found = json.loads(run.stdout)
    assert run.returncode == 1 and not found["ok"], run.stderr
    assert found["findings"][0]["parameter"] == "embed.weight"

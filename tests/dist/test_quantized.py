"""Tests of weights that are gathered in fewer bits."""

from __future__ import annotations

import os
from unittest import mock

import env
import numpy as np
import pytest
import torch
from harness import ranks
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, MixedPrecisionPolicy

import fsdpc
import fsdpc.checkpoint
import fsdpc.optim
from fsdpc import QuantizedPolicy, _probe, fully_shard
from fsdpc._fsdp2.quantized import CODECS

SHAPES = [(100, 300), (64, 512), (65, 64)]


def through_codes(weight, codec):
    """Return the values that a whole weight has after it was gathered as codes."""
    rows, columns = weight.shape
    out = np.empty((rows, columns), np.float32)
    coded = np.empty(_probe.codec_bytes(codec, rows, columns), np.uint8)
    _probe.codec_encode(codec, weight.contiguous().cpu().numpy(), "float32", columns, coded)
    _probe.codec_decode(codec, out, "float32", columns, coded)
    return torch.from_numpy(out).to(weight.device)


def layers():
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(columns, rows) for rows, columns in SHAPES)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = layers()
        self.norm = nn.LayerNorm(300)

    def forward(self, x):
        x = self.parts[0](self.norm(x)).tanh()
        x = self.parts[1](torch.cat([x] * 6, 1)[:, :512]).tanh()
        return self.parts[2](x)


@ranks(1, 2, 3)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_values_depend_on_the_whole_weight_alone(rank, world, dtype, codec):
    """The test runs over shared memory and, on two or three ranks, over a wire."""
    if world > 1 and dtype == torch.float32:
        os.environ["FSDPC_COLLECTIVES"] = "wire"
    check_values(dtype, codec)


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@ranks(1, 2, env=env.environment())
def test_on_a_gpu(rank, world):
    for dtype, codec in zip([torch.bfloat16, torch.float32] * 3, CODECS, strict=False):
        check_values(dtype, codec)
    model, losses = train(QuantizedPolicy(codec="mxfp8"), steps=3)
    assert losses.isfinite().all()
    report = fsdpc.memory_report(model)
    assert report.equal, report
    check_context(model, report)


def check_context(model, report):
    """Check that the report counts each byte once. Its line "device context" stays the same if
    torch's allocator holds the shards, the gradients and the codes. The report also counts the
    codes as slots.
    """
    stats = fsdpc.memory_stats(model)
    kept = sum(stats[f"{key}_bytes"] for key in ("master", "grad", "local", "coded"))
    assert stats["coded_bytes"] > 0
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.memory_reserved", lambda device: kept),
    ):
        again = fsdpc.memory_report(model)
    before, after = (
        next(line.actual for line in each.lines if line.role == "device context")
        for each in (report, again)
    )
    assert before == after


def check_values(dtype, codec):
    model = fully_shard(Parts(), mp_policy=QuantizedPolicy(param_dtype=dtype, codec=codec))
    with torch.no_grad():
        model.norm.weight.uniform_(-1, 1)
    norm = model.norm.weight.full_tensor().to(dtype)
    model.unshard()
    for layer, plain in zip(model.parts, layers(), strict=True):
        expected = through_codes(plain.weight.detach(), codec)
        assert torch.equal(layer.weight.detach(), expected.to(dtype))
        bound = {"int8": 1 / 251, "float8_e4m3": 1 / 27}.get(codec, 1 / 6)
        assert (expected - plain.weight).abs().max() <= plain.weight.abs().amax() * bound
        assert torch.equal(layer.bias.detach(), plain.bias.detach().to(dtype))
    assert torch.equal(model.norm.weight.detach(), norm)
    model.reshard()


@ranks(2)
def test_what_is_not_finite_makes_its_block_nan(rank, world):
    model = fully_shard(nn.Linear(300, 64), mp_policy=QuantizedPolicy())
    with torch.no_grad():
        if rank == 1:
            model.weight._local_tensor[3, 299] = float("inf")
    model.unshard()
    bad = model.weight.isnan()
    assert bad[35, 256:].all()
    assert bad.sum() == 300 - 256


def train(policy, steps=30):
    torch.manual_seed(0)
    model = Parts()
    for layer in model.parts:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = fsdpc.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(16, 300)
        loss = (model(x) - x[:, :65].tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return model, torch.tensor(losses)


@ranks(2)
def test_training(rank, world, tmp_path):
    """Training with quantized gathers gives nearly the same losses as training without them;
    shards, optimizer states and checkpoints are not quantized.
    """
    _, expected = train(MixedPrecisionPolicy())
    model, losses = train(QuantizedPolicy())
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(losses, expected, rtol=0.01, atol=0)
    assert not torch.equal(losses, expected)
    fsdpc.checkpoint.save(tmp_path / "model", model)
    before = [param.full_tensor() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fsdpc.checkpoint.load(tmp_path / "model", model)
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), value)


@ranks(2)
@pytest.mark.parametrize("codec", ["int8", "nvfp4", "nf4"])
def test_bytes_and_memory_on_a_wire(rank, world, codec):
    os.environ["FSDPC_COLLECTIVES"] = "wire"
    policy = QuantizedPolicy(param_dtype=torch.bfloat16, codec=codec)
    model = nn.Sequential(fully_shard(Parts(), mp_policy=policy))
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.no_grad():
        model(torch.ones(1, 300))
    sent = fsdpc.memory_stats(model)["sent_bytes"]
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    bytes_each = {"int8": 1.05, "nvfp4": 0.7, "nf4": 0.65}[
        codec
    ]  # bytes per element, including scales, biases and the norm layer
    elements = sum(param.numel() for param in model.parameters()) / world
    assert 0.5 * elements < sent < bytes_each * elements
    report = fsdpc.memory_report(model)
    assert report.equal, report


@ranks(2)
def test_a_unit_on_several_ranks_must_have_one_codec(rank, world):
    with pytest.raises(fsdpc.MismatchError, match="gathered as"):
        fully_shard(nn.Linear(300, 64), mp_policy=QuantizedPolicy(codec=CODECS[rank]))


@ranks(1)
def test_policies_of_the_other_interface_are_refused(rank, world):
    """fully_shard refuses policies of FSDP, and FSDP refuses policies of fully_shard."""
    other = {"mp_policy": MixedPrecision(torch.bfloat16), "offload_policy": CPUOffload(True)}
    for name, value in other.items():
        with pytest.raises(TypeError, match=f"{name} must be a .* got {type(value).__name__}"):
            fully_shard(nn.Linear(2, 2), **{name: value})
    fully_shard(nn.Linear(2, 2), offload_policy=None)
    with pytest.raises(TypeError, match="or None, but got QuantizedPolicy.* are for fully_shard"):
        fsdpc.FSDP(nn.Linear(2, 2), mixed_precision=QuantizedPolicy())


def test_a_codec_must_exist():
    with pytest.raises(ValueError, match="unknown codec 'int7': choose None or one of int8"):
        QuantizedPolicy(codec="int7")


@ranks(2)
def test_the_report_knows_that_gathered_values_lie_elsewhere(rank, world):
    model = nn.Sequential(Parts(), nn.Linear(65, 8))
    fully_shard(model[0], mp_policy=QuantizedPolicy())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.randn(2, 300)).sum().backward()
    optimizer.step()
    report = fsdpc.memory_report(model)
    assert report.equal, report

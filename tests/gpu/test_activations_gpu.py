"""Tests on a GPU of saved activations: autograd saves them packed, or in host memory."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from fsdpc.activations import checkpoint, compress, offload

WIDTH, ROWS, BLOCKS = 256, 2048, 8  # one activation has 2 MiB


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture
def place(device, group) -> torch.device:
    return device.device


def model(place: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual() for _ in range(BLOCKS))).to(place)


def gradients(trained: nn.Module, place: torch.device, around=None) -> tuple[Tensor, int]:
    """Return all gradients in one tensor, and how many bytes the forward left allocated on a
    GPU."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(place)
    cuda = place.type == "cuda"
    before = torch.cuda.memory_allocated(place) if cuda else 0
    trained.zero_grad()
    with around or nullcontext():
        loss = trained(x).square().mean()
    held = (torch.cuda.memory_allocated(place) if cuda else 0) - before
    loss.backward()
    return torch.cat([p.grad.flatten() for p in trained.parameters()]), held


@pytest.mark.parametrize("kind, bound", [("int8", 2e-2), ("bf16", 1e-2)])
def test_packed(place, kind, bound):
    trained = model(place)
    gradients(trained, place)
    want, exact_bytes = gradients(trained, place)
    packed, bytes_ = gradients(trained, place, compress(trained, kind))
    assert float((packed - want).norm() / want.norm()) < bound
    assert not torch.equal(packed, want)
    if place.type == "cuda":
        assert bytes_ < {"int8": 0.5, "bf16": 0.7}[kind] * exact_bytes


def test_packed_as_the_processor_packs(place):
    """Activations that the GPU packs give the same gradients as activations that the CPU packs."""
    value = torch.randn(1000, 96, generator=torch.Generator().manual_seed(3))
    found = []
    for where in (place, torch.device("cpu")):
        x = value.to(where).requires_grad_()
        with compress(nn.Identity(), "int8", min_bytes=0):
            y = (x * x).sum()
        y.backward()
        found.append(x.grad.cpu())
        assert not torch.equal(found[-1], 2 * value), "nothing was packed"
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_in_host_memory(place):
    trained = model(place)
    for _ in range(2):
        want, exact_bytes = gradients(trained, place)
        got, bytes_ = gradients(trained, place, offload(trained))
        assert torch.equal(got, want)
    if place.type == "cuda":
        assert bytes_ < 0.6 * exact_bytes, (bytes_, exact_bytes)


@pytest.mark.parametrize("options", [{}, {"ratio": 0.5}, {"policy": "matmul"}], ids=str)
def test_computed_again(place, options):
    want, _ = gradients(model(place), place)
    trained = model(place)
    checkpoint(trained, **options)
    got, _ = gradients(trained, place)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)

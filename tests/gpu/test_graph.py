"""Tests of a whole step in a CUDA graph: forward, backward and the optimizer run again without the
host.
"""

from __future__ import annotations

import pytest
import runs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fsdpc

WARM_UP, RUNS = 3, 4
BF16 = fsdpc.MixedPrecision(torch.bfloat16, torch.float32)


class Training:
    """A model whose inputs stay at the same addresses."""

    def __init__(self, place: torch.device, **options: object) -> None:
        self.place = place
        self.model: nn.Module = runs.wrap(runs.model(place), place, **options)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-2, capturable=place.type == "cuda"
        )
        self.inputs, self.targets = (tensor.clone() for tensor in runs.batch(place, 0))

    def load(self, step: int) -> None:
        inputs, targets = runs.batch(self.place, step)
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)

    def step(self) -> Tensor:
        logits = self.model(self.inputs).float().flatten(0, 1)
        loss = F.cross_entropy(logits, self.targets.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def ordinary(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.load(step)
            self.optimizer.zero_grad()
            losses.append(float(self.step()))
        return losses


@pytest.fixture
def place(device, group) -> torch.device:
    """Return the device for the models. This fixture also starts the process group."""
    return device.device


@pytest.mark.real_gpu
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_a_captured_step_trains(place, precision):
    """A graph runs some steps, with new inputs each time, and then the host runs some steps. The
    losses are the same as if the host had run all steps."""
    want = Training(place, mixed_precision=precision).ordinary(range(WARM_UP + RUNS + 2))
    captured = Training(place, mixed_precision=precision)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = captured.ordinary(range(WARM_UP))
    torch.cuda.current_stream().wait_stream(side)
    captured.optimizer.zero_grad()  # so that the captured backward writes new gradients
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = captured.step()
    for step in range(WARM_UP, WARM_UP + RUNS):
        captured.load(step)
        graph.replay()
        got.append(float(loss))
    got += captured.ordinary(range(WARM_UP + RUNS, WARM_UP + RUNS + 2))
    runs.close(got, want, 1e-5)


@pytest.mark.real_gpu
def test_the_first_forward_is_refused(place):
    training = Training(place)
    training.load(0)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            training.model(training.inputs)
    torch.cuda.synchronize()


def test_ordinary_steps_are_the_same_without_a_graph(place):
    """The other tests compare a graph's losses with those of ordinary steps on inputs at fixed
    addresses. This test checks that such ordinary steps give the plain model's losses."""
    training = Training(place)
    plain = runs.train(runs.model(place), place)
    runs.close(training.ordinary(range(runs.STEPS)), plain)

"""Tests of two ranks on one GPU: sharded training, and a peer that stops. NCCL allows two ranks on
one GPU from version 2.30 on; staging through host memory always works.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

import pytest
import runs
import torch
import torch.distributed as dist
from gpu import machine

import fsdpc
from fsdpc import QuantizedPolicy, _probe, optim

DEADLINE_S = 100.0
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
SIMULATED = bool(os.environ.get("FSDPC_LIBCUDA"))
PEER_TIMEOUT_S = 8.0 if SIMULATED else 15.0  # enough for both ranks to start CUDA


def reason_to_skip(way: str) -> str | None:
    """Return one line that says why two ranks cannot share the GPU, or None if they can."""
    if way != "nccl" or SIMULATED or not torch.cuda.is_available():
        return None
    from fsdpc import _C

    version = _C.nccl_version()  # torch.cuda.nccl returns the version with which torch was built
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 30):
        return f"{version} has no several ranks on one GPU (2.30 has)"
    return None


def ways(*names: str) -> pytest.MarkDecorator:
    """Run a test once for each named value of FSDPC_COLLECTIVES."""
    return pytest.mark.parametrize("way", names)


# --- in the ranks ---------------------------------------------------------------------------------


def rank_main(rank: int, world: int, folder: str, way: str, job: Callable, out: Any) -> None:
    """Run a rank's process: start the process group, run the job, and send the result through the
    pipe `out`."""
    os.environ.update(SHARING, FSDPC_TIMEOUT=str(PEER_TIMEOUT_S), FSDPC_COLLECTIVES=way)
    faulthandler.dump_traceback_later(DEADLINE_S / 2, repeat=True)
    device = machine.DryDevice() if SIMULATED else machine.CudaDevice(0)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        out.send(("value", job(rank, world, device)))
    except BaseException as error:
        out.send(("error", f"{type(error).__name__}: {error}", traceback.format_exc()))
    out.recv()  # wait until both ranks are done, so that no rank sees its peer leave
    os._exit(0)


def train_sharded(rank: int, world: int, device: machine.Device) -> list[float]:
    """Train on every world-th batch, and return the losses."""
    model = runs.wrap(runs.model(device.device), device.device)
    return runs.train(model, device.device, steps=range(rank, 3 * world, world))


def train_by_muon(rank: int, world: int, device: machine.Device) -> list[float]:
    """Train as train_sharded does, but with Muon, and return the losses. In each step, whole
    matrices go to the ranks that own them."""
    model = runs.wrap(runs.model(device.device), device.device)
    optimizer = optim.Muon(model.named_parameters(), lr=1e-2)
    steps = range(rank, 3 * world, world)
    return runs.train(model, device.device, optimizer=optimizer, steps=steps)


def train_until_stopped(rank: int, world: int, device: machine.Device) -> tuple[str, float]:
    """Stop rank 1 after two steps, while rank 0 goes on. Return rank 0's error, and the seconds
    until that error."""
    model = runs.wrap(runs.model(device.device), device.device)
    optimizer = runs.adamw(model)
    runs.train(model, device.device, optimizer=optimizer, steps=range(2))
    device.synchronize()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < 4 * PEER_TIMEOUT_S:
            runs.train(model, device.device, optimizer=optimizer, steps=[2])
    except fsdpc.CommError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("no error came")


class Given(torch.nn.Module):
    """A module in which the gradient of each parameter is exactly one of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(130, 333, device="cpu"))
        self.bias = torch.nn.Parameter(torch.zeros(130, device="cpu"))

    def forward(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (self.weight * weight).sum() + (self.bias * bias).sum()


def rounded(values: torch.Tensor, codec: str) -> torch.Tensor:
    """Return the rows after the CPU's codec has coded and decoded them."""
    out = torch.empty_like(values)
    row = values.shape[1]
    _probe.codec_round(codec, values.numpy(), "float32", row, out.numpy(), "float32")
    return out


def sum_codes(rank: int, world: int, device: machine.Device) -> int:
    """Compare sums of coded gradients with expected sums. In an expected sum, the CPU's codec
    rounds the gradient that the other rank sends. Return the number of compared sums."""
    compared = 0
    for codec, keeps in [("int8", False), ("int4", True), ("int4_stochastic", False)]:
        policy = QuantizedPolicy(codec=None, reduce_codec=codec, error_feedback=keeps)
        model = fsdpc.fully_shard(Given().to(device.device), mp_policy=policy)
        lost = torch.zeros(130 // world, 333)
        for step in range(3):
            rng = torch.Generator().manual_seed(step)
            given = [
                (torch.randn(130, 333, generator=rng), torch.randn(130, generator=rng))
                for _ in range(world)
            ]
            model(*(value.to(device.device) for value in given[rank])).backward()
            pieces = [weight.chunk(world)[rank].clone() for weight, _ in given]
            sent = pieces[1 - rank] + lost
            pieces[1 - rank] = rounded(sent, codec)
            lost = sent - pieces[1 - rank] if keeps else lost
            biases = [bias.chunk(world)[rank] for _, bias in given]
            for param, parts in ((model.weight, pieces), (model.bias, biases)):
                assert torch.equal(param.grad.to_local().cpu(), (parts[0] + parts[1]) * 0.5), codec
                compared += 1
            model.zero_grad()
    return compared


# --- in the tests ---------------------------------------------------------------------------------


def run_pair(job: Callable, way: str, wait_for: tuple[int, ...] = (0, 1)) -> list[Any]:
    """Runs job(rank, 2, device) on two ranks; returns the values of the ranks in `wait_for`."""
    if reason := reason_to_skip(way):
        pytest.skip(reason)
    context = get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank_main, args=(rank, 2, folder, way, job, pipes[rank][1]))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            until = time.monotonic() + DEADLINE_S
            return [receive(pipes[rank][0], ranks[rank], until) for rank in wait_for]
        finally:
            for ours, _ in pipes:
                ours.send("end")
            for process in ranks:
                process.join(1)
                process.kill()
                process.join()


def receive(pipe: Any, process: Any, until: float) -> Any:
    """Return the value that a rank sent. Fail if the rank sent an error."""
    while not pipe.poll(0.1):
        assert process.is_alive() or pipe.poll(0), f"a rank ended with {process.exitcode}"
        assert time.monotonic() < until, f"no end within {DEADLINE_S:g} s"
    kind, value, *rest = pipe.recv()
    assert kind == "value", "".join([value, *rest])
    return value


def check_losses(found: list[list[float]], device: Any, make: Callable, bound: float) -> None:
    """Compare the ranks' losses with those of a plain model that takes the mean loss of both
    batches in each step."""
    plain = runs.model(device)
    optimizer, want = make(plain), []
    for step in range(3):
        both = [runs.loss_of(plain, device, 2 * step + rank) for rank in range(2)]
        (sum(both) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        want.append([float(loss.detach()) for loss in both])
    for rank in range(2):
        runs.close(found[rank], [losses[rank] for losses in want], bound)


@ways("nccl", "shm", "c10d")
def test_losses_are_those_of_both_batches(device, way):
    check_losses(run_pair(train_sharded, way), device.device, runs.adamw, 1e-5)


@ways("nccl", "shm")
def test_muons_losses_are_those_of_both_batches(device, way):
    def make(model: Any) -> Any:
        return optim.Muon(model.named_parameters(), lr=1e-2)

    check_losses(run_pair(train_by_muon, way), device.device, make, 1e-3)


@ways("nccl")
def test_codes_are_summed_as_the_processors_are(way):
    assert run_pair(sum_codes, way) == [18, 18]


@ways("nccl", "shm")
def test_a_stopped_peer_raises(way):
    ((text, seconds),) = run_pair(train_until_stopped, way, wait_for=(0,))
    assert seconds < 3 * PEER_TIMEOUT_S
    assert "rank" in text, text

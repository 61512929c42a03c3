"""Fixtures of the GPU tests, which use GPU 0, or the simulated GPU that ``FSDPC_LIBCUDA`` names.
Without a real or a simulated GPU, all tests are skipped.

With the simulated GPU, modules and tensors are on the CPU and the process group is gloo's, see
tests/simgpu/README.md. The engine calls the driver as on a real GPU; torch works on the CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # for `from gpu import machine`

from gpu import machine  # noqa: E402

SIMULATED = bool(os.environ.get("FSDPC_LIBCUDA"))
AVAILABLE = torch.cuda.is_available() or SIMULATED


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_gpu: not on the simulated GPU")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not AVAILABLE:
        pytest.skip(machine.NO_GPU)
    if SIMULATED and "real_gpu" in item.keywords:
        pytest.skip("means something on a real GPU only")


@pytest.fixture(scope="session")
def device() -> machine.Device:
    """Return the real GPU. With the simulated GPU, return the CPU: the tests' modules are there."""
    os.environ.setdefault("FSDPC_TIMEOUT", "60")
    return machine.DryDevice() if SIMULATED else machine.CudaDevice(0)


@pytest.fixture(scope="session")
def group(device: machine.Device) -> Iterator[dist.ProcessGroup]:
    """The default process group of this one rank."""
    with tempfile.TemporaryDirectory() as folder:
        machine.start_group(device, folder=folder)
        yield dist.group.WORLD
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_races() -> Iterator[None]:
    """Check that the simulated GPU has found no data race in a test."""
    yield
    if SIMULATED:
        import simgpu

        assert simgpu.take_reports() == []


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Hide torch's warning that every strategy on one rank is NO_SHARD."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        yield

"""The device of GPU benchmarks and tests: a GPU, or the CPU in its place in dry runs.

Benchmarks and tests call torch.cuda only through this module, so that all their other lines also
run on a machine without a GPU: `open_device(dry=True)` returns the CPU, whose figures mean nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[2]))  # so that fsdpc, built in place, is found
NO_GPU = "no GPU that torch can use on this machine"


class Device(Protocol):
    """The methods of a device that benchmarks call."""

    device: torch.device
    dry: bool

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""

    def mark(self) -> Any:
        """Record a point in time on the current stream and return it."""

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Wait for the mark ``end`` and return the time between the two marks."""

    def forget_peak(self) -> None:
        """Free the memory that torch caches, and measure peaks from now on."""

    def memory(self) -> dict[str, int]:
        """Return bytes: torch's allocated memory, the peaks of torch's allocated and reserved
        memory, and the used memory of the whole device ("in_use").
        """

    def side_stream(self) -> AbstractContextManager:
        """Return a context in which another stream is the current one."""

    def describe(self) -> dict[str, Any]:
        """Return the device's name and memory and the versions of its software, as JSON types."""


class CudaDevice:
    """One of the process's GPUs."""

    dry = False

    def __init__(self, ordinal: int = 0) -> None:
        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end)

    def forget_peak(self) -> None:
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def memory(self) -> dict[str, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "allocated": torch.cuda.memory_allocated(self.device),
            "peak_allocated": torch.cuda.max_memory_allocated(self.device),
            "peak_reserved": torch.cuda.max_memory_reserved(self.device),
            "in_use": total - free,
        }

    def side_stream(self) -> AbstractContextManager:
        return torch.cuda.stream(torch.cuda.Stream(self.device))

    def describe(self) -> dict[str, Any]:
        known = torch.cuda.get_device_properties(self.device)
        return {
            "device": known.name,
            "capability": f"{known.major}.{known.minor}",
            "multiprocessors": known.multi_processor_count,
            "memory_bytes": known.total_memory,
            "driver": driver_version(),
            "cuda": torch.version.cuda,
            "nccl": nccl_version(),
        }


class DryDevice:
    """The CPU in a GPU's place: it has all methods of a device, but its figures mean nothing."""

    dry = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def mark(self) -> float:
        return time.perf_counter()

    def milliseconds(self, begin: float, end: float) -> float:
        return 1e3 * (end - begin)

    def forget_peak(self) -> None:
        pass

    def memory(self) -> dict[str, int]:
        return dict.fromkeys(("allocated", "peak_allocated", "peak_reserved", "in_use"), 0)

    def side_stream(self) -> AbstractContextManager:
        return nullcontext()

    def describe(self) -> dict[str, Any]:
        return {"device": "none (dry run)", "driver": None, "cuda": None, "nccl": None}


def open_device(dry: bool = False) -> Device:
    """Return GPU 0, or with `dry` the CPU. Raises SystemExit with one line if there is no GPU."""
    if dry:
        return DryDevice()
    if not torch.cuda.is_available():
        raise SystemExit(f"{NO_GPU}; --dry runs the same lines on the CPU")
    return CudaDevice(0)


def driver_version() -> str | None:
    """Return the version of the GPU's driver, such as 580.159.03, or None if it is not found."""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
            if text.strip():
                return text.split()[0]
        except (OSError, subprocess.SubprocessError):
            pass
    file = Path("/proc/driver/nvidia/version")
    words = file.read_text().split() if file.exists() else []
    return next((w for w in words if w.count(".") == 2 and w.replace(".", "").isdigit()), None)


def nccl_version() -> str | None:
    """Return the version of torch's NCCL, such as 2.28.9, or None if torch has no NCCL."""
    try:
        found = torch.cuda.nccl.version()
    except (AttributeError, RuntimeError):
        return None
    return ".".join(map(str, found)) if isinstance(found, tuple) else str(found)


def start_group(device: Device, rank: int = 0, world: int = 1, folder: str | None = None) -> None:
    """Make the default process group: nccl on a GPU, gloo in a dry run. This needs no network.

    fsdpc needs no NCCL on one rank. So if NCCL does not start for a group of one rank, the error is
    printed and gloo takes the place of NCCL.
    """
    folder = folder or tempfile.mkdtemp(prefix="fsdpc-gpu-")
    if not device.dry:
        try:
            _start("nccl", f"{folder}/store", rank, world, device_id=device.device)
            return
        except RuntimeError as error:
            if world > 1:
                raise
            print(f"NCCL does not start, gloo takes its place: {error}", flush=True)
            if dist.is_initialized():
                dist.destroy_process_group()
    _start("gloo", f"{folder}/store-gloo", rank, world)


def _start(backend: str, file: str, rank: int, world: int, **options: Any) -> None:
    store = dist.FileStore(file, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)


def prepare_probe(device: Device) -> None:
    """Let the kernels of ``fsdpc._probe`` run on torch's current stream from now on."""
    from fsdpc import _probe
    from fsdpc._torch import current_raw_stream

    if device.device.type == "cuda":
        _probe.set_stream_function(current_raw_stream)
    elif not _probe.stand_in():
        raise SystemExit("fsdpc runs on the CPU here: a dry run needs a simulated GPU")

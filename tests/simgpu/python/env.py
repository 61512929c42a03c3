"""The environment of a process that runs fsdpc on the simulated GPU."""

from __future__ import annotations

from pathlib import Path

LIBRARIES = Path(__file__).resolve().parents[3] / "build" / "c" / "plain" / "simgpu"
CUDA, NCCL, KERNELS = "libcuda.so.1", "libnccl.so.2", "libfsdpc_kernels_host.so"
GRANULE = 64 * 1024  # of virtual memory; the 2 MiB of a GPU would fill megabytes for small models


def missing() -> str | None:
    """Why tests must be skipped where libraries are not built, in one line; None if all are."""
    absent = [name for name in (CUDA, NCCL, KERNELS) if not (LIBRARIES / name).exists()]
    return f"{', '.join(absent)} not built: make simlibs" if absent else None


def environment(**more: str) -> dict[str, str]:
    """What `fsdpc._C` and the simulator read, before the first of them looks; `more` on top."""
    return {
        "FSDPC_LIBCUDA": str(LIBRARIES / CUDA),
        "FSDPC_LIBNCCL": str(LIBRARIES / NCCL),
        "FSDPC_CUDA_IMAGE": str(LIBRARIES / KERNELS),
        "SIMGPU_KERNELS": str(LIBRARIES / KERNELS),
        "SIMGPU_FOREIGN": "1",  # gradients are torch's: memory that the simulator did not give
        "SIMGPU_GRANULE": str(GRANULE),
        **more,
    }

"""The environment of a process that runs fsdpc on the simulated GPU."""

from __future__ import annotations

from pathlib import Path

LIBRARIES = Path(__file__).resolve().parents[3] / "build" / "c" / "plain" / "simgpu"
CUDA, NCCL, KERNELS = "libcuda.so.1", "libnccl.so.2", "libfsdpc_kernels_host.so"
# The granularity of the simulator's virtual memory in bytes. That of a GPU, 2 MiB, would waste
# megabytes on small models.
GRANULE = 64 * 1024


def missing() -> str | None:
    """Return one line that says which libraries are not built, as a reason to skip, or None."""
    absent = [name for name in (CUDA, NCCL, KERNELS) if not (LIBRARIES / name).exists()]
    return f"{', '.join(absent)} not built: make simlibs" if absent else None


def environment(**more: str) -> dict[str, str]:
    """Return the environment variables that `fsdpc._C` and the simulator read, and those in `more`.

    Set the variables before `fsdpc._C` or the simulator is loaded.
    """
    return {
        "FSDPC_LIBCUDA": str(LIBRARIES / CUDA),
        "FSDPC_LIBNCCL": str(LIBRARIES / NCCL),
        "FSDPC_CUDA_IMAGE": str(LIBRARIES / KERNELS),
        "SIMGPU_KERNELS": str(LIBRARIES / KERNELS),
        # Work may access memory that the simulated driver did not give: torch's gradients are in
        # such memory.
        "SIMGPU_FOREIGN": "1",
        "SIMGPU_GRANULE": str(GRANULE),
        **more,
    }

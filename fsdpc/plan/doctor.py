"""``python -m fsdpc doctor``: checks whether this machine is ready, and says what to do if not.

Each check is a function that returns ``Check`` rows. One check starts two ranks, which gather and
sum known values over shared memory; their speed is compared with that of a plain copy. If torchrun
starts several ranks, rank 0 prints, and the link to another host is measured (``link.py``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdpc._comm.table import spans
from fsdpc.plan.cards import size

LEVELS = ("ok", "warning", "error")
PYTHON_TESTED = ((3, 11), (3, 13))
TORCH_TESTED = ((2, 11), (2, 14))
ROUND_TRIP_BYTES = 64 << 20
ROUND_TRIP_SECONDS = 60
SLOW = 0.1  # a round trip is slow below this fraction of a plain copy's speed
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Check:
    """A row of the output. ``level``: one of LEVELS. ``cure``: what to do; empty if ``ok``."""

    name: str
    level: str
    value: str
    cure: str = ""


def graded(name: str, good: bool, value: str, cure: str, level: str = "warning") -> Check:
    """Return a row that is ``ok`` if ``good`` is true, and has ``level`` and ``cure`` otherwise."""
    return Check(name, "ok", value) if good else Check(name, level, value, cure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check versions, limits, GPUs and network, and let two ranks exchange data."
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--strict", action="store_true", help="exit 1 for warnings, too")
    parser.add_argument("--quick", action="store_true", help="without the round trip")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0: no errors; 1: an error, or with ``--strict`` a warning."""
    from fsdpc.plan import link

    if link.launched() and os.environ["RANK"] != "0":
        link.measure()
        return 0
    rows = list(checks(not arguments.quick))
    worst = max(LEVELS.index(row.level) for row in rows)
    code = int(worst > (0 if arguments.strict else 1))
    if arguments.json:
        print(json.dumps({"ok": code == 0, "checks": [asdict(row) for row in rows]}))
        return code
    width = max(len(row.name) for row in rows)
    for row in rows:
        cure = f" -> {row.cure}" if row.cure else ""
        print(f"{row.level:8} {row.name:{width}}  {row.value}{cure}")
    return code


def checks(round_trip: bool = True) -> Iterator[Check]:
    """Yield the rows of all checks in order. A check that raises yields a warning instead."""
    parts: list[Callable[[], Iterator[Check]]] = [
        versions,
        kernels,
        memory,
        limits,
        stall_tables,
        processors,
        network,
        environment,
        gpus,
    ]
    from fsdpc.plan import link

    ranks = [between_ranks] if link.launched() else [two_ranks] if round_trip else []
    for part in [*parts, *ranks]:
        try:
            yield from part()
        except Exception as error:
            name = part.__name__.replace("_", " ")
            yield Check(
                name,
                "warning",
                f"could not be checked: {type(error).__name__}: {error}",
                "report this with the output of --json",
            )


# --- software -------------------------------------------------------------------------------------


def versions() -> Iterator[Check]:
    from importlib import metadata

    python = platform.python_version()
    yield _tested("python", python, PYTHON_TESTED, "warning")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Check("torch", "error", "not installed", "pip install 'torch>=2.11'")
    else:
        yield _tested("torch", torch, TORCH_TESTED, "error")
    yield Check("numpy", "ok", metadata.version("numpy"))
    try:
        found = metadata.version("matplotlib")
    except metadata.PackageNotFoundError:
        found = "not installed (optional: pip install 'fsdpc[tools]')"
    yield Check("matplotlib", "ok", found)


def _tested(name: str, version: str, between: tuple[Any, Any], older: str) -> Check:
    """Return a row that says whether a version is tested. ``older``: the level of the row if the
    version is too old.
    """
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = between
    text = f"fsdpc is tested on {low[0]}.{low[1]} to {high[0]}.{high[1]}"
    return graded(name, low <= number <= high, version, text, older if number < low else "warning")


def kernels() -> Iterator[Check]:
    try:
        from fsdpc import _C
    except ImportError as error:
        yield Check("extension", "error", str(error), "build it: pip install . in the repository")
        return
    names = _C.kernel_names()
    yield Check("extension", "ok", f"kernels {', '.join(names)}; {_C.get_num_threads()} threads")
    image = _C.cuda_image_bytes()
    yield Check("GPU kernels", "ok", f"{image:,} bytes" if image else "none in this build")


# --- the host -------------------------------------------------------------------------------------


def memory() -> Iterator[Check]:
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    limit = _cgroup_room()
    room = free if limit is None else min(free, limit)
    text = f"{room / 2**30:.1f} GiB available" + (" in this control group" if room < free else "")
    enough = room >= 2 << 30
    yield graded("memory", enough, text, "shared shards and slots come out of this")
    refused = _refused(lambda: os.memfd_create("fsdpc-doctor"))
    yield graded(
        "shared memory",
        not refused,
        f"memfd_create: {refused}"
        if refused
        else "memfd_create works; the size of /dev/shm does not matter",
        "allow memfd_create in the container's seccomp profile",
        "error",
    )
    refused = _refused(lambda: os.pidfd_open(os.getpid()))
    yield graded(
        "process watch",
        not refused,
        f"pidfd_open: {refused}" if refused else f"pidfd_open works; Linux {platform.release()}",
        "Linux 5.3 or newer, and pidfd_open allowed in the seccomp profile",
        "error",
    )


def _refused(opened: Callable[[], int]) -> str:
    """Return the kernel's reason if the kernel refuses the system call in ``opened``, else ""."""
    try:
        os.close(opened())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _cgroup_room() -> int | None:
    """Return the bytes left in this control group (version 2), or None if there is no limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text().strip()
        return None if limit == "max" else int(limit) - int((folder / "memory.current").read_text())
    except OSError:
        return None


# Name; limit; the least value that is enough (0: only unlimited, -1: any value); what to do if the
# limit is lower.
_LIMITS = (
    (
        "open files",
        resource.RLIMIT_NOFILE,
        1024,
        "ulimit -n 4096: rank 0 keeps two for each rank of its host",
    ),
    (
        "file size",
        resource.RLIMIT_FSIZE,
        0,
        "shared memory and checkpoints are files: ulimit -f unlimited",
    ),
    ("processes", resource.RLIMIT_NPROC, 1024, "threads count, too: ulimit -u 4096"),
    (
        "address space",
        resource.RLIMIT_AS,
        0,
        "every unit reserves addresses for its gathered values: ulimit -v unlimited",
    ),
    ("locked memory", resource.RLIMIT_MEMLOCK, -1, ""),
)


def limits() -> Iterator[Check]:
    for name, number, enough, cure in _LIMITS:
        value, most = resource.getrlimit(number)
        low = value != resource.RLIM_INFINITY and (enough == 0 or value < enough)
        text = _limit(number, value)
        text += f" (at most {_limit(number, most)})" if most != value else ""
        yield graded(name, not low, text, cure)
    strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    yield graded(
        "overcommit",
        not strict,
        "never (vm.overcommit_memory=2)" if strict else "allowed",
        "reserved addresses count as memory: sysctl vm.overcommit_memory=0",
    )


def _limit(number: int, value: int) -> str:
    if value == resource.RLIM_INFINITY:
        return "unlimited"
    counts = number in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    return f"{value:,}" if counts else size(value)


def stall_tables() -> Iterator[Check]:
    """Check whether this process can read the board of another process (``_comm/board.py``) and
    its current line of Python. A stalled rank reads both from the other ranks.
    """
    from fsdpc._comm.board import Process, status_of
    from fsdpc._comm.verdict import read_stall

    try:
        seconds = read_stall()
    except ValueError as error:
        yield Check("FSDPC_STALL", "error", str(error), "seconds, such as FSDPC_STALL=30")
        return
    program = "from fsdpc._comm.board import open_board as o; o(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = status_of(Process.find(child.pid), ANSWER_SECONDS)
        child.kill()
    when = "never" if seconds == float("inf") else f"after {seconds:g} s"
    yield graded(
        "stall tables",
        bool(found.line),
        f"{when}; the line of another process {'can' if found.line else 'cannot'} be read",
        "tables of stalled ranks lack lines: /proc/PID/fd of processes of this user must be "
        "readable, and a real-time signal free",
    )


def processors() -> Iterator[Check]:
    cores, all_of_them = sorted(os.sched_getaffinity(0)), os.cpu_count() or 1
    mine = len(cores)
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    text = f"{mine} of {all_of_them} usable (affinity {spans(cores)}), {nodes} NUMA node"
    text += "s" if nodes > 1 else ""
    quota = _quota()
    limited = quota is not None and quota < mine
    yield graded(
        "processors",
        not limited,
        f"{text}, but a quota of {quota:.1f}" if limited else text,
        "threads beyond the quota are stopped in turns: set OMP_NUM_THREADS below it",
    )
    threads = os.environ.get("OMP_NUM_THREADS")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads and threads.isdigit() and int(threads) * ranks > mine:
        yield Check(
            "threads",
            "warning",
            f"OMP_NUM_THREADS={threads} x {ranks} ranks > {mine}",
            f"OMP_NUM_THREADS={max(1, mine // ranks)}",
        )


def _quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return None
    return None if quota == "max" else int(quota) / int(period)


def network() -> Iterator[Check]:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        local = address.startswith("127.")
        more = ": other hosts cannot reach that; for several hosts set MASTER_ADDR" if local else ""
        yield Check("host name", "ok", f"{name} is {address}{more}")
    except OSError:
        yield Check(
            "host name",
            "warning",
            f"{name} has no address",
            "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    names = [name for _, name in socket.if_nameindex()]
    yield graded(
        "interfaces",
        "lo" in names,
        ", ".join(f"{name} ({_state_of(name)})" for name in names) or "none",
        "ranks need a loopback interface to connect",
    )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "").lstrip("^=")
        if value and not any(n.startswith(value.split(",")[0]) for n in names):
            yield Check(
                variable,
                "error",
                f"{value!r} is no interface of this host",
                f"unset it, or name one of {', '.join(names)}",
            )


def _state_of(interface: str) -> str:
    """Return a text such as ``up, 25 Gbit/s``; without the speed if the kernel does not know it."""
    words = []
    for what in ("operstate", "speed"):
        try:
            words.append((Path("/sys/class/net") / interface / what).read_text().strip())
        except OSError:  # the driver reports no speed
            words.append("")
    state, speed = words
    state = "up" if interface == "lo" and state == "unknown" else state or "state unknown"
    known = speed.isdigit() and int(speed) > 0
    return f"{state}, {int(speed) / 1000:g} Gbit/s" if known else state


def environment() -> Iterator[Check]:
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield Check(
            "TORCH_DISTRIBUTED_DEBUG",
            "warning",
            "DETAIL",
            "each collective of torch takes some three times as long: unset it to train",
        )
    text = os.environ.get("FSDPC_TIMEOUT")
    if text is not None:
        try:
            good = float(text) > 0
        except ValueError:
            good = False
        yield graded("FSDPC_TIMEOUT", good, text, "seconds, such as FSDPC_TIMEOUT=600", "error")
    if os.environ.get("FSDPC_POISON") == "1":
        yield Check("FSDPC_POISON", "warning", "1", "for debugging only: slower steps")


# --- GPUs -----------------------------------------------------------------------------------------


def gpus() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        none = shutil.which("nvidia-smi") is None
        cure = "nvidia-smi is here, so install a torch with CUDA"
        yield graded("GPUs", none, "none that torch can use", cure)
        yield Check("NCCL", "ok", _nccl() or "none found; only GPUs need it")
        return

    count = torch.cuda.device_count()
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        yield Check(
            f"GPU {i}",
            "ok",
            f"{torch.cuda.get_device_name(i)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        )
    pairs = itertools.combinations(range(count), 2)
    alone = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if count > 1:
        which = f"{len(alone)} pairs without" if alone else "all pairs"
        yield graded("peer access", not alone, which, "these pairs copy through host memory")
    version, cure = _nccl(), "install the torch build that brings NCCL"
    yield graded("NCCL", bool(version), version or "none found", cure, "error")


def _nccl() -> str:
    """NCCL's version and file; "" if there is no NCCL."""
    from fsdpc import _C

    try:
        return _C.nccl_version()
    except (NotImplementedError, OSError):
        return ""


# --- two ranks ------------------------------------------------------------------------------------

_RANK = """
import sys, time
import numpy
from fsdpc import _C
rank, name, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
comm = _C.Comm.shm(rank, 2, name, 30.0)
half = count // 2
best = {"gather": 1e9, "sum": 1e9, "copy": 1e9}
for _ in range(5):
    array = numpy.zeros(count, "f4")
    array[rank * half:][:half] = rank + 1
    comm.barrier(); begin = time.perf_counter()
    comm.all_gather(array)
    best["gather"] = min(best["gather"], time.perf_counter() - begin)
    assert (array[:half] == 1).all() and (array[half:] == 2).all(), "gathered values are wrong"
    array[:] = rank + 1
    comm.barrier(); begin = time.perf_counter()
    comm.reduce_scatter(array)
    best["sum"] = min(best["sum"], time.perf_counter() - begin)
    assert (array[rank * half:][:half] == 3).all(), "sums are wrong"
    other = numpy.empty_like(array)
    comm.barrier(); begin = time.perf_counter()
    numpy.copyto(other, array)
    best["copy"] = min(best["copy"], time.perf_counter() - begin)
comm.barrier()
print(*best.values())
comm.close()
"""


def between_ranks() -> Iterator[Check]:
    """Yield a row on how the ranks that torchrun started exchange units. If there are several
    hosts, also yield a row on the link to another host.
    """
    from fsdpc.plan import link

    found, travels = link.measure()
    yield Check("collectives", "ok", travels)
    if found is not None:
        rate, delay = f"{found.rate * 8 / 1e9:.3g}Gbit", f"{found.latency * 1e3:.2g}ms"
        yield Check(
            "link",
            "ok",
            f"to rank {found.other} on {found.host}: {rate}/s each way, both at once, {delay}; "
            f"torch's all_gather reaches {found.gather:.0%} of that "
            f"(fsdpc plan --link {rate} --latency {delay})",
        )


def two_ranks() -> Iterator[Check]:
    """Let two ranks gather and sum 64 MiB over shared memory, check the values, and compare the
    speed with a plain copy of 64 MiB.
    """
    name = f"fsdpc-doctor-{os.getpid()}-{time.monotonic_ns()}"
    count = ROUND_TRIP_BYTES // 4
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="fsdpc-doctor-") as folder:
        script = Path(folder) / "rank.py"
        script.write_text(_RANK)
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(r), name, str(count)],
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
            for r in range(2)
        ]
        results = [_finish(process) for process in ranks]
    failed = next((error for error, _ in results if error), "")
    if failed:
        yield Check(
            "two ranks", "error", failed, "run with FSDPC_COLLECTIVES=c10d, and report this"
        )
        return
    gather, total, copy = (max(float(out.split()[i]) for _, out in results) for i in range(3))
    rates = [ROUND_TRIP_BYTES / seconds / 1e9 for seconds in (gather, total, copy)]
    slow = min(rates[:2]) < SLOW * rates[2]
    yield graded(
        "two ranks",
        not slow,
        f"values right; gather {rates[0]:.1f} GB/s, sum {rates[1]:.1f} "
        f"GB/s, plain copy {rates[2]:.1f} GB/s (64 MiB)",
        "other programs may keep the processors busy: repeat on a quiet machine",
    )


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return (error, output) of a rank. A rank that takes too long is killed."""
    try:
        out, error = process.communicate(timeout=ROUND_TRIP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"no result within {ROUND_TRIP_SECONDS} s", ""
    lines = error.strip().splitlines()
    return (lines[-1] if lines else f"ended with code {process.returncode}") if (
        process.returncode
    ) else "", out

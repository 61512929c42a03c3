"""Time a unit's exchange over shared memory against memory speed and against gloo, in one run.

    python benchmarks/bench_comm.py
    python benchmarks/bench_comm.py --sizes 64k,64m --rounds 5 --json out.json

A size is that of the whole unit or buffer: the output of all_gather, the input of reduce_scatter.
All ways take turns within each round, and another way is first in each round. So a way and the
floor by which its time is divided run within milliseconds of each other. Each operation is timed at
each size in these ways:

floor    NumPy moves the bytes that the operation must move at least, on all ranks at once and
         without communication: for all_gather, a copy of the rank's shard; for reduce_scatter over
         two ranks, STREAM add (c = a + b, float32) over arrays as long as a shard.
direct   The exchange of a unit of one float32 parameter, the only unit of its tree
         (fsdpc._probe.gather and release, or reduce). all_gather: the ranks' shards become the full
         parameter in a slot. reduce_scatter: each rank packs its full gradient into its reduce slot
         (a copy that the floor does not contain) and sums its slice of all slots.
staged   Comm.all_gather and Comm.reduce_scatter on private memory. The ranks use these calls to
         exchange data that do not belong to a unit.
gloo     torch.distributed on the same private memory.

A time is that of the slower rank, measured from a barrier on. Ratios are taken within a round;
medians and quartiles are over rounds. If other processes use the machine, start this script with
"chrt -f 1", so that other processes do not delay the ranks. The result file names the "scheduler".
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

WORLD = 2
MIB = 1 << 20
SIZES = "64k,256k,1m,4m,16m,64m,256m"
TIMED_BYTES = 4 * MIB  # small operations are repeated until about this much was moved
DEADLINE_S = 120
SCHEDULERS = {os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}

Way = tuple[str, str, Callable[[], Any]]  # operation, way, call


def parse_size(text: str) -> int:
    return int(text[:-1]) * {"k": 1 << 10, "m": MIB}[text[-1].lower()]


def make_unit(comm: Any, numel: int) -> Any:
    """Return a unit of one parameter, gathered once so that its slots exist. Collective."""
    from fsdpc import _probe

    spec = ("weight", numel, "float32", "float32", "float32", True)
    flat = _probe.FlatParameter("unit", comm, [spec], divide=comm.world)
    flat.shard[:] = 1
    _probe.gather(flat)
    _probe.release(flat)
    return flat


def make_ways(comm: Any, size: int) -> list[Way]:
    """Return the calls of all operations and ways at one size. Collective."""
    import torch
    import torch.distributed as dist

    from fsdpc import _probe

    piece = size // 4 // WORLD
    own = slice(comm.rank * piece, (comm.rank + 1) * piece)
    private = np.ones(size // 4, np.float32)
    shard, spare, third = (np.ones(piece, np.float32) for _ in range(3))
    whole = np.ones(size // 4, np.float32)
    tensor = torch.from_numpy(private)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    flat = make_unit(comm, size // 4)

    def gather_unit() -> None:
        _probe.gather(flat)
        _probe.release(flat)

    return [
        ("all_gather", "floor", lambda: np.copyto(spare, shard)),
        ("all_gather", "direct", gather_unit),
        ("all_gather", "staged", lambda: comm.all_gather(private)),
        ("all_gather", "gloo", lambda: gather(tensor, tensor[own])),
        ("reduce_scatter", "floor", lambda: np.add(shard, spare, out=third)),
        ("reduce_scatter", "direct", lambda: _probe.reduce(flat, [whole])),
        ("reduce_scatter", "staged", lambda: comm.reduce_scatter(private)),
        ("reduce_scatter", "gloo", lambda: scatter(tensor[own], tensor)),
    ]


def time_once(comm: Any, call: Callable[[], Any], repeats: int) -> float:
    """Return the seconds per call on this rank. Collective."""
    comm.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def time_size(comm: Any, size: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return the slower rank's microseconds per operation, way and round. Collective."""
    ways = make_ways(comm, size)
    repeats = max(1, min(50, TIMED_BYTES // size))
    for _, _, call in ways:
        time_once(comm, call, 2)
    cases = {
        (operation, way): functools.partial(time_once, comm, call, repeats)
        for operation, way, call in ways
    }
    times = common.interleave(cases, rounds)
    slower = np.array(list(times.values())) * 1e6
    comm.all_reduce(slower, op="max")
    return dict(zip(times, slower.tolist(), strict=True))


def run_rank(rank: int, folder: str, sizes: list[int], rounds: int) -> None:
    """Time all sizes on one rank; rank 0 writes the results into the folder."""
    common.end_with_parent()
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    from fsdpc import _probe

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    comm = _probe.Comm.shm(rank, WORLD, f"bench-{Path(folder).name}", DEADLINE_S)
    rows = []
    for size in sizes:
        seconds = time_size(comm, size, rounds)
        rows += [
            describe(size, operation, seconds) for operation in ("all_gather", "reduce_scatter")
        ]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def describe(size: int, operation: str, times: dict[tuple[str, str], list[float]]) -> dict:
    """Return the times in microseconds and the ratios of one operation at one size."""
    ways = {way: values for (name, way), values in times.items() if name == operation}
    row: dict[str, Any] = {
        "operation": operation,
        "bytes": size,
        "ranks": WORLD,
        "us": {way: common.spread(values) | {"min": min(values)} for way, values in ways.items()},
    }
    for way, base in (("direct", "floor"), ("staged", "floor"), ("gloo", "direct")):
        pairs = zip(ways[way], ways[base], strict=True)
        row[f"{way}_over_{base}"] = common.spread([a / b for a, b in pairs])
    return row


HEAD = (
    "operation",
    "MiB",
    "floor us",
    "direct us",
    "staged us",
    "gloo us",
    "direct/floor",
    "q1..q3",
    "gloo/direct",
)


def table_row(row: dict) -> list[str]:
    over = row["direct_over_floor"]
    return [
        row["operation"],
        f"{row['bytes'] / MIB:g}",
        *(f"{row['us'][way]['median']:.1f}" for way in ("floor", "direct", "staged", "gloo")),
        f"{over['median']:.2f}",
        f"{over['q1']:.2f}..{over['q3']:.2f}",
        f"{row['gloo_over_direct']['median']:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=SIZES, help=f"default {SIZES}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--json", type=Path, default=None, help="default benchmarks/results/comm.json"
    )
    options = parser.parse_args()
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("FSDPC_TIMEOUT", str(DEADLINE_S))
    import torch.multiprocessing as mp

    run = common.describe_run(kept=True)
    run["scheduler"] = SCHEDULERS.get(os.sched_getscheduler(0), "other")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder, sizes, options.rounds), nprocs=WORLD)
        rows = json.loads(Path(folder, "rows.json").read_text())
    common.print_table(HEAD, [table_row(row) for row in rows])
    common.write_json(
        options.json.resolve() if options.json else "comm.json",
        {"run": run, "rounds": options.rounds, "rows": rows},
    )


if __name__ == "__main__":
    main()

"""Time streams of the weights of two ranks (`fsdpc.checkpoint.stream`) beside a copy of memory.

    python benchmarks/bench_stream.py

The model is a GPT of 85 M parameters (`--model 85m`), sharded over two ranks. A set is all weights
of one step. Bytes per second are those of the whole set, and are compared with a copy of as many
bytes by one thread into memory that was touched before ("memcpy"). "iterate" does nothing with the
tensors; "into a model" copies them into an unsharded model of the same process. "publish" sends the
tensors to a reader in a process of its own. The reader does nothing with the tensors, or copies
them into its model. Memory is the largest growth of the process's memory, measured as in
bench_checkpoint.py; the model of a reader is allocated before the measurement begins. `--torn N`
publishes N sets of a small model, in which every element is the number of the set. The ranks and
the reader sleep at random times, and the reader checks that no set mixes two numbers.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import common
from bench_checkpoint import MODELS, barrier, own_peak, peak_of, workload
from bench_step import end_rank, run_ranks, start_rank

BUCKETS = (256 << 20, 32 << 20)


def reader(path: str, model: str | None, out: Connection) -> None:
    """Read every set, into an unsharded `model` if given, and send this process's peak memory."""
    import torch
    from engines import plain_model

    from fsdpc import checkpoint

    common.end_with_parent()
    torch.set_num_threads(1)
    params = {} if model is None else dict(plain_model(workload(model)).named_parameters())

    def read() -> None:
        with checkpoint.StreamReader(path, deadline=120) as sets:
            for weights in sets:
                for name, tensor in weights:
                    if params:
                        params[name].copy_(tensor)

    with torch.no_grad():
        out.send(own_peak(read))


def job(rank: int, world: int, folder: str, out: Connection, model: str, rounds: int) -> None:
    start_rank(rank, world, folder)
    import torch
    from engines import build, plain_model

    from fsdpc import checkpoint

    sharded = build("fsdpc", workload(model)).model
    target = dict(plain_model(workload(model)).named_parameters())
    result: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {}

    def into(pairs: Any) -> None:
        for name, tensor in pairs:
            target[name].copy_(tensor)

    taps = {
        "iterate": checkpoint.stream(sharded),
        "iterate, rank 0": checkpoint.stream(sharded, rank0_only=True),
        "iterate, bfloat16": checkpoint.stream(sharded, dtype=torch.bfloat16),
        "iterate, 32 MiB": checkpoint.stream(sharded, bucket_bytes=BUCKETS[1]),
    }
    cases: dict[str, Callable[[], object]] = {
        name: lambda tap=tap: [None for _ in tap] and None for name, tap in taps.items()
    }
    cases["into a model"] = lambda: into(taps["iterate"])
    total = sum(w.dtype.itemsize * torch.Size(w.shape).numel() for w in taps["iterate"].metadata())
    source, copy = (torch.ones(total // 4) for _ in range(2))
    peaks: dict[str, float] = {}

    def timed(call: Callable[[], object]) -> float:
        barrier()
        begin = time.perf_counter()
        call()
        took = time.perf_counter() - begin
        barrier()
        return took

    with torch.no_grad():
        for name, call in cases.items():
            peaks[name] = peak_of(call)
        cases["memcpy"] = lambda: copy.copy_(source)
        timed(cases["memcpy"])
        seconds = common.interleave({n: lambda c=c: timed(c) for n, c in cases.items()}, rounds)
        for name, held, options in (
            ("publish", None, {}),
            ("publish, into a model", model, {}),
            ("publish, bfloat16, into a model", model, {"dtype": torch.bfloat16}),
        ):
            path = f"{folder}/weights.sock"
            ours, theirs = mp.get_context("spawn").Pipe()
            process = mp.get_context("spawn").Process(target=reader, args=(path, held, theirs))
            process.daemon = False
            if rank == 0:
                mp.current_process()._config["daemon"] = False  # a daemon may not have children
                process.start()
            with checkpoint.stream(sharded, **options) as tap:
                publish = partial(tap.publish, path, deadline=120)
                peaks[name] = peak_of(publish)
                seconds[name] = [timed(publish) for _ in range(rounds)]
            if rank == 0:
                peaks[f"{name}: the reader"] = ours.recv()
                process.join()
    result = {"bytes": total, "seconds": seconds, "peak_mb": peaks}
    if rank == 0:
        out.send(result)
    end_rank()


def torn_job(rank: int, world: int, folder: str, out: Connection, sets: int) -> None:
    """Publish sets of weights on ranks 0 and 1, and check them on rank 2, the reader."""
    start_rank(rank, world, folder)
    import torch
    import torch.distributed as dist
    from torch import nn

    import fsdpc
    from fsdpc import checkpoint

    group, rng, path = dist.new_group([0, 1]), random.Random(rank), f"{folder}/weights.sock"
    torn = whole = 0
    if rank < 2:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        for layer in list(model):
            fsdpc.fully_shard(layer, mesh=dist.DeviceMesh.from_group(group, "cpu"))
        with checkpoint.stream(model, group=group, bucket_bytes=300_000) as tap, torch.no_grad():
            for number in range(1, sets + 1):
                for param in model.parameters():
                    param.to_local().fill_(number)
                time.sleep(rng.random() * 0.002)
                tap.publish(path, step=number)
    else:
        with checkpoint.StreamReader(path) as reading:
            for weights in reading:
                same = []
                for _, tensor in weights:
                    time.sleep(rng.random() * 0.001 if rng.random() < 0.1 else 0)
                    same.append(bool((tensor == weights.step).all()))
                torn += not all(same)
                whole += all(same)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (whole, torn))
    if rank == 0:
        out.send(found[2])
    end_rank()


def print_report(result: dict[str, Any]) -> None:
    base = common.spread(result["seconds"]["memcpy"])["median"]
    rows = []
    for name, values in result["seconds"].items():
        took = common.spread(values)
        speed = result["bytes"] / took["median"] / 1e9
        more = [f"{result['peak_mb'].get(key, 0):.0f}" for key in (name, f"{name}: the reader")]
        rows.append([name, f"{took['median']:.3f}", f"{speed:.2f}",
                     f"{took['median'] / base:.2f}", *more])  # fmt: skip
    print(f"{result['bytes'] / 1e9:.2f} GB")
    common.print_table(["", "s", "GB/s", "x memcpy", "memory, MB", "reader's, MB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="85m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torn", type=int, default=0, metavar="N")
    given = parser.parse_args()
    if given.torn:
        whole, torn = run_ranks(torn_job, 3, given.torn)
        print(f"{whole} whole sets, {torn} torn")
        return
    print_report(run_ranks(job, 2, given.model, given.rounds))


if __name__ == "__main__":
    os.environ.setdefault("FSDPC_TIMEOUT", "120")
    main()

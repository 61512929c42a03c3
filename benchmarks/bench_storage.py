"""Time saves and loads on an S3 server and on the local disk (`fsdpc.checkpoint` with URLs).

    pip install s3fs "moto[server]"
    python benchmarks/bench_storage.py

Two ranks save and load a GPT (`--model 10m`) with AdamW's moments. moto's server runs as a process
of its own and keeps everything in memory. "upload" and "download" use only `s3fs`: one process
copies the saved files. A load requests ranges of 8 MiB, and moto reads the whole object for each
requested range, so a load's time per byte grows with the size of the files. The ranks and the
server share the machine's cores, so the figures hold only for this client with this server.
`--kills N` kills a rank N times, each time at a random moment while the ranks save. After each kill
the newest checkpoint is loaded and verified. Meanwhile another process verifies the latest
checkpoint again and again.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing as mp
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
from bench_checkpoint import MODELS, reduced, workload
from bench_step import end_rank, run_ranks, start_rank

BUCKET = "s3://weights"


@contextmanager
def server() -> Iterator[None]:
    """Run moto's S3 server with an empty bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            import s3fs

            for _ in range(100):
                try:
                    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(BUCKET.partition("//")[2])
                    break
                except Exception:
                    time.sleep(0.2)
            yield
        finally:
            process.terminate()


def job(rank: int, world: int, folder: str, out: Connection, model: str, rounds: int) -> None:
    start_rank(rank, world, folder)
    import fsspec
    from engines import build, random_batch

    from fsdpc import checkpoint

    work = workload(model)
    training = build("fsdpc", work)
    training.step(random_batch(work, rank))
    state = (training.model, training.optimizer)
    fs = fsspec.filesystem("s3")
    number = 0

    def timed(call: Callable[[], object]) -> float:
        reduced(0.0, "MAX")
        begin = time.perf_counter()
        call()
        return reduced(time.perf_counter() - begin, "MAX")

    def upload() -> None:
        if rank == 0:
            for path in Path(folder, "local").rglob("*"):
                if path.is_file():
                    fs.put_file(str(path), f"weights/plain/{path.relative_to(Path(folder))}")

    def download() -> None:
        if rank == 0:
            fs.get("weights/plain/local", f"{folder}/got", recursive=True)

    def save() -> None:
        nonlocal number
        number += 1
        checkpoint.save(f"{BUCKET}/{number}", *state, staging=folder)
        if number > 1 and rank == 0:
            checkpoint.Url(f"{BUCKET}/{number - 1}").remove()

    def load(url: str, verify: Any) -> None:
        checkpoint.load(url or f"{BUCKET}/{number}", *state, verify=verify)

    local = f"{folder}/local"
    cases: dict[str, Callable[[], object]] = {
        "save, local": lambda: checkpoint.save(local, *state, overwrite=True),
        "upload": upload,
        "save, S3": save,
        "load, local": lambda: load(local, "before"),
        "download": download,
        "load, S3": lambda: load("", "before"),
        "load, S3, verified meanwhile": lambda: load("", "during"),
    }
    for call in cases.values():
        call()
    found = common.interleave({n: lambda c=c: timed(c) for n, c in cases.items()}, rounds)
    if rank == 0:
        size = sum(path.stat().st_size for path in Path(local).rglob("*") if path.is_file())
        out.send({"bytes": size, "seconds": found})
    end_rank()


def keep_saving(rank: int, store: str, folder: str, first: int) -> None:
    """Save one checkpoint per step on one rank, until the other rank is killed. In a checkpoint,
    every element of the weights is the number of the step.
    """
    os.environ["FSDPC_TIMEOUT"] = "20"
    start_rank(rank, 2, store)
    import torch
    from torch import nn

    import fsdpc
    from fsdpc import checkpoint

    model = fsdpc.fully_shard(nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 300)))
    keeper = checkpoint.Checkpointer(f"{BUCKET}/killed", keep=2, staging=folder)
    for step in range(first, first + 1000):
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(step)
        try:
            keeper.save(step, model)
        except checkpoint.CheckpointError:  # the other rank was killed
            os._exit(0)


def look(out: Connection) -> None:
    """Verify the latest checkpoint again and again, until the parent sends a message."""
    from fsdpc import checkpoint
    from fsdpc.checkpoint.verify import verify

    common.end_with_parent()
    good, gone, bad = 0, 0, []
    keeper = checkpoint.Checkpointer(f"{BUCKET}/killed")
    while not out.poll():
        try:
            path = keeper.latest()
            if path is None:
                continue
            report = verify(path)
            good += not report.damaged
            bad += report.damaged
        except Exception as error:
            now = keeper.latest()
            if now != path:
                gone += 1  # the checkpoint was removed, because newer ones exist
            else:
                bad.append(repr(error))
    out.send((good, gone, bad))


def kill(count: int) -> None:
    from torch import nn

    from fsdpc import checkpoint

    context, rng = mp.get_context("spawn"), random.Random(0)
    ours, theirs = context.Pipe()
    looker = context.Process(target=look, args=(theirs,), daemon=True)
    looker.start()
    first, loaded, before = 0, 0, None
    keeper = checkpoint.Checkpointer(f"{BUCKET}/killed")
    for number in range(count):
        with tempfile.TemporaryDirectory() as folder:
            store = f"{folder}/store-{number}"
            os.makedirs(store)
            saving = [
                context.Process(target=keep_saving, args=(rank, store, folder, first), daemon=True)
                for rank in range(2)
            ]
            for process in saving:
                process.start()
            while (path := keeper.latest()) is None or path == before:
                time.sleep(0.1)  # until the ranks have saved
            time.sleep(rng.random() * 2)
            victim = saving[rng.randrange(2)]
            os.kill(victim.pid, signal.SIGKILL)
            for process in saving:
                process.join(30)
                process.kill()
            plain = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 300))
            found = keeper.resume(plain)
            assert found is not None
            values = {float(v) for param in plain.parameters() for v in param.detach().unique()}
            assert found.verified and values == {float(found.step)}, (found.step, values)
            loaded += 1
            first, before = found.step + 1, found.path
    ours.send(None)
    good, gone, bad = ours.recv()
    print(f"{count} kills: {loaded} times the newest was loaded, whole; the looker verified {good} "
          f"checkpoints, {gone} were removed meanwhile, {len(bad)} bad {bad[:3]}")  # fmt: skip


def main() -> None:
    if importlib.util.find_spec("s3fs") is None or importlib.util.find_spec("moto") is None:
        print('not run: pip install s3fs "moto[server]"')
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="10m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    given = parser.parse_args()
    with server():
        if given.kills:
            kill(given.kills)
            return
        result = run_ranks(job, 2, given.model, given.rounds)
    base = common.spread(result["seconds"]["save, local"])["median"]
    rows = []
    for name, values in result["seconds"].items():
        took = common.spread(values)["median"]
        speed = result["bytes"] / took / 1e6
        rows.append([name, f"{took:.3f}", f"{speed:.0f}", f"{took / base:.1f}"])
    print(f"{result['bytes'] / 1e6:.0f} MB")
    common.print_table(["", "s", "MB/s", "x save, local"], rows)


if __name__ == "__main__":
    main()

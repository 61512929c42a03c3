"""``python -m fsdpc check module:function``: does a sharded step equal the unsharded step?"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

SIGNS = {"error": "ERROR", "warning": "warning"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run one step sharded and unsharded on the same data, different on every rank, and compare "
        "losses, gradients and updated parameters."
    )
    parser.add_argument("training", help="module:function; see docs/memory.md for what it returns")
    parser.add_argument("--world", type=int, default=2, help="ranks on this host's processors")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument(
        "--api",
        choices=("FullyShardedDataParallel", "fully_shard"),
        default="FullyShardedDataParallel",
        help="how the model is sharded, unless the function gives 'shard'",
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds until ranks are ended"
    )
    parser.add_argument("--json", action="store_true", help="print JSON only")


def run(arguments: argparse.Namespace) -> int:
    """Return the exit code. 0: no error was found; 1: an error was found; 2: the check failed."""
    if arguments.world < 1 or arguments.steps < 1:
        print("fsdpc check: --world and --steps must be at least 1", file=sys.stderr)
        return 2
    options = (arguments.steps, arguments.api)
    outcomes = run_ranks(arguments.training, arguments.world, options, arguments.timeout)
    failed = [(rank, out["failed"]) for rank, out in enumerate(outcomes) if "failed" in out]
    if failed:
        rank, text = min(failed, key=lambda item: outcomes[item[0]].get("at", float("inf")))
        print(f"fsdpc check: rank {rank} failed first:\n{text}", file=sys.stderr)
        return 2
    return show(outcomes, arguments)


def show(outcomes: list[dict[str, Any]], arguments: argparse.Namespace) -> int:
    first = outcomes[0]
    bad = any(f["level"] == "error" for f in first["findings"])
    if arguments.json:
        print(json.dumps({"ok": not bad, **first}))
        return int(bad)
    for finding in first["findings"]:
        print(f"{SIGNS[finding['level']]:8}{finding['kind']}: {finding['text']}")
    figures = ", ".join(f"{name} {value:.2g}" for name, value in first["figures"].items())
    print(f"largest relative difference: {figures or 'not compared'}")
    print(
        f"{arguments.training}: "
        + (
            "the sharded step is NOT the unsharded one"
            if bad
            else f"{arguments.steps} step(s) on {arguments.world} ranks equal the unsharded model"
        )
    )
    return int(bad)


def run_ranks(
    training: str, world: int, options: tuple[int, str], timeout: float
) -> list[dict[str, Any]]:
    """Run all ranks, and return one result for each; the result of a rank that failed is
    ``{"failed": text}``. ``options``: steps and api. Ranks that run longer than ``timeout`` seconds
    are killed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="fsdpc-check-") as folder:
        ranks = [
            context.Process(target=_rank, args=(training, r, world, options, folder), daemon=True)
            for r in range(world)
        ]
        for process in ranks:
            process.start()
        _wait(ranks, Path(folder), timeout)
        return [_outcome(Path(folder) / f"{r}.json", p, timeout) for r, p in enumerate(ranks)]


def _wait(ranks: list[Any], folder: Path, timeout: float) -> None:
    """Wait until all ranks have ended. Kill those that still run at the deadline, which is 10 s
    after one rank has failed, and at the latest ``timeout`` seconds after the start.
    """
    deadline = time.monotonic() + timeout
    while any(p.is_alive() for p in ranks) and time.monotonic() < deadline:
        if any(p.exitcode not in (None, 0) for p in ranks):
            deadline = min(deadline, time.monotonic() + 10)
        time.sleep(0.05)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()


def _outcome(path: Path, process: Any, timeout: float) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    if process.exitcode == -9:
        return {"failed": f"no result within {timeout:g} s, or killed"}
    return {"failed": f"the process ended with code {process.exitcode} and no result"}


def _rank(training: str, rank: int, world: int, options: Any, folder: str) -> None:
    try:
        out = _compare(training, rank, world, options, folder)
    except BaseException:
        out = {"failed": traceback.format_exc(), "at": time.monotonic()}
    path = Path(folder) / f"{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(out))
    path.with_suffix(".part").rename(path)
    sys.stdout.flush()
    os._exit(1 if "failed" in out else 0)  # skips exit handlers, which may wait for other ranks


def _compare(training: str, rank: int, world: int, options: Any, folder: str) -> dict[str, Any]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    from fsdpc.plan.compare import compare
    from fsdpc.plan.sources.traced import load

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = compare(load(training), rank, world, *options).as_dict()
    dist.barrier()
    return result

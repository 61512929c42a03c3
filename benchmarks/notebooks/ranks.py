"""What the notebooks run on two ranks: ``torchrun --nproc-per-node=2 ranks.py steps|memory``.

Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROUNDS, WARM = 5, 1
ENGINES = ("local", "fsdpc", "fsdpc2", "fsdp1", "fsdp2")
# (layers, width, tokens of a rank's sequence), two sequences a rank.
SIZES = {"33 small units": (32, 32, 32), "5 units, 3.3 M": (4, 256, 64)}


def launch(what: str) -> Any:
    """The result of ``what`` on two ranks of this machine. ``RuntimeError`` has the log."""
    here = Path(__file__).resolve()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(here), what], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def steps() -> dict[str, dict[str, float]]:
    """Median milliseconds of a training step, the engines taking turns, the slower rank's."""
    return {size: _medians(*shape) for size, shape in SIZES.items()}


def _medians(layers: int, width: int, length: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from engines import GPTConfig, Workload, build, random_batch

    config = GPTConfig(layers=layers, width=width, heads=2, context=length)
    work = Workload(config, batch=2, seq=length, steps=1)
    runs = {engine: build(engine, work) for engine in ENGINES}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for turn in range(WARM + ROUNDS):
        for engine, training in runs.items():
            batch = random_batch(work, seed=turn * 10 + dist.get_rank())
            dist.barrier()
            begin = time.perf_counter()
            training.step(batch)
            spent = torch.tensor([time.perf_counter() - begin])
            dist.all_reduce(spent, op=dist.ReduceOp.MAX)
            times[engine].append(float(spent) * 1e3)
    return {engine: statistics.median(values[WARM:]) for engine, values in times.items()}


def memory() -> dict[str, Any]:
    """``fsdpc.memory_report`` of a small GPT after a step, and the engine's own figures."""
    import torch.distributed as dist
    from engines import WORKLOADS, build, random_batch

    import fsdpc

    training = build("fsdpc", WORKLOADS["10m"])
    training.step(random_batch(WORKLOADS["10m"], seed=dist.get_rank()))
    report = fsdpc.memory_report(training.model, training.optimizer)
    return {
        "report": str(report),
        "equal": report.equal,
        "stats": fsdpc.memory_stats(training.model),
    }


def main() -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {"steps": steps, "memory": memory}[sys.argv[1]]()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

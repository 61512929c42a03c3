"""Functions that notebooks run on two ranks: ``torchrun --nproc-per-node=2 ranks.py memory``.

Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def launch(what: str) -> Any:
    """Run ``what`` on two ranks of this machine and return the result. Raises ``RuntimeError``
    with the log if a rank fails.
    """
    here = Path(__file__).resolve()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(here), what], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def memory() -> dict[str, Any]:
    """Return ``memory_report`` and ``memory_stats`` of a small GPT after a training step."""
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
    found = {"memory": memory}[sys.argv[1]]()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

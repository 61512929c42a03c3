"""Print 20 rows of predicted and measured activations, which docs/memory.md summarises.

torchrun --nproc-per-node=2 tests/dist/activations_table.py
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parent))
from plan_models import MODELS
from test_plan_activations import MIXED, measured, predicted

ROW = "{:8} {:5} {:>13} {:>12} {:>12} {:>8} {:>12}"


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    if rank == 0:
        print(
            ROW.format(
                "model", "dtype", "checkpointed", "predicted B", "live B", "ratio", "allocator B"
            )
        )
    ratios = []
    for kind in MODELS:
        for precision in ({}, MIXED):
            for checkpointing in (0.0, 1.0):
                live, allocated, _ = measured(kind, checkpointing, precision, True)
                if rank == 0:
                    plan, _ = predicted(kind, world, checkpointing, precision)
                    ratios.append(plan / live)
                    name, all_of = "bf16" if precision else "fp32", f"{checkpointing:.0%}"
                    shown = (f"{plan:,}", f"{live:,}", f"{plan / live:.4f}", f"{allocated:,}")
                    print(ROW.format(kind, name, all_of, *shown), flush=True)
    if rank == 0:
        middle = statistics.median(ratios)
        print(f"min {min(ratios):.4f}, median {middle:.4f}, max {max(ratios):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

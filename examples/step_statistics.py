"""Norms of gradients, weights and updates of every unit, from the optimizer's own pass.

torchrun --nproc-per-node 2 examples/step_statistics.py --every 5

After each measured step, rank 0 prints one line per unit. To log the statistics, pass
`row._asdict()` to a logger such as wandb. (wandb's own `watch` reads gradients as if they were
whole, so it would see only shards.)
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from torch.nn import functional as F

from fsdpc import fully_shard, optim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--width", type=int, default=96)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=given.width))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-3)
    optimizer.measure(every=given.every)
    torch.manual_seed(dist.get_rank())
    for step in range(1, given.steps + 1):
        tokens = torch.randint(64, (4, 33))
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step_and_clip(1.0)
        optimizer.zero_grad()
        found = optimizer.statistics
        if found is not None and found.step == step and dist.get_rank() == 0:
            for unit, row in found.units.items():
                ratio = row.update_norm / row.weight_norm
                print(
                    f"step {step:3} {unit or 'root':10} gradient {row.grad_norm:.2e} (largest "
                    f"{row.grad_max:.1e})  weight {row.weight_norm:.2e}  update/weight {ratio:.1e}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

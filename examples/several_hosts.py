"""Trains on several machines, loses one, and goes on: elastic torchrun with fsdpc's checkpoints.

    # on each machine; node0 is the name of a machine that must not be lost
    export FSDPC_TIMEOUT=60 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --max-restarts 3 --nproc-per-node 2 \\
        --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id 7 \\
        examples/several_hosts.py --checkpoints /shared/run7

All machines must see the folder of checkpoints. When a machine is lost, the ranks on the other
machines raise an error after FSDPC_TIMEOUT seconds, or at once if only a process has ended.
torchrun then starts the ranks again on the machines that are left, and they load the newest
checkpoint at the new number of ranks. A machine that comes back, or a new machine, joins at the
next restart. TORCH_DISABLE_SHARE_RDZV_TCP_STORE is a variable of torch. Without it torchrun keeps
one store for all restarts, and after a restart gloo finds the addresses of ranks that have ended
in that store (torch 2.13).
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from torch.nn.functional import cross_entropy

from fsdpc import fully_shard
from fsdpc.checkpoint import Checkpointer

VOCABULARY = 256


def sharded_gpt() -> GPT:
    """Return a sharded GPT. After a block's forward, the ranks of each host keep one copy of the
    block's parameters in shared memory, which backward reads without traffic between hosts.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, width=128, heads=4, context=64, vocab=VOCABULARY))
    inside = int(os.environ["LOCAL_WORLD_SIZE"])
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, reshard_after_forward=inside if inside > 1 else True)
    fully_shard(model)
    return model


def batch(step: int, size: int = 4) -> torch.Tensor:
    """Return int64 [size, 65]: this rank's rows of a sequence that a model can learn."""
    generator = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
    start = torch.randint(VOCABULARY, (size, 1), generator=generator)
    return (start + 3 * torch.arange(65)) % VOCABULARY


def main() -> None:
    """Run the training once, starting from the newest checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", required=True, help="a folder that all machines see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = sharded_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = Checkpointer(args.checkpoints, every=args.every, async_=True)
    loaded = checkpoints.resume(model, optimizer)
    first = loaded.step + 1 if loaded else 1
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks from step {first}", flush=True)
    for step in range(first, args.steps + 1):
        rows = batch(step)
        logits = model(rows[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step, model, optimizer)
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    checkpoints.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

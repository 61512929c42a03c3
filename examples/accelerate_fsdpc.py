"""Hugging Face accelerate on fsdpc: one line more than the same script on PyTorch's FSDP.

    pip install accelerate
    torchrun --nproc-per-node 2 examples/accelerate_fsdpc.py

Trains a small byte-level GPT on this folder's own source files with gradient accumulation and
clipping. After the first half it writes a checkpoint. At the end it loads the checkpoint, trains
the second half again, and compares the losses of both runs.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from accelerate.utils import broadcast_object_list, set_seed
from gpt import GPT, GPTConfig
from torch.nn.functional import cross_entropy

import fsdpc

fsdpc.install()  # the one line: from here on, FullyShardedDataParallel is fsdpc's class


def accelerator_on_cpu_ranks(**options) -> Accelerator:
    """Return an Accelerator for ranks on the CPU. accelerate offers its FSDP plugin only on GPUs
    and similar devices, so this function tells accelerate that the CPU ranks are such devices. To
    train on GPUs, one for each rank, write ``Accelerator(**options)`` instead.
    """
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(cpu=True, **options)


def rows(number: int, length: int) -> torch.Tensor:
    """Return int64 [number, length + 1]: rows from random places of the sources in this folder."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - length, (number, 1))
    return data[starts + torch.arange(length + 1)]


def train(accelerator: Accelerator, model, optimizer, loader) -> list[float]:
    """Train on each batch once, and return the mean loss over the ranks for each batch."""
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=40, help="per rank, in each half")
    parser.add_argument("--width", type=int, default=192)
    arguments = parser.parse_args()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        state_dict_type="SHARDED_STATE_DICT",
        use_orig_params=True,
    )
    accelerator = accelerator_on_cpu_ranks(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    set_seed(0)
    config = GPTConfig(layers=4, width=arguments.width, context=64)
    model = accelerator.prepare(GPT(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    half = 8 * arguments.batches * accelerator.num_processes
    data = rows(2 * half, config.context).split(half)
    loaders = [torch.utils.data.DataLoader(part, batch_size=8) for part in data]
    optimizer, *loaders = accelerator.prepare(optimizer, *loaders)
    accelerator.print(model)
    first = train(accelerator, model, optimizer, loaders[0])
    accelerator.print(f"loss {first[0]:.3f} -> {first[-1]:.3f}")
    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])  # the folder of the main process
        accelerator.save_state(folder)
        second = train(accelerator, model, optimizer, loaders[1])
        accelerator.load_state(folder)
        again = train(accelerator, model, optimizer, loaders[1])
        accelerator.wait_for_everyone()
    accelerator.print(
        f"loss {second[0]:.3f} -> {second[-1]:.3f}, from the checkpoint the same: {again == second}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()

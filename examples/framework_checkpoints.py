"""fsdpc's checkpoints behind accelerate's ``save_state`` and transformers' Trainer.

    pip install accelerate transformers
    torchrun --nproc-per-node 2 examples/framework_checkpoints.py

``checkpoints_for`` makes ``accelerator.save_state`` and ``load_state`` write and read models and
optimizers with fsdpc.checkpoint, and ``CheckpointTrainer`` does the same for Trainer's checkpoints.
Such checkpoints are written without a gather, are verified, and load at any number of ranks.
The framework still saves everything else: samplers, random states, the Trainer's own state.

The script trains, saves with accelerate, trains further, loads what it has saved, trains again, and
compares the losses.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import GPT2Config, GPT2LMHeadModel, Trainer

import fsdpc
from fsdpc import checkpoint

FOLDER = "fsdpc"  # fsdpc writes into this folder, inside the framework's checkpoint folder


def checkpoints_for(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    """Make ``save_state`` and ``load_state`` of this accelerator use fsdpc for the model and its
    optimizer. Call this after wrapping the model; ``model`` and ``optimizer`` may be prepared by
    the accelerator or not. Local.
    """

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        weights.clear()
        checkpoint.save(Path(folder) / FOLDER, model, optimizer, overwrite=True)

    def load(models: list[Any], folder: str) -> None:
        models.clear()
        checkpoint.load(Path(folder) / FOLDER, model, optimizer)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    for name in ("save_state", "load_state"):
        setattr(accelerator, name, without_own(accelerator, getattr(accelerator, name)))


def without_own(accelerator: Accelerator, call: Any) -> Any:
    """Return a function that hides the accelerator's models and optimizers while it runs ``call``.
    Otherwise accelerate would save or load them itself, besides calling the hooks.
    """

    def hidden(*args: Any, **options: Any) -> Any:
        kept = accelerator._models, accelerator._optimizers
        accelerator._models, accelerator._optimizers = [], []
        try:
            return call(*args, **options)
        finally:
            accelerator._models, accelerator._optimizers = kept

    return hidden


class CheckpointTrainer(Trainer):
    """A Trainer whose checkpoints fsdpc writes and reads."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _internal_call:
            super().save_model(output_dir)
        elif self.args.should_save:
            self.accelerator.unwrap_model(self.model).config.save_pretrained(output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step = self.state.global_step
        checkpoint.save(
            Path(output_dir) / FOLDER,
            self.model_wrapped,
            self.optimizer,
            self.lr_scheduler,
            step=step,
            overwrite=True,
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoint.load(Path(resume_from_checkpoint) / FOLDER, model or self.model_wrapped)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            folder = Path(checkpoint) / FOLDER
            fsdpc.checkpoint.load(folder, self.model_wrapped, self.optimizer, self.lr_scheduler)


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(64, (4, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    size |= {"bos_token_id": None, "eos_token_id": None}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **rates))


def main() -> None:
    for door in ("FullyShardedDataParallel", "fully_shard"):
        accelerator = Accelerator(cpu=True)
        model = tiny()
        if door == "fully_shard":
            for block in model.transformer.h:
                fsdpc.fully_shard(block)
            fsdpc.fully_shard(model)
        else:
            model = fsdpc.FullyShardedDataParallel(model, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        checkpoints_for(accelerator, model, optimizer)
        train(model, optimizer, 0, 3)
        with tempfile.TemporaryDirectory() as own:
            (folder,) = broadcast_object_list([own])  # the folder of the main process
            accelerator.save_state(folder)
            second = train(model, optimizer, 3, 6)
            accelerator.load_state(folder)
            again = train(model, optimizer, 3, 6)
            accelerator.wait_for_everyone()
        accelerator.print(
            f"{door}: losses {second}, from the checkpoint the same: {again == second}"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""PyTorch Lightning on fsdpc: one line more than the same script on PyTorch's FSDP.

    pip install lightning
    torchrun --nproc-per-node 2 examples/lightning_fsdpc.py

Trains a small byte-level GPT on this folder's own source files with Lightning's FSDPStrategy and
saves a sharded checkpoint. A second Trainer resumes from the checkpoint, and the script compares
its losses with those of the first Trainer, which has trained without interruption.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig
from lightning.pytorch.strategies import FSDPStrategy
from torch.nn.functional import cross_entropy

import fsdpc

fsdpc.install()  # the one line: from here on, FullyShardedDataParallel is fsdpc's class


class OnCPURanks(FSDPStrategy):
    """FSDPStrategy for CPU ranks. Lightning refuses the class FSDPStrategy itself without GPUs, but
    accepts a subclass. On a machine with GPUs, use ``FSDPStrategy``.
    """


class LanguageModel(pl.LightningModule):
    """The model, its training step and its optimizer. Nothing here depends on sharding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor], number: int) -> torch.Tensor:
        (rows,) = batch
        loss = cross_entropy(self.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SaveAfter(pl.Callback):
    """A callback that writes a checkpoint when epoch ``epoch`` has ended, on all ranks together."""

    def __init__(self, epoch: int, folder: str) -> None:
        self.epoch, self.folder = epoch, folder

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.folder)


def data(number: int, length: int) -> torch.utils.data.DataLoader:
    """Return a loader of ``number`` int64 batches [8, length + 1], whose rows come from random
    places of the sources in this folder.
    """
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(values) - length, (8 * number, 1))
    rows = torch.utils.data.TensorDataset(values[starts + torch.arange(length + 1)])
    return torch.utils.data.DataLoader(rows, batch_size=8)


def trainer(epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=OnCPURanks(auto_wrap_policy={Block}, state_dict_type="sharded"),
        max_epochs=epochs,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=40, help="of all ranks, in each epoch")
    parser.add_argument("--width", type=int, default=192)
    arguments = parser.parse_args()
    config = GPTConfig(layers=4, width=arguments.width, context=64)
    pl.seed_everything(0)
    loader = data(arguments.batches, config.context)
    with tempfile.TemporaryDirectory() as own:
        folder = str(Path(own, "checkpoint"))
        first = LanguageModel(config)
        trainer(2, SaveAfter(0, folder)).fit(first, loader)
        resumed = LanguageModel(config)
        again = trainer(2)
        again.fit(resumed, loader, ckpt_path=folder)
        dist.barrier()
    half = len(first.losses) // 2
    if again.is_global_zero:
        print(f"loss {first.losses[0]:.3f} -> {first.losses[-1]:.3f}")
        print(f"from the checkpoint the same: {resumed.losses == first.losses[half:]}")


if __name__ == "__main__":
    main()

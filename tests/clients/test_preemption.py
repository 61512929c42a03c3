"""Tests of SIGTERM on one rank in the Trainers of transformers and Lightning.

All ranks save the same step and end.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks

from fsdpc import checkpoint

KILLED_AT = 2


def ask_to_end(rank: int, step: int) -> None:
    if rank == 1 and step == KILLED_AT:
        os.kill(os.getpid(), signal.SIGTERM)


def in_trainer(rank: int, world: int, folder: str, version: int, resume: bool) -> Any:
    from test_trainer import Recording, arguments, build, data
    from transformers import TrainerCallback

    class Preempted(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            if not resume:
                ask_to_end(rank, state.global_step)
            if preemption.agreed():
                control.should_save = control.should_training_stop = True

    form = "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"
    args = arguments("fsdpc", "llama", folder, version=version, state_dict_type=form)
    args.save_steps = 100
    with checkpoint.Preemption(within=60) as preemption:
        trainer = Recording(
            model=build("llama"), args=args, train_dataset=data(), callbacks=[Preempted()]
        )
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{KILLED_AT}" if resume else None)
    return trainer.state.global_step, trainer.seen


@pytest.mark.parametrize("version", [1, 2])
def test_trainer(version: int, tmp_path: Path):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from test_trainer import STEPS, run

    form = "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"
    options = {"folder": str(tmp_path / "whole"), "version": version, "state_dict_type": form}
    whole = run_ranks(run, 2, kind="fsdpc", name="llama", **options)
    common = {"folder": str(tmp_path / "cut"), "version": version}
    first = run_ranks(in_trainer, 2, resume=False, **common)
    rest = run_ranks(in_trainer, 2, resume=True, **common)
    assert [step for step, _ in first] == [KILLED_AT] * 2
    assert [step for step, _ in rest] == [STEPS] * 2
    for (_, begin), (_, end), (losses, _) in zip(first, rest, whole, strict=True):
        assert begin + end == losses


def in_lightning(rank: int, world: int, folder: str, strategy: str) -> Any:
    import lightning.pytorch as pl
    from test_lightning import Block, Tiny, loader, trainer_of
    from test_lightning2 import ModelParallelStrategy, Sharded

    import fsdpc

    keeper = checkpoint.Checkpointer(folder, every=100, async_=True)

    class Preempted(pl.Callback):
        def on_train_start(self, trainer, module):  # replaces Lightning's SIGTERM handler
            self.preemption = checkpoint.Preemption(within=60)

        def on_train_batch_end(self, trainer, module, outputs, batch, number):
            ask_to_end(rank, trainer.global_step)
            ending = self.preemption.agreed()
            keeper.save(trainer.global_step, trainer.model, trainer.optimizers[0], force=ending)
            trainer.should_stop = trainer.should_stop or ending

        def on_train_end(self, trainer, module):
            self.preemption.close()

        def on_exception(self, trainer, module, error):
            self.preemption.close()

    if strategy == "fsdp":
        module, trainer = Tiny(), trainer_of("fsdpc", auto_wrap_policy={Block})
    else:
        fsdpc.install("fully_shard")
        made = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        module, trainer = Sharded(), trainer_of("fsdpc", strategy=made)
    trainer.callbacks.append(Preempted())
    before = signal.getsignal(signal.SIGTERM)
    trainer.fit(module, loader(7), loader(8))
    keeper.wait()
    return trainer.global_step, keeper.steps(), signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("strategy", ["fsdp", "fully_shard"])
def test_lightning(strategy: str, tmp_path: Path):
    """Preemption replaces Lightning's SIGTERM handler.

    Lightning's handler would broadcast a tensor in the middle of a rank's step.
    """
    pytest.importorskip("lightning", reason="lightning is not installed")
    from test_lightning import ELASTIC

    options = {"folder": str(tmp_path), "strategy": strategy}
    found = run_ranks(in_lightning, 2, env=ELASTIC, **options)
    assert found == [(KILLED_AT, [KILLED_AT], True)] * 2

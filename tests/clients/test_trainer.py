"""Tests of transformers' Trainer with its FSDP arguments: accumulation, clipping, resuming."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import MODELS, batch, both_models, build
from resume import with_state

import fsdpc

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate.state import DistributedType, PartialState
from transformers import Trainer, TrainingArguments

STEPS = 6


class Recording(Trainer):
    """A Trainer that records the loss of every micro-batch at full precision."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.seen = [*getattr(self, "seen", ()), loss.item()]
        return loss

    def _load_optimizer_and_scheduler(self, checkpoint):
        form = (self.args.fsdp_config or {}).get("state_dict_type", "")
        if checkpoint is not None and "SHARDED" in form:
            with_state(self.optimizer)  # a step of zero gradients: no parameter changes
        super()._load_optimizer_and_scheduler(checkpoint)


def arguments(kind: str, name: str, folder: str, **options) -> TrainingArguments:
    """Return Trainer's arguments. Kind "fsdpc" uses FSDP, and kind "ddp" does not.

    Trainer leaves FSDP to accelerate, which allows FSDP only if each of several processes has an
    accelerator device. One patch, of ``distributed_type``, makes it treat the CPU ranks as such
    processes. ``sync_module_states`` is off, because with it accelerate asks for the index of an
    accelerator.
    """
    config = {
        "version": 1,
        "transformer_layer_cls_to_wrap": [MODELS[name][1].__name__],
        "sync_module_states": "false",
        **options,
    }
    result = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="steps" if options.get("state_dict_type") else "no",
        save_steps=STEPS // 2,
        seed=1,
        fsdp=True if kind == "fsdpc" else None,
        fsdp_config=config if kind == "fsdpc" else None,
    )
    if kind == "fsdpc":
        fsdpc.install()
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return result


def data() -> list[dict[str, torch.Tensor]]:
    rows = []
    for step in range(2):
        for rank in range(4):
            both = batch(rank, step)
            rows += [{key: value[i] for key, value in both.items()} for i in range(2)]
    return rows


def with_adapters(model: torch.nn.Module) -> torch.nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(2)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def saved_by_fsdpc() -> type[Trainer]:
    """Return the Trainer class of examples/framework_checkpoints.py, which saves by fsdpc."""
    examples = str(Path(__file__).parents[2] / "examples")
    if examples not in sys.path:
        sys.path.append(examples)
    from framework_checkpoints import CheckpointTrainer

    return type("Saving", (Recording, CheckpointTrainer), {})


def run(rank, world, kind, name, folder, resume=None, adapters=False, own=False, **options):
    args = arguments(kind, name, folder, **options)
    model = with_adapters(build(name)) if adapters else build(name)
    made = saved_by_fsdpc() if own else Recording
    trainer = made(model=model, args=args, train_dataset=data())
    trainer.train(resume_from_checkpoint=resume)
    kinds = fsdpc.FSDPModule if options.get("version") == 2 else fsdpc.FSDP
    assert isinstance(trainer.model_wrapped, kinds) == (kind == "fsdpc")
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer.seen, norms


@functools.cache
def on_ddp(**options):
    """Return the results of ``run`` on two ranks of DDP."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(run, 2, kind="ddp", folder=folder, **options)


def check_equals_ddp(folder: Path, options: dict[str, Any], **sharding: Any) -> None:
    got = run_ranks(run, 2, kind="fsdpc", folder=str(folder), **options, **sharding)
    for (losses, norms), (reference, reference_norms) in zip(got, on_ddp(**options), strict=True):
        assert len(losses) == 2 * STEPS and len(norms) == STEPS
        assert losses == pytest.approx(reference, rel=1e-6, abs=0)
        assert norms == pytest.approx(reference_norms, rel=1e-5, abs=0)


@both_models
@pytest.mark.parametrize("use_orig_params", ["true", "false"])
def test_training_equals_ddp(name, use_orig_params, tmp_path: Path):
    check_equals_ddp(tmp_path, {"name": name}, use_orig_params=use_orig_params)


@both_models
def test_training_with_fully_shard_equals_ddp(name, tmp_path: Path):
    check_equals_ddp(tmp_path, {"name": name}, version=2)


@pytest.mark.parametrize("use_orig_params", ["true", "false"])
def test_adapters_alone_are_trained(use_orig_params, tmp_path: Path):
    """For a peft model, Trainer replaces accelerate's wrap policy by peft's policy."""
    options = {"name": "llama", "adapters": True}
    check_equals_ddp(tmp_path, options, use_orig_params=use_orig_params)


@both_models
@pytest.mark.parametrize(
    "version, form",
    [
        (1, "FULL_STATE_DICT"),
        (1, "SHARDED_STATE_DICT"),
        (1, "fsdpc"),
        (2, "SHARDED_STATE_DICT"),
        (2, "fsdpc"),
    ],
)
def test_resuming_gives_the_same_losses(name, version, form, tmp_path: Path):
    """If new processes resume in the middle, losses and norms equal the first run's to the bit."""
    options = {"kind": "fsdpc", "name": name, "folder": str(tmp_path), "state_dict_type": form}
    options["version"] = version
    if form == "fsdpc":
        form_of_torch = "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"
        options |= {"own": True, "state_dict_type": form_of_torch}
    whole = run_ranks(run, 2, **options)
    middle = tmp_path / f"checkpoint-{STEPS // 2}"
    if form == "fsdpc":
        assert sorted(path.name for path in middle.glob("fsdpc/*.safetensors*")) == [
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
        ]
        assert not list(middle.rglob("*.bin")) and not list(middle.rglob("*.distcp"))
    again = run_ranks(run, 2, resume=str(middle), **options)
    for (losses, norms), (expected, expected_norms) in zip(again, whole, strict=True):
        assert losses == expected[STEPS:]  # two losses for each of STEPS // 2 steps
        assert norms[-STEPS // 2 :] == expected_norms[STEPS // 2 :]

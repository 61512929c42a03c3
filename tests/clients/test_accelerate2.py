"""Tests of Hugging Face accelerate with ``fsdp_version: 2`` on fsdpc."""

from __future__ import annotations

import functools

import pytest
import torch
from harness import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fsdpc

pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.state import DistributedType, PartialState  # noqa: E402
from test_accelerate import ACCUMULATE, accelerator_of, train  # noqa: E402
from toys import toy  # noqa: E402


def sharding(precision: str = "no", **plugin) -> Accelerator:
    """Return an Accelerator with FSDP2.

    accelerate allows FSDP2 only if each of several processes has an accelerator device. A single
    patch, of ``distributed_type``, makes it treat the CPU ranks as such processes.
    """
    PartialState(cpu=True)
    fsdpc.install("fully_shard")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    options = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        "state_dict_type": "SHARDED_STATE_DICT",
        **plugin,
    }
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=ACCUMULATE,
        fsdp_plugin=FullyShardedDataParallelPlugin(**options),
    )


def prepared(accelerator: Accelerator) -> tuple:
    """Return model, optimizer, loader and scheduler.

    Unlike in test_accelerate, the optimizer is made before the model is sharded, as FSDP2 requires.
    """
    data = torch.randint(13, (32, 5), generator=torch.Generator().manual_seed(7))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model = toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    return model, optimizer, *accelerator.prepare(loader, scheduler)


def run(rank, world, kind, precision="no", **plugin):
    accelerator = (
        accelerator_of("ddp") if kind == "ddp" else sharding(precision=precision, **plugin)
    )
    model, *rest = prepared(accelerator)
    if kind != "ddp":
        units = [m for m in model.modules() if isinstance(m, fsdpc.FSDPModule)]
        assert len(units) >= 3 and units[0] is model
    seen = train(accelerator, model, *rest)
    if kind == "ddp":
        return seen, accelerator.get_state_dict(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return seen, get_model_state_dict(model, options=options)


@functools.cache
def on_ddp():
    """Return the results of ``run`` on two ranks of DDP."""
    return run_ranks(run, 2, kind="ddp")


OPTIONS = {
    "plain": {},
    "kept after forward": {"reshard_after_forward": False},
    "loaded by rank 0": {"cpu_ram_efficient_loading": True},
    "activation checkpoints": {"activation_checkpointing": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_training_equals_ddp(name):
    got = run_ranks(run, 2, kind="fsdpc", **OPTIONS[name])
    expected = on_ddp()
    for (losses, _), (reference, _) in zip(got, expected, strict=True):
        assert losses == pytest.approx(reference, rel=1e-5, abs=0)
    for key, value in expected[0][1].items():
        torch.testing.assert_close(got[0][1][key], value, rtol=1e-5, atol=1e-6, msg=key)


def train_and_save(rank, world, folder):
    accelerator = sharding()
    parts = prepared(accelerator)
    train(accelerator, *parts)
    accelerator.save_state(folder)
    return train(accelerator, *parts)


def load_and_train(rank, world, folder):
    accelerator = sharding()
    parts = prepared(accelerator)
    accelerator.load_state(folder)
    return train(accelerator, *parts)


def test_resuming_gives_the_same_losses(tmp_path):
    expected = run_ranks(train_and_save, 2, folder=str(tmp_path))
    assert run_ranks(load_and_train, 2, folder=str(tmp_path)) == expected

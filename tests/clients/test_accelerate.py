"""Tests of Hugging Face accelerate with its FSDP plugin on fsdpc.

The training loop is the one in accelerate's documentation.
"""

from __future__ import annotations

import functools

import pytest
import torch
from harness import run_ranks
from resume import with_state
from torch import nn
from toys import check_equal, toy, wrap_blocks

import fsdpc

pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate import (  # noqa: E402
    Accelerator,
    FullyShardedDataParallelPlugin,
    load_checkpoint_in_model,  # noqa: E402
)
from accelerate.state import DistributedType, PartialState  # noqa: E402

ACCUMULATE = 2
MICROBATCHES = 8  # of each rank
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])
both_forms = pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])


def accelerator_of(kind: str, precision: str = "no", **plugin) -> Accelerator:
    """Return an Accelerator: for kind "fsdpc" with the FSDP plugin, for "ddp" without.

    accelerate offers the plugin only on several accelerators. A single patch tells accelerate that
    the CPU ranks are accelerators. Device, process group and everything else are unchanged.
    """
    PartialState(cpu=True)
    common = {
        "cpu": True,
        "mixed_precision": precision,
        "gradient_accumulation_steps": ACCUMULATE,
    }
    if kind == "ddp":
        return Accelerator(**common)
    fsdpc.install()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    options = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        **plugin,
    }
    options = FullyShardedDataParallelPlugin(fsdp_version=1, **options)
    return Accelerator(fsdp_plugin=options, **common)


def prepared(accelerator: Accelerator, dtype: torch.dtype | None = None):
    data = torch.randint(13, (2 * 2 * MICROBATCHES, 5), generator=torch.Generator().manual_seed(7))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model = toy() if dtype is None else toy().to(torch.bfloat16).to(dtype)  # equal values
    model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    return model, *accelerator.prepare(optimizer, loader, scheduler)


def train(accelerator, model, optimizer, loader, scheduler) -> list[float]:
    """Return the loss of every micro-batch and the gradient norm of every step."""
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            accelerator.backward(loss)
            seen.append(loss.item())
            if accelerator.sync_gradients:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return seen


def run(rank, world, kind, precision="no", dtype=None, **plugin):
    """Train, and return the result of ``train``, the parameters' dtypes and the full state dict."""
    accelerator = accelerator_of(kind, precision, **plugin)
    model, *rest = prepared(accelerator, dtype)
    assert (type(model) is fsdpc.FSDP) == (kind == "fsdpc")
    if kind == "fsdpc" and "auto_wrap_policy" not in plugin:
        assert len(fsdpc.FSDP.fsdp_modules(model)) == 3
    seen = train(accelerator, model, *rest)
    dtypes = {p.dtype for p in model.parameters()}
    state = accelerator.get_state_dict(model)
    return seen, dtypes, {key: value.clone() for key, value in state.items()}


@functools.cache
def on_ddp():
    """Return the results of ``run`` on two ranks of DDP."""
    return run_ranks(run, 2, kind="ddp")


@both_ways
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_training_equals_ddp(use_orig_params, strategy):
    """Losses with accumulation, clipping and a schedule, and the full state dict, equal DDP's."""
    options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
    got = run_ranks(run, 2, kind="fsdpc", **options)
    expected = on_ddp()
    for (losses, *_), (reference, *_) in zip(got, expected, strict=True):
        assert losses == pytest.approx(reference, rel=1e-6, abs=0)
    state, reference = got[0][-1], expected[0][-1]
    assert list(state) == list(reference)
    for name, value in state.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-5, atol=1e-7, msg=name)
    assert got[1][-1] == {}


OPTIONS = {
    "activation checkpoints": {"activation_checkpointing": True},
    "offload": {"cpu_offload": True},
    "prefetch": {"forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD"},
    "by size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
    "one unit": {"auto_wrap_policy": "no_wrap"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_plugin(name):
    got = run_ranks(run, 2, kind="fsdpc", use_orig_params=True, **OPTIONS[name])
    expected = on_ddp()
    for (losses, *_), (reference, *_) in zip(got, expected, strict=True):
        assert losses == pytest.approx(reference, rel=1e-6, abs=0)
    assert list(got[0][-1]) == list(expected[0][-1])


@both_ways
def test_a_bf16_model_is_trained_in_fp32(use_orig_params):
    """Under mixed precision accelerate converts low-precision parameters to fp32.

    accelerate does so through torch's private handle. The losses and weights then equal, to the
    bit, those of an fp32 model that starts with the same values.
    """
    options = {"kind": "fsdpc", "precision": "bf16", "use_orig_params": use_orig_params}
    got = run_ranks(run, 2, dtype=torch.bfloat16, **options)
    expected = run_ranks(run, 2, dtype=torch.float32, **options)
    for (losses, dtypes, _), (reference, *_) in zip(got, expected, strict=True):
        assert dtypes == {torch.float32}
        assert losses == reference
    for name, value in got[0][-1].items():
        assert torch.equal(value, expected[0][-1][name]), name


def wrap_by_hand_and_export(rank, world, folder, use_orig_params):
    accelerator = accelerator_of("fsdpc", use_orig_params=use_orig_params)
    wrapped = wrap_blocks("fsdpc", toy(), use_orig_params=use_orig_params)
    model = accelerator.prepare(wrapped)
    assert model is wrapped  # not wrapped again
    assert accelerator.unwrap_model(model) is model.module
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    plain = toy(seed=1)
    load_checkpoint_in_model(plain, folder)
    check_equal(plain.state_dict(), toy().state_dict(), "exported")


@both_ways
def test_a_model_wrapped_by_hand_is_exported(use_orig_params, tmp_path):
    """``prepare`` does not wrap the model again; a plain model loads what ``save_model`` wrote."""
    run_ranks(wrap_by_hand_and_export, 2, folder=str(tmp_path), use_orig_params=use_orig_params)


def train_and_save(rank, world, folder, **plugin):
    accelerator = accelerator_of("fsdpc", **plugin)
    parts = prepared(accelerator)
    train(accelerator, *parts)
    accelerator.save_state(folder)
    return train(accelerator, *parts)


def load_and_train(rank, world, folder, **plugin):
    accelerator = accelerator_of("fsdpc", **plugin)
    parts = prepared(accelerator)
    if plugin["state_dict_type"] == "SHARDED_STATE_DICT":
        with_state(parts[1])
    accelerator.load_state(folder)
    return train(accelerator, *parts)


@both_ways
@both_forms
def test_resuming_gives_the_same_losses(use_orig_params, form, tmp_path):
    """``load_state`` in new processes restores model, optimizer, schedule and random states.

    Later losses and norms equal the first run's to the bit, also with FSDPC_COLLECTIVES=c10d. If
    the resumed run has the other value of ``use_orig_params``, its optimizer has other tensors, and
    the results are equal up to rounding.
    """
    options = {"folder": str(tmp_path), "use_orig_params": use_orig_params, "state_dict_type": form}
    expected = run_ranks(train_and_save, 2, **options)
    assert run_ranks(load_and_train, 2, **options) == expected
    wire = {"FSDPC_COLLECTIVES": "c10d"}
    assert run_ranks(load_and_train, 2, env=wire, **options) == expected
    other = run_ranks(load_and_train, 2, **{**options, "use_orig_params": not use_orig_params})
    for losses, reference in zip(other, expected, strict=True):
        assert losses == pytest.approx(reference, rel=1e-6, abs=0)


def save_and_go_back(rank, world, folder, **plugin):
    """Return what ``train`` gives after ``save_state``, and again after ``load_state``."""
    accelerator = accelerator_of("fsdpc", **plugin)
    parts = prepared(accelerator)
    train(accelerator, *parts)
    accelerator.save_state(folder)
    first = train(accelerator, *parts)
    accelerator.load_state(folder)
    return first, train(accelerator, *parts)


@both_forms
def test_going_back_in_the_same_processes(form, tmp_path):
    for first, again in run_ranks(
        save_and_go_back, 2, folder=str(tmp_path), use_orig_params=True, state_dict_type=form
    ):
        assert again == first

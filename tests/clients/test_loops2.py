"""Tests of ``fully_shard`` on tiny transformers models, in training loops without a framework."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from harness import ranks
from models import adamw, batch, both_models, build, steps
from models import shard_in_place as shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fsdpc import FSDPModule, register_fsdp_forward_method

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@ranks(4)
def test_tensor_parallel_layers(rank, world):
    """A Llama with tensor-parallel layers trains.

    The ranks form two pairs. The two ranks of a pair split the layers (mesh dimension "tp"), and
    fully_shard shards over the pairs ("dp").
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    pair = mesh["dp"].get_local_rank()
    model, reference = build("llama"), build("llama")
    columns = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"]
    plan = {name: ColwiseParallel() for name in [*columns, "mlp.up_proj"]}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    shard("llama", model, mesh=mesh["dp"])
    optimizers = adamw(model), adamw(reference)
    for step in range(3):
        model(**batch(pair, step)).loss.backward()
        for other in range(2):
            (reference(**batch(other, step)).loss / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, value), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value.full_tensor(), want, rtol=0, atol=1e-5, msg=name)


@ranks(2)
@both_models
def test_resuming_gives_the_same_losses(rank, world, name, tmp_path):
    """A new model that loads a distributed checkpoint continues with the same losses to the bit."""
    model = shard(name, build(name))
    optimizer = adamw(model)
    steps(model, optimizer, rank, 0, 3)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(state, checkpoint_id=tmp_path)
    expected = steps(model, optimizer, rank, 3, 6)
    again = shard(name, build(name, seed=5))
    optimizer = adamw(again)
    state = dict(zip(("model", "optim"), get_state_dict(again, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        again, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    assert steps(again, optimizer, rank, 3, 6) == expected


@ranks(2)
@both_models
@pytest.mark.parametrize("how", ["unshard", "method"])
def test_generate(rank, world, name, how):
    """Every rank gets the unsharded model's tokens.

    Either unshard() gathers all units before generate(), or generate() gathers them one by one.
    """
    whole = build(name).eval()
    model = shard(name, build(name)).eval()
    prompt = batch(0, 0)["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if how == "method":
        register_fsdp_forward_method(model, "generate")
    else:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
    with torch.no_grad():
        got = model.generate(prompt, **options)
    assert torch.equal(got, whole.generate(prompt, **options))
    model.train()
    reference = DistributedDataParallel(whole.train())
    assert steps(model, adamw(model), rank, 0, 2) == steps(reference, adamw(reference), rank, 0, 2)


@ranks(2)
def test_saved_for_from_pretrained(rank, world, tmp_path):
    """A plain model loads the full state dict that rank 0 wrote by ``save_pretrained``."""
    model = shard("llama", build("llama"))
    steps(model, adamw(model), rank, 0, 2)
    state = get_model_state_dict(model, options=FULL)
    assert bool(state) == (rank == 0)
    if rank == 0:
        model.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    kind = type(build("llama"))
    again = kind.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(model(**batch(rank, 9)).loss, again(**batch(rank, 9)).loss)


@ranks(2)
@both_models
def test_adapters_on_a_frozen_model(rank, world, name):
    """With LoRA factors and frozen weights in each unit, losses and factors equal DDP's."""
    pytest.importorskip("peft", reason="peft is not installed")
    from test_peft import trained, with_adapters

    reference = DistributedDataParallel(with_adapters(name))
    model = shard(name, with_adapters(name))
    expected = steps(reference, trained(reference), rank, 0, 4)
    assert steps(model, trained(model), rank, 0, 4) == pytest.approx(expected, rel=1e-6, abs=0)
    whole = dict(reference.module.named_parameters())
    for key, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), whole[key], rtol=1e-5, atol=1e-6, msg=key)

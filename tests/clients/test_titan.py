"""Tests of torchtitan's ``apply_fsdp_to_decoder`` on fsdpc.

They cover the order in which torchtitan compiles, checkpoints and shards blocks, and its groups of
modules. They also cover gradients that are summed, not averaged, because each loss is already
divided by the number of tokens of all ranks. torchtitan's models need Triton, so a small decoder
with the same attribute names takes their place.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from toys import Block, tokens

import fsdpc

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytest.importorskip("tyro", reason="torchtitan's requirements are not installed")

WIDTH, VOCABULARY = 6, 13


class Decoder(nn.Module):
    """A decoder with the attributes that torchtitan's function reads."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.enable_weight_tying = tied
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block(WIDTH) for i in range(3)})
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


def train(model: nn.Module, batches: list[list[torch.Tensor]]) -> list[float]:
    """Make AdamW steps, and return the losses.

    As in torchtitan's trainer, a loss is a sum divided by the number of tokens of all ranks.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
    losses = []
    for row in batches:
        for ids in row:
            logits = model(ids).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum") / 20
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(rank, world, kind, tied=False, policy="default", replicas=False, compiled=False, ac=False):
    torch.manual_seed(0)
    model = Decoder(tied)
    ids = [[tokens(r, step) for r in range(world)] for step in range(3)]
    if kind == "plain":
        return [train(model, ids)]
    fsdpc.install("fully_shard")
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    for name, block in model.layers.named_children():
        block = checkpoint_wrapper(block) if ac else block
        if compiled:
            block.compile(backend="eager", fullgraph=True)
        model.layers.register_module(name, block)
    shape, names = ((2, world // 2), ("dp_replicate", "dp_shard"))
    mesh = init_device_mesh(
        "cpu", *((shape,) if replicas else ((world,),)), mesh_dim_names=names[not replicas :]
    )
    apply_fsdp_to_decoder(
        model, mesh, torch.float32, torch.float32, False, reshard_after_forward_policy=policy
    )
    assert isinstance(model, fsdpc.FSDPModule)
    return train(model, [[row[rank]] for row in ids])


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"tied": True, "policy": "always"},
        {"policy": "never", "ac": True},
        {"compiled": True},
        {"compiled": True, "ac": True, "tied": True},
        {"replicas": True},
    ],
    ids=lambda case: "-".join(case) or "default",
)
def test_losses_equal_the_unsharded_model(case):
    world = 4 if "replicas" in case else 2
    got = run_ranks(run, world, kind="fsdpc", **case)
    (expected,) = run_ranks(run, world, kind="plain", tied=case.get("tied", False))[0]
    for rank, losses in enumerate(got):
        assert losses == pytest.approx(expected[rank::world], rel=1e-5, abs=0)

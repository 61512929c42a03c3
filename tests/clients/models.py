"""Tiny Hugging Face language models with random weights, batches for them and a training loop."""

from __future__ import annotations

import functools

import pytest
import torch

from fsdpc import FSDP, fully_shard

pytest.importorskip("transformers", reason="transformers is not installed")
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

VOCABULARY = 64
both_ways = pytest.mark.parametrize("use_orig_params", [True, False])
both_models = pytest.mark.parametrize("name", ["llama", "gpt2"])


def llama() -> LlamaForCausalLM:
    """Return a Llama with grouped-query attention and untied embeddings."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    )


def gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 with tied embeddings, Conv1D weights and learned positions.

    The model has no dropout, so that runs can be compared.
    """
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    )


MODELS = {"llama": (llama, LlamaDecoderLayer), "gpt2": (gpt2, GPT2Block)}


def build(name: str, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return MODELS[name][0]()


def blocks(name: str) -> functools.partial:
    """Return the wrap policy that makes each transformer block a unit."""
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={MODELS[name][1]})


def shard(name: str, model: torch.nn.Module, **options) -> FSDP:
    return FSDP(model, auto_wrap_policy=blocks(name), **options)


def shard_in_place(name: str, model: torch.nn.Module, **options) -> torch.nn.Module:
    """Apply fully_shard to the blocks and the root, whose unit has the embeddings and the head."""
    for module in list(model.modules()):
        if isinstance(module, MODELS[name][1]):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * (step % 2) + rank)
    tokens = torch.randint(VOCABULARY, (2, 12), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0  # padding on the left, as tokenizers add it
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def steps(model, optimizer, rank, first, last) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = model(**batch(rank, step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

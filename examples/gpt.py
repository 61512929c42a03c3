"""A small GPT over bytes in plain PyTorch, which the examples and the benchmarks train.

Nothing in this file depends on sharding. `Block` is the class that a wrap policy names, so that
every transformer layer becomes one unit; embeddings, the last norm and the head belong to the root.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. The default has 10.9 million parameters."""

    layers: int = 6
    width: int = 384
    heads: int = 6
    context: int = 256
    vocab: int = 256


class Attention(nn.Module):
    """Causal self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(split).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    """Two linear layers with a GELU between them; the inner width is four times the outer one."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One pre-norm transformer layer: 12 parameters, one unit of FSDP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Maps byte values [batch, length] (int64) to logits [batch, length, vocab]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.apply(self._init_weights)
        for (
            block
        ) in self.blocks:  # the residual stream then starts with the same variance at any depth
            for last in (block.attention.out, block.mlp.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, context: int, seed: int = 0) -> bytes:
    """Samples `count` further bytes after `prompt`, one at a time, at temperature 0.8."""
    generator = torch.Generator().manual_seed(seed)
    tokens, device = torch.tensor([list(prompt)]), next(model.parameters()).device
    for _ in range(count):
        logits = model(tokens[:, -context:].to(device))[0, -1].float().cpu()
        choice = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, choice[None]], dim=1)
    return bytes(tokens[0].tolist())

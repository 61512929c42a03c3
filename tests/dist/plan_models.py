"""Small models for the planner: each function returns (model, inputs, loss)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = heads, kv, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv * self.dim, bias=False)
        self.v = nn.Linear(width, kv * self.dim, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        angle = torch.arange(x.shape[2], dtype=torch.float32)[:, None] / 100
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        y = self.norm1(x)
        q = self.turned(self.q(y).view(b, s, self.heads, self.dim).transpose(1, 2))
        k = self.turned(self.k(y).view(b, s, self.kv, self.dim).transpose(1, 2))
        v = self.v(y).view(b, s, self.kv, self.dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, s, w))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class MoEBlock(nn.Module):
    """A mixture of 4 experts; each takes a fixed number of tokens, so no shape depends on data."""

    def __init__(self, width: int, experts: int = 4, capacity: int = 96) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weight = self.router(flat).softmax(-1)
        best, rows = weight.topk(self.capacity, dim=0)
        picked = flat[rows.T]  # (experts, capacity, width)
        out = torch.bmm(F.gelu(torch.bmm(picked, self.up)), self.down) * best.T[..., None]
        summed = torch.zeros_like(flat).index_add(0, rows.T.flatten(), out.flatten(0, 1))
        return x + summed.view_as(x)


class OddBlock(nn.Module):
    """A block; in a model, every fifth block saves more activations than the others."""

    def __init__(self, width: int, place: int) -> None:
        super().__init__()
        self.line, self.place = nn.Linear(width, width), place

    def forward(self, x: Tensor) -> Tensor:
        x = self.line(x)
        for _ in range(4 if self.place % 5 == 4 else 0):
            x = torch.tanh(torch.exp(x / 10))
        return x


class LSTMBlock(nn.Module):
    """A block whose LSTM kernel saves a workspace."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Branch(nn.Module):
    """A tree of modules, each with a linear layer.

    The layers at depth 1 have a frozen matrix, so their inputs need not be saved.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)
        self.line.weight.requires_grad_(depth != 1)
        self.below = nn.ModuleList(Branch(width, depth - 1) for _ in range(2 if depth else 0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.line(x)
        for one in self.below:
            x = one(x)
        return x


class Decoder(nn.Module):
    def __init__(self, width: int, vocabulary: int, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.position = nn.Parameter(torch.zeros(1, 64, width))
        self.blocks = nn.ModuleList(GPTBlock(width, 4) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(ResBlock(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


def tokens_loss(output: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), inputs[0].flatten())


def images_loss(output: Tensor, inputs: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(output.float(), torch.zeros(len(output), dtype=torch.long))


def _tokens(blocks: list[nn.Module], width: int, vocabulary: int = 256):
    return Decoder(width, vocabulary, blocks), (torch.randint(vocabulary, (4, 64)),), tokens_loss


def gpt():
    return _tokens([GPTBlock(128, 4) for _ in range(6)], 128)


def llama():
    return _tokens([LlamaBlock(128, 8, 2, 344) for _ in range(6)], 128)


def moe():
    return _tokens([MoEBlock(128) for _ in range(6)], 128)


def vit():
    return ViT(96, 6), (torch.randn(8, 3, 64, 64),), images_loss


def resnet():
    return ResNet(24, 6), (torch.randn(8, 3, 24, 24),), images_loss


def odd():
    return _tokens([OddBlock(64, place) for place in range(15)], 64)


def lstm():
    return _tokens([LSTMBlock(64) for _ in range(2)], 64)


def tree():
    return _tokens([Branch(64, 2)], 64)


def copied():
    """Return a model with dropout, whose layers are deep copies of one layer."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return _tokens([nn.TransformerEncoder(layer, 5, enable_nested_tensor=False)], 64)


MODELS = {"gpt": gpt, "llama": llama, "vit": vit, "moe": moe, "resnet": resnet}
UNLIKE = {"odd": odd, "lstm": lstm, "tree": tree, "copied": copied}
BLOCKS = (GPTBlock, LlamaBlock, MoEBlock, ResBlock, OddBlock, LSTMBlock, Branch)

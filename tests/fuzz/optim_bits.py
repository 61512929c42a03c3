"""Optimizers of whole matrices on real models: sharded ranks against one process, bitwise.

python tests/fuzz/optim_bits.py                          # everything; takes some minutes
python tests/fuzz/optim_bits.py --models moe --optimizers Muon --worlds 3

Every rank has its own batch. One process trains a copy on the batches of all ranks ("unsharded").
It adds the gradients in the order of the ranks and divides them once, as the engine does, and steps
the copy by the same optimizer of fsdpc. Where torch has the optimizer, torch's optimizer steps a
third copy: fused matrices and experts are then separate parameters, and torch's fused AdamW steps
the parameters that are no matrices.

After the last step, the losses of rank 0 in each step, the parameters, and the averages
(`optim.Average`) are compared. The program prints a table with a cell for each optimizer and model.
A cell has two counts, which are sums over all worlds and interfaces: how many values differ from
those of fsdpc's optimizer in one process, and how many differ from those of torch's optimizer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

import fsdpc
from fsdpc import optim

WIDTH, VOCABULARY, DECAY = 32, 48, 0.9
DOORS = ("FSDP", "flat", "fully_shard")


class Attention(nn.Module):
    """Attention with one matrix for queries, keys and values, or with three."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q = nn.Linear(WIDTH, WIDTH, bias=False)
            self.k = nn.Linear(WIDTH, WIDTH // 2, bias=False)
            self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=fused)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = self.c_attn(x).chunk(3, -1)
        else:
            q, k, v = self.q(x), self.k(x).repeat(1, 1, 2), self.v(x).repeat(1, 1, 2)
        return self.out((q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ v)


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 80), nn.Linear(80, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * 48, bias=False)
        self.down = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Two parameters, each with five experts, which only 1 or 5 ranks can divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 5, bias=False)
        self.experts_up = nn.Parameter(torch.randn(5, WIDTH, 48) / WIDTH**0.5)
        self.experts_down = nn.Parameter(torch.randn(5, 48, WIDTH) / 48**0.5)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).softmax(-1)
        hidden = F.silu(torch.einsum("bsd,edh->ebsh", x, self.experts_up))
        return torch.einsum("ebsh,ehd,bse->bsd", hidden, self.experts_down, chosen)


class Block(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], fused: bool, inner: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention = norm(WIDTH), Attention(fused)
        self.norm2, self.inner = norm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.inner(self.norm2(x))


class Language(nn.Module):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block()])
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Conv(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, 2, 1), nn.GroupNorm(4, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Conv(3, 16), Conv(16, 32)])
        self.hidden, self.head = nn.Linear(32 * 4, 48), nn.Linear(48, 16)

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 3, 8, 8, generator=generator)
        for block in self.blocks:
            x = block(x)
        x = self.head(F.relu(self.hidden(x.flatten(1))))
        return F.cross_entropy(x, torch.randint(16, (2,), generator=generator))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: Language(lambda: Block(nn.LayerNorm, True, Gelu())),
    "llama": lambda: Language(lambda: Block(nn.RMSNorm, False, Gated())),
    "moe": lambda: Language(lambda: Block(nn.RMSNorm, False, Experts())),
    "convnet": ConvNet,
}
SPLIT = {"c_attn": 3, "gate_up": 2}
ADAMW: dict[str, Any] = {"lr": 0.002, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
RATES: dict[str, Any] = {
    "split": SPLIT,
    "matrices": lambda name, shape: False if len(shape) == 4 else None,
    "adamw_lr": ADAMW["lr"],
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Muon": ("Muon", {"lr": 0.02, **RATES}),
    "Muon, float32": ("Muon", {"lr": 0.02, "ns_dtype": torch.float32, **RATES}),
    "Adafactor": ("Adafactor", {"lr": 0.02, "weight_decay": 0.1, "split": SPLIT}),
    "SOAP": ("SOAP", {"lr": 0.003, **RATES}),
    "Shampoo": ("Shampoo", {"lr": 0.003, **RATES}),
}


def build(model: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[model]()


def ours(model: nn.Module, name: str) -> tuple[Any, optim.Average]:
    kind, options = OPTIMIZERS[name]
    optimizer = getattr(optim, kind)(model.named_parameters(), **options)
    return optimizer, optim.Average(optimizer, decay=DECAY)


# --- one process ---------------------------------------------------------------------------------


class Torchs:
    """torch's optimizers for a copy of the model. They step views of the copy's parameters; a fused
    parameter has a view for each of its matrices."""

    def __init__(self, model: nn.Module, name: str) -> None:
        kind, options = OPTIMIZERS[name]
        self.model, self.pairs = model, []
        plain = optim.Muon(model.named_parameters(), **{**RATES, "lr": 0.02}).matrix_shapes()
        matrices, rest = [], []
        for key, param in model.named_parameters():
            count = next((n for k, n in SPLIT.items() if f"{k}.weight" in key), 1)
            is_stack = param.dim() == 3 and kind != "Adafactor"
            parts = param.data.unbind() if is_stack else param.data.chunk(count)
            leaves = [nn.Parameter(part) for part in parts]
            (matrices if kind == "Adafactor" or key in plain else rest).extend(leaves)
            self.pairs.append((param, leaves))
        own = {k: v for k, v in options.items() if k in ("lr", "weight_decay")}
        self.optimizers = [getattr(torch.optim, kind)(matrices, **own)]
        if rest:
            self.optimizers.append(torch.optim.AdamW(rest, **ADAMW, fused=True))

    def step(self) -> None:
        for param, leaves in self.pairs:
            assert param.grad is not None
            parts = param.grad.chunk(len(leaves))
            for leaf, part in zip(leaves, parts, strict=True):
                leaf.grad = part.reshape(leaf.shape).contiguous()
        for optimizer in self.optimizers:
            optimizer.step()


def torch_has(name: str) -> bool:
    return name in ("Muon", "Adafactor")


def mean_gradients(model: nn.Module, step: int, world: int) -> float:
    """Set the gradients to the mean over the ranks' batches, added in the engine's order. Return
    rank 0's loss."""
    total: list[Tensor] = []
    losses = []
    for rank in range(world):
        model.zero_grad()
        loss = model(100 * step + rank)
        loss.backward()
        losses.append(float(loss.detach()))
        grads = [p.grad for p in model.parameters()]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
    for param, grad in zip(model.parameters(), total, strict=True):
        param.grad = grad * (1 / world) if world > 1 else grad
    return losses[0]


Result = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def one_process(model: str, name: str, world: int, steps: int) -> tuple[Result, Result | None]:
    """Train in one process by fsdpc's optimizer, and by torch's. Return both results; the second is
    None if torch has no such optimizer."""
    copy = build(model)
    optimizer, average = ours(copy, name)
    losses = []
    for step in range(steps):
        losses.append(mean_gradients(copy, step, world))
        optimizer.step()
    averages = {key: average.of(param) for key, param in copy.named_parameters()}
    found = losses, dict(copy.named_parameters()), averages
    if not torch_has(name):
        return found, None
    copy = build(model)
    theirs = Torchs(copy, name)
    losses, averages = [], {}
    for step in range(steps):
        losses.append(mean_gradients(copy, step, world))
        theirs.step()
        for key, param in copy.named_parameters():
            if key in averages:
                averages[key].lerp_(param.detach(), 1.0 - DECAY)
            else:
                averages[key] = param.detach().clone()
    return found, (losses, dict(copy.named_parameters()), averages)


# --- ranks ---------------------------------------------------------------------------------------


def sharded(model: str, door: str) -> nn.Module:
    made = build(model)
    blocks = list(made.blocks)
    if door == "fully_shard":
        for block in blocks:
            fsdpc.fully_shard(block)
        return fsdpc.fully_shard(made)
    policy = torch.distributed.fsdp.wrap.CustomPolicy(lambda module: module in blocks)
    return fsdpc.FSDP(
        made,
        auto_wrap_policy=policy,
        use_orig_params=door == "FSDP",
        device_id=torch.device("cpu"),
    )


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the full parameters. Collective."""
    if isinstance(model, fsdpc.FSDP):
        with fsdpc.FSDP.summon_full_params(model, writeback=False):
            every = {k: p.detach().clone() for k, p in model.named_parameters()}
            return {k.replace("_fsdp_wrapped_module.", ""): p for k, p in every.items()}
    return {k: p.full_tensor().detach().clone() for k, p in model.named_parameters()}


def on_ranks(model: str, name: str, door: str, rank: int, steps: int) -> Result:
    made = sharded(model, door)
    optimizer, average = ours(made, name)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = made(100 * step + rank)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    values = full(made)
    with average.applied(made):
        return losses, values, full(made)


def differing(one: Result, other: Result) -> int:
    """Return how many losses and elements are not bitwise equal."""
    count = sum(a != b for a, b in zip(one[0], other[0], strict=True))
    for mine, theirs in zip(one[1:], other[1:], strict=True):
        assert mine.keys() == theirs.keys(), (mine.keys(), theirs.keys())
        for key, value in mine.items():
            count += int((value.detach() != theirs[key].detach()).sum())
    return count


Counts = dict[tuple[str, str, int, str], tuple[int, int | None]]


def run_rank(rank: int, world: int, store: str, given: Any, box: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for model in given.models:
        for name in given.optimizers:
            if rank == 0:
                unsharded, torchs = one_process(model, name, world, given.steps)
            for door in given.doors:
                found = on_ranks(model, name, door, rank, given.steps)
                if rank == 0:
                    of_torch = None if torchs is None else differing(found, torchs)
                    counts = differing(found, unsharded), of_torch
                    box.put(((model, name, world, door), counts))
                    print(model, name, world, door, *counts, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def run(given: Any) -> Counts:
    """Return two counts for each model, optimizer, world and interface: how many values differ from
    those of fsdpc's optimizer in one process, and from those of torch's optimizer."""
    found: Counts = {}
    for world in given.worlds:
        with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
            box = manager.Queue()
            mp.spawn(run_rank, (world, f"{folder}/store", given, box), nprocs=world)
            while not box.empty():
                key, counts = box.get()
                found[key] = counts
    return found


def print_table(found: Counts, given: Any) -> None:
    print(f"\n| optimizer | {' | '.join(given.models)} |\n| --- |{' --- |' * len(given.models)}")
    for name in given.optimizers:
        cells = []
        for model in given.models:
            own = [v for (m, n, *_), v in found.items() if (m, n) == (model, name)]
            ours, theirs = sum(a for a, _ in own), [b for _, b in own if b is not None]
            cells.append(f"{ours or 'equal'}, {(sum(theirs) or 'equal') if theirs else '-'}")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 3, 4, 8])
    parser.add_argument("--doors", nargs="+", default=list(DOORS), choices=DOORS)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    found = run(given)
    print_table(found, given)
    return int(any(a or b for a, b in found.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Tests of `load_pretrained` without transformers: key maps, random rearrangements, initialization
of values that the files do not have, refusals, and memory.
"""

from __future__ import annotations

import math
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from checkpoints import whole
from harness import ranks
from test_state_memory import peak_of
from torch import Tensor, nn

import fsdpc
from fsdpc import checkpoint
from fsdpc.checkpoint import CheckpointError, KeyMap, load_pretrained, pretrained
from fsdpc.checkpoint import lazy as lazy_module
from fsdpc.checkpoint.lazy import Lazy, Source

SEEDS = range(300)


def lazy_of(values: Tensor) -> Lazy:
    """Return these values as a tensor that is read from a file lazily."""
    flat = values.reshape(-1)

    def fetch(first: int, target: Tensor) -> None:
        assert first + len(target) <= len(flat)
        target.copy_(flat[first : first + len(target)])

    return Lazy(Source(values.shape, values.dtype, fetch))


def moved(choose: random.Random, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both tensors after the same random rearrangement."""
    shape = pair[0].shape
    dim = choose.randrange(len(shape)) if len(shape) else 0
    other = choose.randrange(len(shape)) if len(shape) else 0
    order = choose.sample(range(len(shape)), len(shape))
    at = choose.randrange(max(1, shape[dim] if shape else 1))
    size = shape[dim] if shape else 0
    ways = [
        lambda x: x.transpose(dim, other) if shape else x,
        lambda x: torch.cat((x, x), dim) if shape else x,
        lambda x: torch.stack((x, x), choose_dim),
        lambda x: x.split(max(1, size // 2), dim)[-1] if size else x,
        lambda x: x.unflatten(dim, (-1, 2)) if size and size % 2 == 0 else x,
        lambda x: x.flatten(),
        lambda x: x.select(dim, at) if size else x,
        lambda x: x.narrow(dim, at, size - at) if size else x,
        lambda x: x.permute(order).contiguous().reshape(-1),
        lambda x: x[..., ::2] if shape else x,
        lambda x: x.unsqueeze(choose_dim).squeeze(choose_dim),
        lambda x: torch.cat(x.unbind(dim), 0) if size and len(shape) > 1 else x,
    ]
    choose_dim = choose.randrange(len(shape) + 1)
    way = choose.choice(ways)
    return way(pair[0]), way(pair[1])


@pytest.mark.long
def test_rearranged_tensors_equal_torchs(monkeypatch):
    """After any chain of functions, each range of a lazy tensor equals the same range of torch's
    tensor, whatever the sizes of chunks and runs.
    """
    choose = random.Random(0)
    for seed in SEEDS:
        monkeypatch.setattr(lazy_module, "_CHUNK_BYTES", choose.choice([16, 64, 1 << 20]))
        monkeypatch.setattr(lazy_module, "_RUN_BYTES", choose.choice([1, 16, 1 << 20]))
        shape = [choose.randint(1, 6) for _ in range(choose.randint(1, 4))]
        values = torch.arange(float(math.prod(shape))).view(shape)
        pair = (values, lazy_of(values))
        for _ in range(choose.randint(1, 6)):
            if pair[0].numel() <= 2000:
                pair = moved(choose, pair)
        expected, found = pair
        assert isinstance(found, Lazy) and expected.shape == found.shape, seed
        first = choose.randint(0, expected.numel())
        target = torch.empty(choose.randint(0, expected.numel() - first), dtype=torch.float64)
        found.node.read(first, target)
        own = expected.reshape(-1)[first : first + len(target)].double()
        assert torch.equal(target, own), seed


def test_computed_tensors_and_refusals():
    codes, scale = torch.randint(-8, 8, (4, 6), dtype=torch.int8), torch.rand(4, 1)
    found = lazy_of(codes).to(torch.float32) * lazy_of(scale)
    target = torch.empty(24)
    found.node.read(0, target)
    assert torch.equal(target.view(4, 6), codes * scale)
    with pytest.raises(TypeError, match="would change a tensor of a file"):
        lazy_of(scale).mul_(2)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat((lazy_of(scale), lazy_of(torch.ones(3, 2))), 0)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        lazy_of(scale).view(3, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 14, bias=False)
        self.q = nn.Linear(6, 6, bias=False)
        self.k = nn.Linear(6, 4, bias=False)
        self.up = nn.Linear(6, 8)
        self.experts = nn.Parameter(torch.randn(12, 3, 6))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(6)


MAPS = [
    KeyMap("h.{i}.{x}_proj", "blocks.{i}.{x}.weight"),
    KeyMap(["h.{i}.wq", "h.{i}.wk", "h.{i}.wv"], "blocks.{i}.qkv.weight",
           lambda q, k, v: torch.cat((q, k, v))),
    KeyMap("h.{i}.fc", ["blocks.{i}.up.weight", "blocks.{i}.up.bias"],
           lambda x: (x[:, :-1], x[:, -1])),
    KeyMap("h.{i}.e.{e}.w", "blocks.{i}.experts", lambda all: torch.stack(all).transpose(1, 2)),
]  # fmt: skip


def foreign(model: Model) -> dict[str, Tensor]:
    """Return the model's values with the names and shapes that another program uses."""
    found = {"norm.weight": model.norm.weight, "norm.bias": model.norm.bias}
    for i, block in enumerate(model.blocks):
        found |= {f"h.{i}.q_proj": block.q.weight, f"h.{i}.k_proj": block.k.weight}
        parts = block.qkv.weight.split((6, 4, 4))
        found |= {f"h.{i}.w{x}": part for x, part in zip("qkv", parts, strict=True)}
        found[f"h.{i}.fc"] = torch.cat((block.up.weight, block.up.bias[:, None]), 1)
        found |= {f"h.{i}.e.{e}.w": w.T for e, w in enumerate(block.experts)}
    return {name: value.detach().contiguous() for name, value in found.items()}


def written(folder, state: dict[str, Tensor], rank: int, kind: str) -> None:
    if rank == 0:
        if kind == "bin":
            torch.save(state, folder / "pytorch_model.bin")
        else:
            from safetensors.torch import save_file

            save_file(state, folder / "model.safetensors", {"format": "pt"})
    dist.barrier()


def sharded(model: nn.Module, door: str) -> nn.Module:
    if door == "fully_shard":
        for block in model.blocks:
            fsdpc.fully_shard(block)
        return fsdpc.fully_shard(model)
    if door == "plain":
        return model
    return fsdpc.FSDP(model, use_orig_params=door == "orig")


@ranks(2, 3)
@pytest.mark.parametrize(("door", "kind"), [("fully_shard", "safetensors"), ("flat", "bin"),
                                            ("orig", "safetensors"), ("plain", "bin")])  # fmt: skip
def test_key_maps(rank, world, door, kind, tmp_path):
    torch.manual_seed(0)
    expected = Model()
    written(tmp_path, foreign(expected), rank, kind)
    with torch.device("meta" if door in ("fully_shard", "plain") else "cpu"):
        model = sharded(Model(), door)
    load_pretrained(model, tmp_path, keys=MAPS, strict=True)
    state = whole(model.state_dict())
    for name, value in expected.state_dict().items():
        assert torch.equal(state[name], value), name


@ranks(2)
def test_refused_maps(rank, world, tmp_path):
    torch.manual_seed(0)
    state = foreign(Model())
    del state["h.1.wk"]
    written(tmp_path, state, rank, "safetensors")
    with pytest.raises(CheckpointError, match=r"'h.1.wq' is in the files, but nothing as \['h"):
        load_pretrained(sharded(Model(), "fully_shard"), tmp_path, keys=MAPS)
    wrong = [
        KeyMap(["h.{i}.wq", "h.{i}.wv"], "blocks.{i}.qkv.weight", lambda q, v: torch.cat((q, v)))
    ]
    with pytest.raises(CheckpointError, match=r"blocks.0.qkv.weight has shape \(10, 6\)"):
        load_pretrained(sharded(Model(), "fully_shard"), tmp_path, keys=wrong)
    with pytest.raises(CheckpointError, match="fails for .*RuntimeError"):
        bad = KeyMap("h.{i}.fc", "blocks.{i}.up.weight", lambda x: x.view(5, 5))
        load_pretrained(sharded(Model(), "fully_shard"), tmp_path, keys=[bad])
    with pytest.raises(CheckpointError, match="would both be 'norm.weight'"):
        load_pretrained(Model(), tmp_path, rename=lambda name: "norm.weight")
    with pytest.raises(ValueError, match="is not in every source"):
        KeyMap("a.{i}", "b.{j}")
    with pytest.raises(ValueError, match="by= says how"):
        KeyMap(["a", "b"], "c")


class Rotary(nn.Module):
    """A module like torchtune's, in which a function registers the buffer again."""

    def __init__(self) -> None:
        super().__init__()
        self.rope_init()

    def rope_init(self) -> None:
        device = "meta" if torch.empty(0).is_meta else "cpu"
        self.register_buffer("theta", torch.arange(4.0, device=device) + 1, persistent=False)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.rotary = nn.Linear(4, 4), Rotary()
        self.scale = nn.Parameter(torch.ones(5))


def own_init(module: nn.Module) -> None:
    if isinstance(module, Custom):
        nn.init.constant_(module.scale, 3.0)
    if hasattr(module, "rope_init"):
        module.rope_init()


@ranks(2)
@pytest.mark.parametrize("door", ["fully_shard", "orig"])
def test_values_that_no_file_has(rank, world, door, tmp_path):
    """Parameters are initialized by `reset_parameters`, equally on all ranks, and buffers by their
    modules. An error names values that nothing writes; a function given as `init` can write them.
    """
    torch.manual_seed(0)
    written(
        tmp_path, {"line.weight": torch.randn(4, 4), "scale": torch.ones(5)}, rank, "safetensors"
    )
    less = tmp_path / "less"
    if rank == 0:
        less.mkdir()
    dist.barrier()
    written(
        less, {"line.weight": torch.randn(4, 4), "line.bias": torch.ones(4)}, rank, "safetensors"
    )

    def make() -> nn.Module:
        with torch.device("meta"):
            model = Custom()
        if door == "fully_shard":
            return fsdpc.fully_shard(model)
        return fsdpc.FSDP(
            model,
            use_orig_params=True,
            param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
        )

    model = make()
    torch.manual_seed(5 + rank)
    assert load_pretrained(model, tmp_path).initialized == ["line.bias"]
    torch.manual_seed(5)
    bias = torch.empty(4).uniform_(-0.5, 0.5)
    assert torch.equal(whole(model.state_dict())["line.bias"], bias)
    (theta,) = model.buffers()
    assert torch.equal(theta, torch.arange(4.0) + 1)
    with pytest.raises(CheckpointError, match=r"no initialisation .*writes them: scale\."):
        load_pretrained(make(), less)
    model = make()
    load_pretrained(model, less, init=own_init)
    assert torch.equal(whole(model.state_dict())["scale"], torch.full((5,), 3.0))


@ranks(2)
def test_stray_tensors_and_only(rank, world, tmp_path):
    torch.manual_seed(0)
    written(tmp_path, {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, rank, "safetensors")
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        model.table = torch.ones(2)
    with pytest.raises(CheckpointError, match="neither parameters nor buffers: table"):
        load_pretrained(model, tmp_path)
    model = fsdpc.fully_shard(nn.Linear(4, 4))
    before = whole(model.state_dict())["bias"].clone()
    assert load_pretrained(model, tmp_path, only="weight").initialized == []
    state = whole(model.state_dict())
    assert torch.equal(state["bias"], before)
    assert torch.equal(state["weight"], torch.ones(4, 4))
    with torch.device("meta"):  # so that the bias, which is not loaded, has no values
        model = nn.Linear(4, 4)
    found = load_pretrained(fsdpc.fully_shard(model), tmp_path, only="weight")
    assert found.empty == ["bias"] and whole(model.state_dict())["bias"].isnan().all()
    assert load_pretrained(model, tmp_path).empty == []
    assert torch.equal(whole(model.state_dict())["bias"], torch.ones(4))


@ranks(2)
def test_memory(rank, world, tmp_path):
    """The tensors have 192 MB. A rank takes the memory of its shard and at most 64 MB more, also
    for transposed and concatenated tensors.
    """
    if rank == 0:
        state = {"a": torch.ones(16, 1 << 20), "b": torch.full((16, 1 << 20), 2.0),
                 "c.0": torch.ones(1 << 12, 1 << 12)}  # fmt: skip
    written(tmp_path, state if rank == 0 else {}, rank, "safetensors")
    state = {}
    model = nn.ParameterDict({
        "ab": nn.Parameter(torch.empty(32, 1 << 20, device="meta")),
        "c": nn.Parameter(torch.empty(1 << 12, 1 << 12, device="meta")),
    })  # fmt: skip
    fsdpc.fully_shard(model)
    shard = 4 * (32 * (1 << 20) + (1 << 24)) / world / (1 << 20)
    maps = [KeyMap(["a", "b"], "ab", lambda a, b: torch.cat((a, b))), KeyMap("c.0", "c", torch.t)]
    peak = peak_of(lambda: load_pretrained(model, tmp_path, keys=maps))
    assert peak - shard < 64, peak  # MB
    local = model.ab.to_local()
    assert bool((local == rank + 1).all()) and bool((model.c.to_local() == 1).all())


@ranks(3)
def test_downloads(rank, world, tmp_path):
    """One rank of the host downloads while the others wait, up to the deadline. If the download
    fails, all ranks raise its error.
    """
    written(tmp_path, {"weight": torch.ones(4, 4), "bias": torch.ones(4)}, rank, "safetensors")
    pretrained._POLL_S = 0.05
    asked = []

    def snapshot(name: str, revision: str | None, cache_dir: object) -> str:
        asked.append(name)
        if name == "org/gone":
            raise OSError("no such name")
        time.sleep(0.3)
        return str(tmp_path)

    pretrained._snapshot = snapshot
    model = nn.Linear(4, 4)
    load_pretrained(model, "org/name")
    assert bool((model.weight == 1).all()) and asked == (["org/name"] if rank == 0 else [])
    with pytest.raises(CheckpointError, match="takes longer than 0.1 s"):
        load_pretrained(model, "org/name", deadline=0.1)
    with pytest.raises(CheckpointError, match="OSError: no such name"):
        load_pretrained(model, "org/gone")
    os.chdir(tmp_path if rank == 1 else "/")
    (tmp_path / "some").mkdir(exist_ok=True)
    dist.barrier()
    with pytest.raises(CheckpointError, match="some is missing, and 'some' is no name"):
        load_pretrained(model, "some")


@ranks(2)
def test_ranks_with_other_maps(rank, world, tmp_path):
    written(tmp_path, {"w": torch.ones(4, 4), "v": torch.ones(4, 4)}, rank, "safetensors")
    model = nn.ParameterDict({"x": nn.Parameter(torch.zeros(4, 4))})
    with pytest.raises(CheckpointError, match="rank 1 loads other tensors than rank 0"):
        load_pretrained(model, tmp_path, keys=[KeyMap("wv"[rank], "x")])
    assert checkpoint.load_pretrained is load_pretrained

"""fsdpc.checkpoint: any number of ranks, under any sharding, loads what other ranks saved.

Values are equal to the bit. A manifest has the digest of each tensor, and the digest does not
depend on the ranks that wrote the tensor. Two checkpoints are therefore compared by their
manifests. The first checkpoint is also compared with torch's full state dicts.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import FULL, KINDS, Mixed, build, mixed, typed
from harness import run_ranks
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from toys import loss_of, shard_blocks, tokens, toy, wrap_blocks

from fsdpc import checkpoint
from fsdpc.checkpoint import folders
from fsdpc.checkpoint.convert import convert
from fsdpc.checkpoint.ranks import ranks_of


def digests(path: str) -> dict[str, str]:
    """Return every tensor's digest by name; optimizer tensors' names begin with "state."."""
    body = json.loads((Path(path) / "fsdpc.json").read_text())
    return {name: form[0] for tensors in body["tensors"].values() for name, form in tensors.items()}


def tensors_of(path: str) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint with the safetensors library."""
    found = {}
    for file in sorted(Path(path).rglob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


def make(kind: str, model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under a kind of sharding, and its optimizer."""
    world = dist.get_world_size()
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
        options = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        model = wrap_blocks("fsdpc", toy() if model is None else model, **options)
    elif kind in ("no_shard", "fsdp1-no_shard"):
        engine = "fsdpc" if kind == "no_shard" else "torch.distributed.fsdp"
        model = wrap_blocks(engine, toy(), sharding_strategy=ShardingStrategy.NO_SHARD)
    elif kind == "fsdpc2":
        model = toy() if model is None else model
        shard_blocks(model)
    else:
        model = build(kind, model)
    params = [p for p in model.parameters() if p.requires_grad]
    half = len(params) // 2
    return model, torch.optim.AdamW([{"params": params[:half]}, {"params": params[half:]}], lr=0.01)


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        optimizer.step()


def loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(loss_of(model, tokens(0, 9)))


def write(rank: int, world: int, path: str, kind: str) -> float:
    model, optimizer = make(kind)
    train(rank, model, optimizer)
    checkpoint.save(path, model, optimizer, extra={"rank": rank}, step=2)
    if kind in KINDS:
        compare_with_full(path, model, optimizer)
    return loss(model)


def compare_with_full(path: str, model: nn.Module, optimizer: Any) -> None:
    """Check that the files have the values of torch's own FULL state dicts."""
    stored = tensors_of(path)
    with typed(model, FULL):
        expected = dict(model.state_dict())
        state = type(model).optim_state_dict(model, optimizer)["state"]
    for name, values in state.items():
        expected |= {f"state.{name}.{key}": value for key, value in values.items()}
    for name, value in expected.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if dist.get_rank() == 0 or not name.startswith("state."):
            assert torch.equal(stored[name], whole.cpu()), name
            assert stored[name].dtype == whole.dtype, name


def read_and_write(rank: int, world: int, path: str, to: str, kind: str, saved_by: int) -> float:
    model, optimizer = make(kind)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    found = checkpoint.load(path, model, optimizer)
    assert found.step == 2 and found.world == saved_by and found.verified
    assert found.extra == ({"rank": rank} if world == saved_by else None)
    assert found.extras == [{"rank": r} for r in range(saved_by)]
    checkpoint.save(to, model, optimizer, extra={"rank": rank}, step=2)
    return loss(model)


CHAINS = [
    ["fsdpc", "fsdpc-flat", "plain", "fsdpc-mesh", "fsdp1"],
    ["fsdp1-flat", "fsdp2", "plain", "hybrid", "fsdpc"],
    ["fsdp2", "fsdp1", "fsdpc", "no_shard", "fsdp1-no_shard"],
]


@pytest.mark.parametrize("kinds", CHAINS, ids=lambda kinds: kinds[0])
def test_any_world_size_and_sharding(tmp_path: Path, kinds: list[str]):
    worlds = [2, 3, 1, 4, 2]
    paths = [str(tmp_path / str(i)) for i in range(len(worlds))]
    losses = run_ranks(write, worlds[0], path=paths[0], kind=kinds[0])
    for i in range(1, len(worlds)):
        losses += run_ranks(
            read_and_write,
            worlds[i],
            path=paths[i - 1],
            to=paths[i],
            kind=kinds[i],
            saved_by=worlds[i - 1],
        )
        assert digests(paths[i]) == digests(paths[0])
    assert len(set(losses)) == 1
    assert any(name.startswith("state.blocks.0.up.weight.exp_avg") for name in digests(paths[0]))


def write_mixed(rank: int, world: int, path: str, kind: str) -> dict[str, Any]:
    model = build(kind, mixed(3))
    checkpoint.save(path, model)
    return dict(mixed(3).state_dict())


def read_mixed(rank: int, world: int, path: str, to: str, kind: str) -> None:
    model = build(kind, mixed(0))
    inner = next(m for m in model.modules() if isinstance(m, Mixed))
    inner.note = "another"
    checkpoint.load(path, model)
    checkpoint.save(to, model)
    assert inner.note == "kept"


@pytest.mark.parametrize("kind", ["fsdpc", "fsdpc-flat"])
def test_every_kind_of_tensor(tmp_path: Path, kind: str):
    """Checkpoints keep ties, buffers, extra state and parameters of every kind."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected = run_ranks(write_mixed, 2, path=first, kind=kind)[0]
    stored = tensors_of(first)
    expected.pop("_extra_state")
    tied = expected.pop("head.weight")
    assert torch.equal(tied, stored["embed.weight"])
    expected = {k: v for k, v in expected.items() if not k.startswith("again.")}
    assert sorted(stored) == sorted(expected)
    for name, value in expected.items():
        assert torch.equal(stored[name], value) and stored[name].dtype == value.dtype, name
    run_ranks(read_mixed, 3, path=first, to=second, kind=kind)
    assert digests(second) == digests(first)


def files_of(path: Path) -> dict[str, bytes]:
    skip = ("fsdpc.json", "extra.json")
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name not in skip
    }


def write_cut(rank: int, world: int, path: str) -> None:
    checkpoint.save(path, build("fsdpc"), dtype=torch.bfloat16)


def test_files_do_not_show_how_many_ranks_wrote_them(tmp_path: Path):
    for world in (1, 2, 3):
        run_ranks(write_cut, world, path=str(tmp_path / str(world)))
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "3")
    stored = tensors_of(str(tmp_path / "2"))
    for name, value in toy().state_dict().items():
        assert torch.equal(stored[name], value.bfloat16()), name


def write_on_hosts(rank: int, world: int, path: str, hosts: int, low: bool) -> None:
    """Save as if the ranks were on several hosts.

    If several hosts write parts of one page of a file, they write the page one after the other.
    """
    ranks = ranks_of(None)
    ranks.hosts = [f"host {number}" for number in range(hosts)]
    ranks.host = rank % hosts
    torch.manual_seed(1)
    model = build("fsdpc", nn.Sequential(nn.Linear(700, 500), nn.Linear(3, 3), nn.Linear(9, 99)))
    checkpoint.save(path, model, dtype=torch.bfloat16 if low else None)


@pytest.mark.parametrize("low", [False, True])
def test_hosts_that_share_pages(tmp_path: Path, low: bool):
    for hosts in (1, 3):
        run_ranks(write_on_hosts, 3, path=str(tmp_path / str(hosts)), hosts=hosts, low=low)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "3")


def load_wide(rank: int, world: int, path: str, kind: str) -> None:
    model = build(kind)
    with pytest.raises(checkpoint.CheckpointError, match=r"embed.weight has torch.bfloat16"):
        checkpoint.load(path, model)
    checkpoint.load(path, model, cast=True)
    with typed(model, FULL):
        for name, value in model.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(whole, toy().state_dict()[name].bfloat16().float()), name


@pytest.mark.parametrize("kind", ["fsdpc"])
def test_casts_on_request(tmp_path: Path, kind: str):
    run_ranks(write_cut, 2, path=str(tmp_path / "low"))
    run_ranks(load_wide, 3, path=str(tmp_path / "low"), kind=kind)


# --- torch's own format --------------------------------------------------------------------------


def write_dcp(rank: int, world: int, path: str, kind: str) -> None:
    """Write the same values in fsdpc's format and in torch's."""
    model, optimizer = make(kind)
    with pytest.raises(checkpoint.CheckpointError, match="the optimizer has no state"):
        checkpoint.save(f"{path}/dcp", model, optimizer, format="dcp")
    train(rank, model, optimizer)
    checkpoint.save(f"{path}/native", model, optimizer)
    checkpoint.save(f"{path}/dcp", model, format="dcp")
    checkpoint.save(f"{path}/dcp", model, optimizer, overwrite=True, format="dcp")
    folders.finish_removing()


def read_dcp(rank: int, world: int, path: str) -> None:
    """Load the checkpoint with torch's functions into a model of torch's fully_shard."""
    model, optimizer = make("fsdp2", toy(seed=5))
    weights, states = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": states}
    dcp.load(held, checkpoint_id=f"{path}/dcp")
    set_state_dict(
        model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"]
    )
    checkpoint.save(f"{path}/again", model, optimizer)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fsdpc-flat", "fsdpc2"])
def test_torch_reads_folders_in_its_format(tmp_path: Path, kind: str):
    run_ranks(write_dcp, 2, path=str(tmp_path), kind=kind)
    run_ranks(read_dcp, 3, path=str(tmp_path))
    assert digests(str(tmp_path / "again")) == digests(str(tmp_path / "native"))
    convert(tmp_path / "dcp", tmp_path / "converted", None, "safetensors")
    model, expected = toy(seed=5), tensors_of(str(tmp_path / "native"))
    checkpoint.load(tmp_path / "converted", model)
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def write_by_torch(rank: int, world: int, path: str, kind: str) -> None:
    """Write a checkpoint with torch's functions, and the same values in fsdpc's format."""
    model, optimizer = make(kind)
    train(rank, model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=f"{path}/dcp")
    checkpoint.save(f"{path}/native", model, optimizer)


def load_dcp(rank: int, world: int, path: str, kinds: list[str]) -> None:
    for kind in kinds:
        model, optimizer = make(kind, toy(seed=5))
        with pytest.raises(checkpoint.CheckpointError, match="only in the checkpoint: head.bias"):
            lacking = toy()
            lacking.head.bias = None
            checkpoint.load(f"{path}/dcp", build("fsdpc", lacking))
        checkpoint.load(f"{path}/dcp", model, optimizer)
        checkpoint.save(f"{path}/{kind}-{world}", model, optimizer)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "loads"),
    [
        ("fsdp2", [(1, ["fsdpc2"]), (3, ["fsdpc2", "fsdpc-flat", "fsdpc"])]),
        ("fsdp1", [(3, ["fsdpc2", "plain"])]),
    ],
)
def test_folders_of_torch_load(tmp_path: Path, kind: str, loads: list[tuple[int, list[str]]]):
    run_ranks(write_by_torch, 2, path=str(tmp_path), kind=kind)
    for world, kinds in loads:
        run_ranks(load_dcp, world, path=str(tmp_path), kinds=kinds)
        for loaded in kinds:
            assert digests(str(tmp_path / f"{loaded}-{world}")) == digests(str(tmp_path / "native"))


def fail_dcp(rank: int, world: int, path: str) -> list[str]:
    model = nn.BatchNorm1d(3)
    model.running_mean.fill_(rank)
    checkpoint.save(f"{path}/a", model, format="dcp")
    texts = []
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.save(f"{path}/b", model, format="dcp", step=3, async_=True)
    texts.append(str(error.value))
    if rank == 1:

        def broken(*arguments: Any, **options: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        FileSystemWriter.write_data = broken
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.save(f"{path}/a", model, overwrite=True, format="dcp")
    return [*texts, str(error.value)]


def test_torch_format_is_refused_or_fails_as_a_whole(tmp_path: Path):
    for refused, failed in run_ranks(fail_dcp, 2, path=str(tmp_path)):
        assert "format='dcp' has no step, async_: save without format=" in refused
        assert "rank 1: OSError: [Errno 5] Input/output error" in failed
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    held = {"model": {"running_mean": torch.full((3,), 9.0)}}
    dcp.load(held, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    assert held["model"]["running_mean"].tolist() == [0.0] * 3  # the values of rank 0

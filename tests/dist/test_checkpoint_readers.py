"""Tests that other libraries read checkpoints of several ranks without a conversion.

Other tests load a checkpoint between two forwards, while units stay gathered.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import build
from harness import run_ranks
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.fsdp import ShardingStrategy
from toys import loss_of, tokens, toy, wrap

from fsdpc import checkpoint

WIDTH = 1100  # a weight has 4.8 MB, which is more than one checksum block


class Named(nn.Module):
    """A module with the parameters of a state dict, so that ranks need not import transformers."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            module: nn.Module = self
            *folders, last = name.split(".")
            for folder in folders:
                if folder not in module._modules:
                    module.add_module(folder, nn.Module())
                module = module._modules[folder]
            module.register_parameter(last, nn.Parameter(value))


def write_named(rank: int, world: int, path: str) -> None:
    model = Named(torch.load(f"{path}.pt"))
    checkpoint.save(path, wrap("fsdpc", model))


@pytest.mark.long
def test_transformers_reads_it(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=31,
    )  # fmt: skip
    expected = transformers.LlamaForCausalLM(config).state_dict()
    torch.save(expected, tmp_path / "llama.pt")
    run_ranks(write_named, 2, path=str(tmp_path / "llama"))
    config.save_pretrained(tmp_path / "llama")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama").state_dict()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def write_big(rank: int, world: int, path: str, kind: str) -> None:
    torch.manual_seed(1)
    model = build(kind, nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.sum() for p in model(torch.ones(1, WIDTH))).backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer)


@pytest.mark.parametrize("kind", ["fsdpc", "fsdp2"])
def test_big_tensors_and_other_readers(tmp_path: Path, kind: str):
    """A tensor may have several checksum blocks.

    torch's HuggingFaceStorageReader can also read optimizer states by name.
    """
    path = tmp_path / "big"
    run_ranks(write_big, 3, path=str(path), kind=kind)
    body = json.loads((path / "fsdpc.json").read_text())
    assert len(body["tensors"]["model-00001-of-00001.safetensors"]["weight"][1]) == 2 * 8
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    for param in model.parameters():
        assert param.grad is not None
    optimizer.step()
    other = nn.Linear(WIDTH, WIDTH)
    assert checkpoint.load(path, other).verified
    with safe_open(str(path / "model-00001-of-00001.safetensors"), "pt") as opened:
        assert torch.equal(opened.get_tensor("weight"), model.weight)
    assert torch.equal(other.weight, model.weight)
    read = {"state.weight.exp_avg": torch.zeros(WIDTH, WIDTH), "state.bias.step": torch.zeros(())}
    reader = HuggingFaceStorageReader(str(path / "optimizer"))
    dcp.load(read, storage_reader=reader, no_dist=True)
    assert torch.equal(read["state.weight.exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert read["state.bias.step"] == 1


STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


def load_after_forward(rank: int, world: int, path: str, strategy: int, orig: bool) -> None:
    checkpoint.save(path, build("fsdpc"))
    options = {"sharding_strategy": STRATEGIES[strategy], "use_orig_params": orig}
    model = wrap("fsdpc", toy(5), **options)
    with torch.no_grad():
        before = loss_of(model, tokens(0, 0)).item()
    loss_of(model, tokens(0, 0))  # a graph that is never used keeps its units gathered
    checkpoint.load(path, model)
    with torch.no_grad():
        after = loss_of(model, tokens(0, 0)).item()
        assert after == loss_of(toy(), tokens(0, 0)).item() != before
    loss_of(model, tokens(0, 0)).backward()


@pytest.mark.parametrize("strategy", range(len(STRATEGIES)))
@pytest.mark.parametrize("orig", [True, False])
def test_values_are_seen_by_the_next_forward(tmp_path: Path, strategy: int, orig: bool):
    run_ranks(load_after_forward, 2, path=str(tmp_path / "a"), strategy=strategy, orig=orig)


def bytes_read() -> int:
    """Return how many bytes this process has read so far, from the page cache or a disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def count_bytes(rank: int, world: int, path: str, kind: str) -> dict[str, int]:
    """Return how many bytes this rank reads in a load, for each value of `verify`."""
    model = build(kind, nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)))
    optimizer = torch.optim.AdamW(model.parameters())
    sum(param.sum() for param in model.parameters()).backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer)
    checkpoint.load(path, model, optimizer)  # the first load also imports modules and opens files
    found = {}
    for verify in ("no", "before"):
        before = bytes_read()
        checkpoint.load(path, model, optimizer, verify=verify)
        found[verify] = bytes_read() - before
    return found


@pytest.mark.parametrize("kind", ["fsdpc", "fsdp2"])
def test_a_rank_reads_its_shard_and_no_more(tmp_path: Path, kind: str):
    """A rank reads its shard and little more.

    For each range, a rank may read one page more. Headers and JSON files are read as a whole, some
    of them twice.
    """
    found = run_ranks(count_bytes, 2, path=str(tmp_path / "a"), kind=kind)
    params = [512 * 1024, 1024, 512 * 1024, 512]
    shard = 3 * 4 * sum(params) // 2  # values and two moments
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    small = sum(path.stat().st_size for path in files if path.suffix == ".json")
    headers = 4096 * sum(path.suffix == ".safetensors" for path in files)
    pages = 4096 * 3 * len(params)
    for read in found:
        assert shard <= read["no"] <= shard + pages + 2 * (small + headers), (read, shard)
        assert 2 * shard <= read["before"] <= 2 * (shard + pages + small + headers), (read, shard)

"""Tests of profile_memory: live bytes by role and unit, files, and reports of planted leaks."""

from __future__ import annotations

import gc
import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from harness import ranks
from torch import nn
from toys import wrap

import fsdpc
from fsdpc.plan.sources.held import fragmentation, largest_free
from fsdpc.wrap import ModuleWrapPolicy

sys.path.append(str(Path(__file__).parents[1] / "simgpu" / "python"))
import env

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.kept: list[torch.Tensor] | None = None

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        if self.kept is not None:
            self.kept.append(hidden)
        return x + self.down(hidden)


def made(front: str):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 4))
    if front == "fsdp":
        model = wrap(
            "fsdpc", whole, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
        )
    else:
        for block in whole[1:4]:
            fsdpc.fully_shard(block)
        model = fsdpc.fully_shard(whole)
    return model, torch.optim.AdamW(model.parameters())


def train(model, optimizer, steps: int, each=lambda step: None) -> None:
    for step in range(steps):
        model(torch.ones(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        each(step)


def by_role(sample):
    return sample.point.roles


@ranks(2)
@pytest.mark.parametrize("front", ["fsdp", "fully_shard"])
def test_what_is_live(rank, world, front):
    model, optimizer = made(front)
    with fsdpc.profile_memory() as profile:
        train(model, optimizer, 4)
    stats = fsdpc.memory_stats(model)
    last = by_role(profile.samples[-1])
    engine = {
        "shards": "master_bytes",
        "gradient shards": "grad_bytes",
        "gather slots": "gather_bytes",
        "reduce slots": "reduce_bytes",
    }
    for role, key in engine.items():
        assert last[role] == stats[key], role
    states = sum(t.numel() for s in optimizer.state.values() for t in map(local, s.values()))
    assert last["optimizer states"] == 4 * states
    assert sum(last.get(role, 0) for role in ("activations", "unit gradients")) == 0
    # After the forward of unit 2, its saved activations are live under the name of the unit: the
    # output of relu (16 x 256), which the layer `down` also saves as its input, and the output of
    # `down` (16 x 64).
    after = [s for s in profile.samples if s.event == "post_forward" and s.unit == "2"]
    assert [s.live[("activations", "2")] for s in after] == [4 * 16 * (256 + 64)] * 4
    assert all(
        "2" in s.gathered for s in profile.samples if s.event == "pre_forward" and s.unit == "2"
    )
    backward = [s for s in profile.samples if s.phase == "backward"]
    assert any(("unit gradients", "2") in s.live for s in backward)
    assert len(profile.boundaries) == 4 and profile.growth() == []
    assert "highest in" in str(profile) and "LEAK" not in str(profile)
    assert all(tree.core.observer is None for tree in [model_tree(model)])


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def model_tree(model):
    return next(host._tree for host in fsdpc._engine.marks.hosts(model) if host._tree is not None)


@ranks(2)
def test_planted_leaks_are_named(rank, world):
    model, optimizer = made("fully_shard")
    train(model, optimizer, 1)
    model[2].kept = []
    with fsdpc.profile_memory(model) as profile:
        train(model, optimizer, 5)
    model[2].kept = None
    (growth,) = profile.growth()
    assert growth.role == "activations" and growth.units[0][0] == "2", growth
    assert growth.units[0][1] == 4 * 16 * 256
    assert "LEAK: activations grow by 16.00 KiB a step: 2 16.00 KiB" in str(profile), str(profile)

    with fsdpc.profile_memory(model) as profile:  # the optimizer keeps a growing list

        def remember(step):
            state = optimizer.state[model[3].up.weight]
            state.setdefault("history", []).append(torch.zeros(2048))

        train(model, optimizer, 5, remember)
    growths = {g.role: g for g in profile.growth()}
    assert growths["optimizer states"].units == (("3", 8192),), growths

    with fsdpc.profile_memory(model, tensors=False) as profile:  # unshard() without reshard()
        for _ in range(4):
            model(torch.ones(16, 8)).square().mean().backward()
            model[2].unshard()
            optimizer.step()
    (kept,) = profile.growth()
    assert kept.role == "gathered" and [unit for unit, _ in kept.units] == ["2"], kept
    assert "still gathered when steps end: 2 " in str(kept) and "reshard()" in str(kept)


@pytest.mark.long
@ranks(1)
def test_files(rank, world, tmp_path_factory=None):
    import tempfile

    from torch.cuda import _memory_viz

    model, optimizer = made("fsdp")
    with fsdpc.profile_memory(model) as profile:
        train(model, optimizer, 3)
    folder = Path(tempfile.mkdtemp())
    for suffix in ("json", "svg", "png", "pickle"):
        profile.save(folder / f"profile.{suffix}")
    found = json.loads((folder / "profile.json").read_text())
    assert found["schema"] == "fsdpc.profile/1" and len(found["samples"]) == len(profile.samples)
    picture = (folder / "profile.svg").read_text()
    assert "<svg" in picture and 'href="http' not in picture.replace('xlink:href="#', "")
    with open(folder / "profile.pickle", "rb") as file:
        snapshot = pickle.load(file)
    live = top = 0
    for entry in snapshot["device_traces"][0]:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        top = max(top, live)
    assert top == profile.peak.point.bytes
    assert any(e["category"] == "unknown" for e in snapshot["device_traces"][0])
    assert _memory_viz.trace(snapshot)
    assert _memory_viz.segsum(snapshot) and _memory_viz.trace_plot(snapshot)
    with pytest.raises(ValueError, match="profile.txt"):
        profile.save(folder / "profile.txt")
    with pytest.raises(TypeError, match="nn.Module"):
        fsdpc.profile_memory([])
    with fsdpc.profile_memory(), pytest.raises(fsdpc.StateError, match="another memory profile"):
        fsdpc.profile_memory().__enter__()
    del profile
    gc.collect()


def test_fragmentation_names_the_largest_free_block():
    segments = [
        {"blocks": [{"size": 512, "state": "active_allocated"}, {"size": 64, "state": "inactive"}]},
        {"blocks": [{"size": 96, "state": "inactive"}]},
    ]
    stats = {"reserved_bytes.all.current": 672, "active_bytes.all.current": 512}
    assert largest_free(segments) == 96
    assert "the largest free block 96 B of 0.16 KiB free" in fragmentation(stats, segments)


@pytest.mark.skipif(env.missing() is not None, reason=str(env.missing()))
@ranks(1, env=env.environment())
def test_on_the_simulated_gpu(rank, world):
    model, optimizer = made("fsdp")
    with fsdpc.profile_memory(model) as profile:
        train(model, optimizer, 4)
    last, stats = by_role(profile.samples[-1]), fsdpc.memory_stats(model)
    assert last["shards"] == stats["master_bytes"] > 0
    assert last["gradient shards"] == stats["grad_bytes"] and profile.growth() == []

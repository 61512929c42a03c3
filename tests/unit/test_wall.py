"""Modules that train do not need companions: the folders that test_layering.py lists after "".

Both interfaces, FSDP1's and FSDP2's, train in a copy of the package without companions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_layering import COMPANIONS

ROOT = Path(__file__).parents[2] / "fsdpc"

TRAIN = """
import os, sys
import torch
# For all children:
import torch._dynamo, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp
import torch.distributed as dist
from torch import nn


def train(wrapped):
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu")
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# An editable installation would find what a copy lacks.
ordinary = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "").lower()]
sys.meta_path[:] = ordinary
for folder in sys.argv[1:]:
    child = os.fork()  # torch is imported once
    if child == 0:
        sys.path.insert(0, folder)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        import fsdpc
        from fsdpc.sharded_grad_scaler import ShardedGradScaler

        assert fsdpc.__file__.startswith(folder), fsdpc.__file__
        expected = train(lambda model: model)
        for wrapped in (fsdpc.FullyShardedDataParallel, fsdpc.fully_shard):
            torch.testing.assert_close(train(wrapped), expected)
        print(*sorted(m for m in sys.modules if m.startswith("fsdpc.")), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, folder
"""


def copy_without(folder: Path, gone: tuple[str, ...]) -> str:
    """Link the package, except for the folders `gone`, into a folder; return that folder."""
    (folder / "fsdpc").mkdir(parents=True)
    for one in ROOT.iterdir():
        if one.name not in gone:
            (folder / "fsdpc" / one.name).symlink_to(one)
    return str(folder)


@pytest.mark.long
def test_both_interfaces_train_without_companions(tmp_path):
    choices = [COMPANIONS, *((name,) for name in COMPANIONS)]
    assert all((ROOT / name).is_dir() for name in COMPANIONS)
    folders = [copy_without(tmp_path / str(i), gone) for i, gone in enumerate(choices)]
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *folders],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr
    loaded = [line.split() for line in done.stdout.splitlines() if "fsdpc._C" in line]
    assert len(loaded) == len(choices)
    for names, gone in zip(loaded, choices, strict=True):
        assert not [n for n in names if n.split(".")[1] in gone]

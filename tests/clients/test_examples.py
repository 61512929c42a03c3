"""The examples for frameworks, run as their first lines say, in sizes that take seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    root = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": root,
            "OMP_NUM_THREADS": "1",
            "FSDPC_TIMEOUT": "60",
            "FSDPC_POISON": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_accelerate():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    lines = torchrun("accelerate_fsdpc.py", "--batches", "6", "--width", "48").splitlines()
    first, last = (line for line in lines if line.startswith("loss "))
    start, end = (float(word) for word in first.split() if word[0].isdigit())
    assert end < start
    assert last.endswith("from the checkpoint the same: True")


def test_lightning():
    pytest.importorskip("lightning", reason="lightning is not installed")
    lines = torchrun("lightning_fsdpc.py", "--batches", "12", "--width", "48").splitlines()
    (fall,) = (line for line in lines if line.startswith("loss "))
    start, end = (float(word) for word in fall.split() if word[0].isdigit())
    assert end < start
    assert "from the checkpoint the same: True" in lines


def test_checkpoints_in_frameworks():
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    lines = torchrun("framework_checkpoints.py").splitlines()
    for door in ("FullyShardedDataParallel", "fully_shard"):
        (line,) = (line for line in lines if line.startswith(f"{door}: losses"))
        assert line.endswith("from the checkpoint the same: True")

"""The examples, run as their first lines say, in sizes that take seconds."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import ranks

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


def test_step_statistics():
    lines = torchrun("step_statistics.py", "--steps", "2", "--every", "2").splitlines()
    assert [line.split()[2] for line in lines if line.startswith("step")] == [
        "GPT",
        "blocks.0",
        "blocks.1",
    ]


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


def trained_by(example, api: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the saved weights of a few steps of train_gpt.py."""
    options = "--steps 3 --batch 2 --seq 16 --device cpu --api".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train_gpt.py", *options, api])
        args = example.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    plain = example.GPT(example.GPTConfig(layers=2, width=24, heads=2, context=16))
    model = example.shard(plain, args, device)
    corpus = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(1))
    stop = SimpleNamespace(wanted=False)
    history, complete = example.train(model, corpus.to(torch.uint8), args, stop, device)
    assert complete
    example.save_weights(model, folder / api)
    dist.barrier()
    return [step["loss"] for step in history], torch.load(folder / api)


@ranks(2)
def test_qlora_reads_a_base_into_coded_shards(rank, world, tmp_path):
    for name in ("peft", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        example = importlib.import_module("qlora")
    folder = example.tiny(tmp_path)
    model, tokens = example.model_of(folder), torch.arange(48).view(2, 24)
    base = example.AutoModelForCausalLM.from_pretrained(folder)
    plain = example.get_peft_model(example.lowbit.quantize(base), example.ADAPTERS)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
    model(tokens, labels=tokens).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 28 and all("lora_" in name for name in trained)


@ranks(2)
def test_train_gpt_by_both_interfaces(rank, world, tmp_path):
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        example = importlib.import_module("train_gpt")
    expected, weights = trained_by(example, "FSDP", tmp_path)
    losses, ours = trained_by(example, "fully_shard", tmp_path)
    assert len(set(expected)) == 3
    assert losses == pytest.approx(expected, rel=1e-5)
    assert list(ours) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)

"""Tests that run the examples with small sizes. torchrun starts one of the examples."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import ranks, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


# The ranks' parent process imports these once, before it forks the ranks.
LOADED_BY_RANKS = ("accelerate", "transformers", "lightning.pytorch")
ELASTIC = {"TORCHELASTIC_RUN_ID": "test"}  # tells libraries that a launcher started the ranks


def printed(rank: int, world: int, name: str, options: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(sys, "argv", [f"{name}.py", *options])
        importlib.import_module(name).main()
    return out.getvalue()


def lines_of(name: str, *options: str, needs: str) -> list[str]:
    """Return the lines that rank 0 of 2 prints.

    The harness forks the ranks, because ranks that torchrun starts import everything again.
    """
    for library in needs.split():
        pytest.importorskip(library, reason=f"{library} is not installed")
    return run_ranks(printed, 2, env=ELASTIC, name=name, options=list(options))[0].splitlines()


def falls(line: str) -> bool:
    start, end = (float(word) for word in line.split() if word[0].isdigit())
    return end < start


def test_accelerate():
    options = ("--batches", "6", "--width", "48")
    lines = lines_of("accelerate_fsdpc", *options, needs="accelerate")
    first, last = (line for line in lines if line.startswith("loss "))
    assert falls(first)
    assert last.endswith("from the checkpoint the same: True")


def test_lightning():
    options = ("--batches", "12", "--width", "48")
    lines = lines_of("lightning_fsdpc", *options, needs="lightning")
    (fall,) = (line for line in lines if line.startswith("loss "))
    assert falls(fall)
    assert "from the checkpoint the same: True" in lines


def test_checkpoints_in_frameworks():
    lines = lines_of("framework_checkpoints", needs="accelerate transformers")
    for door in ("FullyShardedDataParallel", "fully_shard"):
        (line,) = (line for line in lines if line.startswith(f"{door}: losses"))
        assert line.endswith("from the checkpoint the same: True")


def test_step_statistics():
    """The torchrun command in the first lines of the example runs the example."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    root = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
    made = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "FSDPC_TIMEOUT": "60", "FSDPC_POISON": "1"}
    result = subprocess.run(
        [*command, str(EXAMPLES / "step_statistics.py"), "--steps", "2", "--every", "2"],
        env={**os.environ, **made},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    units = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("step")]
    assert units == ["GPT", "blocks.0", "blocks.1"]


def trained_by(example, api: str, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of a few steps of train_gpt.py and the weights that it saves."""
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

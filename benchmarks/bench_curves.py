"""Training curves of a byte-level GPT with each optimizer, with equal seeds, batches and schedule.

python benchmarks/bench_curves.py --json              # 10.9 million parameters, 400 steps
python benchmarks/bench_curves.py --layers 4 --width 192 --heads 6 --seq 128 --json
python benchmarks/bench_curves.py --worlds 1 2 3 --steps 20 --layers 2 --width 64 --heads 2

The first command writes results/curves.json and, with --picture, the curves as an SVG. Every
optimizer trains the same model from the same weights on the same batches. The figures are bits per
byte: the mean of the last 20 training steps, and the validation loss; tables.py adds the mean of
the last fifth of the steps. Lion, SGD, SOAP and Adafactor have learning rates of their own. --only
with --json also keeps the file's other cases that had the same Python and torch, and exits if the
file has another model or other batches. With --device cuda all ranks share GPU 0 (NCCL 2.30 or
newer).

With --codes the cases are options of QuantizedPolicy instead: AdamW trains with quantized weights
or gradients in the exchanges, and the results go to results/curves_codes.json. "0.1 % off" is the
run without quantization from slightly disturbed weights; it shows how far apart two runs without
quantization end. --llama trains transformers' Llama of the same sizes instead of the GPT, and
writes results/curves_codes_llama.json:

python benchmarks/bench_curves.py --codes --steps 2000 --batch 1 --seq 64 --json --llama

With --worlds every rank computes the same batch in bfloat16. The ranks' gradients are then equal,
so that their sums in float32 are exact on any number of ranks. Runs on different numbers of ranks
must then give equal weights with every optimizer in ``EQUAL``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import spawn
from tqdm import tqdm

sys.path.insert(0, str(common.HERE.parent / "examples"))
from gpt import GPT, Block, GPTConfig  # noqa: E402
from train_gpt import BITS, draw_batch, loss_of, read_corpus, validate  # noqa: E402

from fsdpc import (  # noqa: E402
    FullyShardedDataParallel,
    MixedPrecision,
    QuantizedPolicy,  # noqa: E402
    fully_shard,
    optim,
)
from fsdpc.wrap import transformer_auto_wrap_policy  # noqa: E402

ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.1}
LION = {"betas": (0.9, 0.99), "weight_decay": 0.5}
LAST = 20  # the figure "last" is the mean of this many training steps at the end
VALIDATED = 64, 32  # how many batches, and how many sequences in each
POINTS = 400  # a result's curve has at most this many points, each the mean of consecutive steps
Make = Callable[[Any, int], torch.optim.Optimizer]


def by_row(name: str, shape: tuple[int, ...]) -> int | None:
    """Return a block length for AdamMini, whose default rules do not know this model's names."""
    return shape[-1] if len(shape) == 2 else None


# By name: learning rate, dtype of the parameters, and a function that makes the optimizer from the
# parameters and the size of an attention head.
OPTIMIZERS: dict[str, tuple[float, torch.dtype, Make]] = {
    "torch AdamW fused": (
        1e-3,
        torch.float32,
        lambda p, _: torch.optim.AdamW(p, fused=True, **ADAM),
    ),
    "AdamW": (1e-3, torch.float32, lambda p, _: optim.AdamW(p, **ADAM)),
    "AdamWBF16, fp32 parameters": (1e-3, torch.float32, lambda p, _: optim.AdamWBF16(p, **ADAM)),
    "AdamWBF16, bf16 parameters": (1e-3, torch.bfloat16, lambda p, _: optim.AdamWBF16(p, **ADAM)),
    "AdamW8bit": (1e-3, torch.float32, lambda p, _: optim.AdamW8bit(p, **ADAM)),
    "AdamMini": (1e-3, torch.float32, lambda p, _: optim.AdamMini(p, block=by_row, **ADAM)),
    "Lion": (2e-4, torch.float32, lambda p, _: optim.Lion(p, **LION)),
    "SGD": (1e-1, torch.float32, lambda p, _: optim.SGD(p, momentum=0.9, weight_decay=1e-4)),
    "Muon, iteration in fp32": (  # 4 times as fast as an iteration in bfloat16
        1e-3,
        torch.float32,
        lambda p, _: optim.Muon(
            p, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float32
        ),
    ),
    "SOAP": (3e-3, torch.float32, lambda p, _: optim.SOAP(p, weight_decay=0.1)),
    "Shampoo": (
        1e-3,
        torch.float32,
        lambda p, _: optim.Shampoo(p, betas=(0.9, 0.95), weight_decay=0.1),
    ),
    "Adafactor": (1e-2, torch.float32, lambda p, _: optim.Adafactor(p)),
}
# Options of QuantizedPolicy by the name of the case; every case trains with AdamW.
PLAIN, OFF = "float32", "float32, 0.1 % off"
CODES: dict[str, dict[str, Any]] = {
    PLAIN: {"codec": None},
    OFF: {"codec": None},
    "weights bfloat16": {"codec": None, "param_dtype": torch.bfloat16},
    "weights int8": {},
    "weights mxfp8": {"codec": "mxfp8"},
    "weights nf4": {"codec": "nf4"},
    "gradients int8": {"codec": None, "reduce_codec": "int8"},
    "gradients int4_stochastic": {"codec": None, "reduce_codec": "int4_stochastic"},
    "weights int8, gradients int4_stochastic": {"reduce_codec": "int4_stochastic"},
    "weights int8, gradients int4 with error feedback": {
        "reduce_codec": "int4",
        "error_feedback": True,
    },
}
EQUAL = ("AdamWBF16, fp32 parameters", "AdamWBF16, bf16 parameters", "AdamW8bit", "Lion")


def rate(progress: float) -> float:
    """Return the learning rate as a fraction of its peak: a linear rise over the first 5 % of the
    run, then a cosine that ends at 5 %.
    """
    rise = min(1.0, (progress + 1e-3) / 0.05)
    return rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def device_of(options: argparse.Namespace) -> torch.device:
    """Return the device of the models and batches."""
    return torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")


def model_of(options: argparse.Namespace, name: str, low: torch.dtype) -> nn.Module:
    """Return the model with its blocks as units. The initial weights are equal for every optimizer,
    except that they are rounded for bfloat16 parameters.
    """
    torch.manual_seed(0)
    model = plain_model(options).to(OPTIMIZERS[name][1])
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=torch.float32),
        device_id=device_of(options),
        use_orig_params=True,
    )


class Llama(nn.Module):
    """A wrapper of transformers' Llama that takes tokens and returns logits, as GPT does."""

    def __init__(self, config: GPTConfig) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        inner = 64 * round(config.width * 8 / 3 / 64)  # the gated MLP has as many weights as GPT's
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.width,
                intermediate_size=inner,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                max_position_embeddings=config.context,
                use_cache=False,
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def coded_model(options: argparse.Namespace, name: str) -> nn.Module:
    """Return the model sharded by fully_shard, with the case's quantization of exchanges."""
    torch.manual_seed(0)
    model = plain_model(options).to(device_of(options))
    for param in model.parameters() if name == OFF else ():
        param.data *= 1 + 1e-3 * torch.randn_like(param)
    policy = QuantizedPolicy(reduce_dtype=torch.float32, **CODES[name])
    blocks = [m for m in model.modules() if type(m).__name__ in ("Block", "LlamaDecoderLayer")]
    for module in (*blocks, model):
        fully_shard(module, mp_policy=policy)
    return model


def training_of(
    name: str, options: argparse.Namespace
) -> tuple[nn.Module, float, torch.optim.Optimizer]:
    """Return the model of a case, its peak learning rate and its optimizer."""
    if options.codes:
        model, (peak, _, make) = coded_model(options, name), OPTIMIZERS["AdamW"]
    else:
        peak, stored, make = OPTIMIZERS[name]
        model = model_of(options, name, torch.bfloat16 if options.worlds else stored)
    return model, peak, make(model.named_parameters(), options.width // options.heads)


def clip(model: nn.Module) -> None:
    """Clip gradients: by the method of FullyShardedDataParallel, or by torch after fully_shard."""
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train(
    name: str, options: argparse.Namespace, draw: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[nn.Module, list[float]]:
    """Train and return the model and each step's loss in bits per byte, averaged over the ranks."""
    model, peak, optimizer = training_of(name, options)
    losses = []
    for step in tqdm(range(options.steps), desc=name, disable=dist.get_rank() != 0, mininterval=10):
        for group in optimizer.param_groups:
            group["lr"] = peak * rate(step / options.steps)
        loss = loss_of(model, draw())
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().double())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return model, [value / dist.get_world_size() * BITS for value in total.tolist()]


def plain_model(options: argparse.Namespace) -> nn.Module:
    """Return the model before it is sharded."""
    config = GPTConfig(options.layers, options.width, options.heads, options.seq)
    return Llama(config) if options.llama else GPT(config)


def points_of(losses: list[float]) -> list[float]:
    """Return a curve as at most ``POINTS`` means of consecutive losses."""
    each = -(-len(losses) // POINTS)
    return [statistics.mean(losses[i : i + each]) for i in range(0, len(losses), each)]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one case and return its curve and figures."""
    data, held = read_corpus()
    place = device_of(options)
    rng = torch.Generator().manual_seed(1000 + dist.get_rank())
    start = time.perf_counter()
    model, losses = train(
        name, options, lambda: draw_batch(data, options.batch, options.seq, rng, place)
    )
    rng = torch.Generator().manual_seed(1)
    count, rows = VALIDATED
    batches = [draw_batch(held, rows, options.seq, rng, place) for _ in range(count)]
    return {
        "parameters": sum(p.numel() for p in plain_model(options).parameters()),
        "bits_per_byte": points_of(losses),
        "last": statistics.mean(losses[-LAST:]),
        "validation": validate(model, batches) * BITS,
        "validation_bytes": count * rows * options.seq,
        "seconds": time.perf_counter() - start,
    }


def digest(name: str, options: argparse.Namespace) -> str:
    """Return a digest of the weights after a run in which all ranks use the same batches."""
    data, _ = read_corpus()
    rng = torch.Generator().manual_seed(5)
    place = device_of(options)
    model, _ = train(
        name, options, lambda: draw_batch(data, options.batch, options.seq, rng, place)
    )
    found = hashlib.sha256()
    for key, value in model.state_dict().items():
        found.update(key.encode() + value.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()


def rank_main(
    rank: int, world: int, port: int, options: argparse.Namespace, names: list[str], path: str
) -> None:
    """Run the cases on one rank; rank 0 writes the results to ``path``."""
    common.end_with_parent()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    if options.device == "cuda":
        torch.cuda.set_device(0)
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    elif options.codes:
        os.environ["FSDPC_HOST"] = f"{rank}"  # one host per rank: ranks of one host do not quantize
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    if options.worlds:
        results = {name: digest(name, options) for name in names}
    else:
        results = {name: measure(name, options) for name in names}
    if rank == 0:
        torch.save(results, path)
    dist.destroy_process_group()


def run(world: int, options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Train the cases ``names`` on ``world`` ranks and return rank 0's results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = Path(f"{options.out}.{world}")
    spawn(rank_main, (world, port, options, names, str(path)), nprocs=world)
    results = torch.load(path, weights_only=True)
    path.unlink()
    return results


def draw(results: dict[str, Any], steps: int, path: Path) -> None:
    """Draw the curves as an SVG: running means of the training loss over the steps."""
    pyplot = common.pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for number, (name, found) in enumerate(results.items()):
        smooth, mean = [], found["bits_per_byte"][0]
        each = -(-steps // len(found["bits_per_byte"]))
        share = min(1.0, 0.05 * each)
        for value in found["bits_per_byte"]:
            mean = (1 - share) * mean + share * value
            smooth.append(mean)
        style = "-" if number < 10 else "--"  # colors repeat after ten curves
        places = range(0, len(smooth), 1 + len(smooth) // 200)  # a picture shows at most 200 points
        drawn = [smooth[i] for i in places]
        axes.plot([i * each for i in places], drawn, style, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="bits per byte, running mean", ylim=(None, 5))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def show(results: dict[str, Any], first: str) -> None:
    """Print one table of the results, relative to the case ``first``."""
    base = results.get(first)
    rows = []
    for name, found in results.items():
        share = f"{100 * (found['validation'] / base['validation'] - 1):+.2f} %" if base else ""
        rows.append([name, f"{found['last']:.4f}", f"{found['validation']:.4f}", share])
    common.print_table(["", f"last {LAST} steps", "validation", f"against {first}"], rows)


def earlier(file: str, head: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Return the file's cases that had this run's Python and torch. Exit if the file has another
    model or other batches.
    """
    path = common.RESULTS / file
    kept = json.loads(path.read_text()) if path.exists() else {}
    if not kept:
        return {}
    if any(kept.get(key) != value for key, value in head.items()):
        raise SystemExit(f"{file} has other runs: leave --only away to replace them")
    same = [(key, run[key]) for key in ("python", "torch")]
    return {n: c for n, c in kept["cases"].items() if all(c["run"][k] == v for k, v in same)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument(
        "--worlds", type=int, nargs="*", default=[], help="compare these to the bit"
    )
    parser.add_argument("--only", default="", help="cases with this expression in their names")
    parser.add_argument("--codes", action="store_true", help="codes of what travels instead")
    parser.add_argument("--llama", action="store_true", help="with --codes: that model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", default="curves-out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--picture", default="", help="an SVG file")
    options = parser.parse_args()
    if options.worlds and options.codes:
        parser.error("--worlds compares optimizers, not codes")
    if options.llama and not options.codes:
        parser.error("--llama needs --codes")
    if options.worlds:
        names = [name for name in EQUAL if re.search(options.only, name)]
        runs = {world: run(world, options, names) for world in options.worlds}
        equal = all(found == runs[options.worlds[0]] for found in runs.values())
        for world, found in runs.items():
            for name, text in found.items():
                print(f"{world} ranks, {name}: {text[:16]}")
        raise SystemExit(0 if equal else "the runs differ")
    run_here = common.describe_run(kept=options.json)
    head = {"model": "Llama" if options.llama else "GPT"} if options.codes else {}
    head |= {"ranks": options.world}
    head |= {k: getattr(options, k) for k in ("steps", "layers", "width", "seq", "batch", "device")}
    cases, file = (CODES, "curves_codes.json") if options.codes else (OPTIMIZERS, "curves.json")
    file = "curves_codes_llama.json" if options.llama else file
    results = earlier(file, head, run_here) if options.only and options.json else {}
    for name in [name for name in cases if re.search(options.only, name)]:
        results[name] = {"run": run_here, **run(options.world, options, [name])[name]}
        if options.json:  # write after each case, because all cases together take long
            common.write_json(file, {**head, "cases": results})
    show(results, PLAIN if options.codes else "AdamW")
    if options.picture:
        draw(results, options.steps, Path(options.picture))


if __name__ == "__main__":
    main()

"""Trains a byte-level GPT of 11 million parameters on the Python standard library's own sources.

    python examples/train_gpt.py                         # starts its own ranks, about 3 minutes
    torchrun --nproc-per-node 2 examples/train_gpt.py    # the same, started by hand
    python examples/train_gpt.py --minutes 20 --dtype bfloat16

The sharding is an ordinary FSDP script: to train with PyTorch's own FSDP instead, set ENGINE=torch,
which changes the imports below and nothing else. What comes out lies in demo-out/: history.json,
loss.png, sample.txt and weights.pt, a full state dict that plain PyTorch loads.
Ctrl-C ends all ranks together after the step at hand; history and weights so far are saved.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import signal
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Block, GPTConfig, generate
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

if os.environ.get("ENGINE", "fsdpc") == "torch":
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
else:
    from fsdpc import FullyShardedDataParallel as FSDP
    from fsdpc import MixedPrecision
    from fsdpc.wrap import transformer_auto_wrap_policy

Batch = tuple[Tensor, Tensor]
BITS = 1 / math.log(2)  # a loss in nats per byte, times this, is in bits per byte
VALIDATION_EVERY = 20  # of the source files, one in so many is kept for validation
WARMUP = 0.03  # share of the run in which the learning rate rises


def read_corpus() -> tuple[Tensor, Tensor]:
    """Returns the bytes of the standard library, (training, validation), as 1-D uint8 tensors."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = [f for f in root.rglob("*.py") if skipped.isdisjoint(f.relative_to(root).parts)]
    training, validation = bytearray(), bytearray()
    for index, file in enumerate(sorted(files)):
        part = validation if index % VALIDATION_EVERY == 0 else training
        part += file.read_bytes()
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(
        validation, dtype=torch.uint8
    )


def draw_batch(
    data: Tensor, batch: int, length: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, int64 [batch, length] each, from random places of `data`."""
    starts = torch.randint(len(data) - length, (batch, 1), generator=rng)
    window = data[starts + torch.arange(length + 1)].long()
    return window[:, :-1], window[:, 1:]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Returns the mean cross entropy of one batch in nats per byte, in fp32."""
    logits = model(batch[0]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def validate(model: nn.Module, batches: list[Batch]) -> float:
    """Returns the mean loss in nats per byte. With a sharded model, every rank must call it."""
    model.eval()
    total = sum(loss_of(model, batch).item() for batch in batches)
    model.train()
    return total / len(batches)


def memory_mb() -> dict[str, float]:
    """Returns this process's memory in MB; PSS counts a page that n processes share as 1/n."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {"rss": 0.0, "pss": 0.0}
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {"rss": kilobytes["Rss"] / 1000, "pss": kilobytes["Pss"] / 1000}


class StopRequest:
    """Ctrl-C sets a flag, which the ranks look at together after each step; a second one exits."""

    def __init__(self) -> None:
        self.wanted = False
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        if self.wanted:
            os._exit(130)
        self.wanted = True


def learning_rate(args: argparse.Namespace, progress: float) -> float:
    """Returns the rate at this share of the run: a short linear rise, then cosine or constant."""
    rise = min(1.0, (progress + 1e-3) / WARMUP)
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if args.schedule == "cosine" else 1.0
    return args.lr * rise * (0.05 + 0.95 * fall)


def shard(model: nn.Module, args: argparse.Namespace) -> FSDP:
    """Wraps every transformer block as a unit of its own, and the rest with the root."""
    low = getattr(torch, args.dtype)
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=torch.float32),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def progress_bar(rank: int) -> tqdm:
    """Returns a bar that runs from 0 to 1; in a log file it prints every ten seconds only."""
    return tqdm(
        total=1.0,
        disable=rank != 0,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,
        bar_format="{percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}{postfix}",
    )


def train(model: FSDP, data: Tensor, args: argparse.Namespace, stop: StopRequest) -> list[dict]:
    """Trains until the steps or the minutes are used up or somebody asks to stop.

    Returns the history, one dict a step, with the loss averaged over the ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = torch.Generator().manual_seed(args.seed * 1000 + rank)  # other data on each rank
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    history: list[dict] = []
    start = time.perf_counter()
    bar = progress_bar(rank)
    progress, elapsed, memory = 0.0, 0.0, memory_mb()
    while progress < 1.0 and not stop.wanted:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, progress)
        loss = loss_of(model, draw_batch(data, args.batch, args.seq, rng))
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

        # One small all-reduce a step: the ranks agree on the loss, on the time and on stopping.
        elapsed_here = time.perf_counter() - start
        agreed = torch.tensor([loss.item(), elapsed_here, float(stop.wanted)])
        dist.all_reduce(agreed)
        mean_loss, elapsed_now = (agreed[:2] / world).tolist()
        stop.wanted = agreed[2].item() > 0
        step_time, elapsed = elapsed_now - elapsed, elapsed_now
        speed = world * args.batch * args.seq / step_time
        if len(history) % 10 == 0:
            memory = memory_mb()
        history.append(
            {
                "step": len(history) + 1,
                "seconds": elapsed,
                "loss": mean_loss,
                "bits_per_byte": mean_loss * BITS,
                "grad_norm": norm.item(),
                "tokens_per_second": speed,
                "rss_mb": memory["rss"],
                "pss_mb": memory["pss"],
            }
        )
        done = len(history) / args.steps if args.steps else elapsed / (60 * args.minutes)
        progress = min(done, 1.0)
        bar.set_postfix_str(
            f"step {len(history)}, loss {mean_loss:.3f}, {mean_loss * BITS:.2f} bits/byte, "
            f"{speed:,.0f} tokens/s, {memory['rss']:.0f} MB RSS, {memory['pss']:.0f} MB PSS",
            refresh=False,
        )
        bar.update(progress - bar.n)
    bar.close()
    return history


def draw_curve(history: list[dict], path: Path, title: str) -> None:
    """Draws bits per byte over steps, each step and a running mean, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [entry["step"] for entry in history]
    bits = [entry["bits_per_byte"] for entry in history]
    smooth, mean = [], bits[0]
    for value in bits:
        mean = 0.9 * mean + 0.1 * value
        smooth.append(mean)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(steps, bits, color="tab:blue", alpha=0.3, label="training, each step")
    axes.plot(steps, smooth, color="tab:blue", label="training, running mean")
    axes.set(title=title, xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def load_plain(path: Path, config: GPTConfig, dtype: torch.dtype) -> GPT:
    """Loads saved weights into the plain model: nothing of FSDP takes part in this."""
    plain = GPT(config)
    plain.load_state_dict(torch.load(path, weights_only=True))
    return plain.to(dtype)


def finish(
    model: FSDP,
    validation: Tensor,
    history: list[dict],
    args: argparse.Namespace,
    interrupted: bool,
) -> None:
    """Saves everything and, unless the run was interrupted, checks the weights and samples text."""
    rank, out, config = dist.get_rank(), Path(args.out), model.module.config
    weights = model.state_dict()  # full weights under the plain names; every rank must take part
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        torch.save(weights, out / "weights.pt")
    rng = torch.Generator().manual_seed(args.seed)  # the same validation batches on each rank
    batches = [draw_batch(validation, 8, args.seq, rng) for _ in range(0 if interrupted else 8)]
    sharded_loss = validate(model, batches) if batches else math.nan
    if rank != 0:
        return

    result = {"args": vars(args), "world": dist.get_world_size(), "interrupted": interrupted}
    if batches:
        plain = load_plain(out / "weights.pt", config, getattr(torch, args.dtype))
        plain_loss = validate(plain, batches)
        print(
            f"validation: {sharded_loss * BITS:.4f} bits/byte sharded, "
            f"{plain_loss * BITS:.4f} with weights.pt in the plain model"
        )
        if abs(plain_loss - sharded_loss) > 1e-3:
            raise SystemExit("the saved weights do not give the sharded model's loss")
        result |= {
            "validation_bits_per_byte": sharded_loss * BITS,
            "plain_validation_bits_per_byte": plain_loss * BITS,
        }
        text = generate(plain, b"def read_", 240, config.context, args.seed)
        (out / "sample.txt").write_bytes(text)
        print(f"sample:\n{text.decode(errors='replace')}\n")
    result["history"] = history
    (out / "history.json").write_text(json.dumps(result, indent=1))
    if history:
        draw_curve(
            history,
            out / "loss.png",
            f"byte-level GPT on the Python library, {args.dtype}, {result['world']} ranks",
        )
    print(f"wrote {', '.join(sorted(f.name for f in out.iterdir()))} to {out}/")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="dtype of the gathered weights and of the computation",
    )
    parser.add_argument("--minutes", type=float, default=2.5, help="training time")
    parser.add_argument("--steps", type=int, help="train this many steps instead of --minutes")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence, at most 256")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="demo-out", help="folder for what comes out")
    parser.add_argument("--ranks", type=int, default=2, help="processes, if not under torchrun")
    return parser.parse_args()


def main() -> int:
    """Runs one rank. Returns the exit status."""
    args = parse_args()
    stop = StopRequest()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # the same initial weights on each rank
    training, validation = read_corpus()
    model = shard(GPT(GPTConfig()), args)
    if dist.get_rank() == 0:
        print(
            f"{len(training) / 1e6:.1f} MB to train on, {len(validation) / 1e6:.1f} MB to validate"
        )
    history = train(model, training, args, stop)
    finish(model, validation, history, args, stop.wanted)
    dist.destroy_process_group()
    return 130 if stop.wanted else 0


def launch(ranks: int) -> int:
    """Starts this script on `ranks` processes of this machine with torchrun's own launcher."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    try:
        run.main(["--standalone", f"--nproc-per-node={ranks}", *sys.argv])
    except SignalException:  # Ctrl-C: the ranks have been told and have ended
        return 130
    except ChildFailedError as error:  # the rank itself has printed why
        return next(iter(error.failures.values())).exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main() if "RANK" in os.environ else launch(parse_args().ranks))

"""Trains a byte-level GPT of 11 million parameters on the Python standard library's own sources.

    python examples/train_gpt.py                         # starts its own ranks, about 3 minutes
    torchrun --nproc-per-node 2 examples/train_gpt.py    # the same, started by hand
    python examples/train_gpt.py --minutes 20 --dtype bfloat16
    python examples/train_gpt.py --api fully_shard       # the interface of FSDP2

The script trains on GPUs if there is one for each rank, otherwise on the CPU; --device cpu or cuda
overrides this. Without torchrun it starts one rank per GPU, or two ranks on the CPU.
The model is sharded as in any FSDP script, by FullyShardedDataParallel or, with --api fully_shard,
by fully_shard. To train with PyTorch's own FSDP instead, set ENGINE=torch, which changes only the
imports below. The results are written to demo-out/: history.json, loss.png, sample.txt and
weights.pt, a full state dict that plain PyTorch loads.
Ctrl-C ends all ranks together after the current step; history and weights up to there are saved.
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from tqdm import tqdm

if os.environ.get("ENGINE", "fsdpc") == "torch":
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
else:
    from fsdpc import FullyShardedDataParallel as FSDP
    from fsdpc import MixedPrecision, MixedPrecisionPolicy, fully_shard
    from fsdpc.wrap import transformer_auto_wrap_policy

Arguments = argparse.Namespace
Batch = tuple[Tensor, Tensor]
BITS = 1 / math.log(2)  # a loss in nats per byte, times this, is in bits per byte
VALIDATION_EVERY = 20  # one in this many source files is kept for validation
PROMPT = b"def read_"  # the sampled text begins with this prompt
WARMUP = 0.05  # share of the run in which the learning rate rises


def read_corpus() -> tuple[Tensor, Tensor]:
    """Returns the bytes of the standard library, (training, validation), as 1-D uint8 tensors."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    files = [f for f in root.rglob("*.py") if skipped.isdisjoint(f.relative_to(root).parts)]
    training, validation = bytearray(), bytearray()
    for index, file in enumerate(sorted(files)):
        part = validation if index % VALIDATION_EVERY == 0 else training
        part += file.read_bytes()
    if not validation:
        raise SystemExit(f"no Python sources to train on in {root}")
    return tuple(torch.frombuffer(part, dtype=torch.uint8) for part in (training, validation))


def draw_batch(
    data: Tensor, batch: int, length: int, rng: torch.Generator, device: torch.device
) -> Batch:
    """Returns inputs and targets, int64 [batch, length] each, from random places of `data`."""
    starts = torch.randint(len(data) - length, (batch, 1), generator=rng)
    window = data[starts + torch.arange(length + 1)].long().to(device)
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
        return {"rss_mb": 0.0, "pss_mb": 0.0}
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {"rss_mb": kilobytes["Rss"] * 1024e-6, "pss_mb": kilobytes["Pss"] * 1024e-6}


class StopRequest:
    """A handler of Ctrl-C. The first Ctrl-C asks the ranks to end together after a step. A second
    Ctrl-C, or a Ctrl-C after the training, ends this process at once.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.training = True
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        if self.wanted or not self.training:
            os._exit(130)
        self.wanted = True


def learning_rate(args: Arguments, progress: float) -> float:
    """Returns the learning rate when the share `progress` of the run is done: a short linear rise,
    then a cosine or a constant.
    """
    rise = min(1.0, (progress + 1e-3) / WARMUP)
    fall = 0.5 * (1 + math.cos(math.pi * progress)) if args.schedule == "cosine" else 1.0
    return args.lr * rise * (0.05 + 0.95 * fall)


def device_of_rank(args: Arguments) -> torch.device:
    """Returns this rank's GPU if each rank of this machine has one, else the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    wanted = args.device or ("cuda" if gpus() >= local_ranks else "cpu")
    return torch.device(wanted, local_rank) if wanted == "cuda" else torch.device(wanted)


def gpus() -> int:
    """Returns how many GPUs torch can use on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start_group(device: torch.device) -> None:
    """Joins the default process group: NCCL's on GPUs, gloo's on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def shard(model: nn.Module, args: Arguments, device: torch.device) -> nn.Module:
    """Makes every transformer block one unit, and the rest of the model another unit (the root)."""
    low = getattr(torch, args.dtype)
    if args.api == "fully_shard":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
        mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=torch.float32),
        device_id=device,
        use_orig_params=True,
    )


def progress_bar(rank: int) -> tqdm:
    """Returns a bar that runs from 0 to 1; in a log file the bar prints only every ten seconds."""
    return tqdm(
        total=1.0,
        disable=rank != 0,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,
        bar_format="{percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}{postfix}",
    )


def clip(model: nn.Module, limit: float) -> Tensor:
    """Clips the gradients by their total norm over all ranks, and returns that norm."""
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(limit)
    return torch.nn.utils.clip_grad_norm_(model.parameters(), limit).full_tensor()


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> tuple[float, float]:
    """Takes one training step; returns this rank's loss and the norm of the whole gradient."""
    loss = loss_of(model, batch)
    loss.backward()
    norm = clip(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def mean_over_ranks(device: torch.device, *values: float) -> list[float]:
    """Returns the mean of each value over all ranks. Every rank must call it."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def train(
    model: nn.Module, data: Tensor, args: Arguments, stop: StopRequest, device: torch.device
) -> tuple[list[dict], bool]:
    """Trains until the steps or the minutes are used up or somebody asks to stop.

    Returns the history, one dict a step, and whether the run is complete.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    rng = torch.Generator().manual_seed(args.seed * 1000 + rank)  # each rank draws other data
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    history: list[dict] = []
    bar = progress_bar(rank)
    start = time.perf_counter()
    progress, elapsed, stopping = 0.0, 0.0, 0.0
    while progress < 1.0 and not stopping:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, progress)
        batch = draw_batch(data, args.batch, args.seq, rng, device)
        loss, norm = take_step(model, optimizer, batch)

        # One small all-reduce a step: the ranks agree on loss, time and stopping.
        before, now = elapsed, time.perf_counter() - start
        loss, elapsed, stopping = mean_over_ranks(device, loss, now, stop.wanted)
        done = len(history) + 1
        progress = done / args.steps if args.steps else elapsed / (60 * args.minutes)
        if done % 10 == 1:
            memory = memory_mb()
        if rank == 0 and not history and hasattr(model, "precision_line"):
            bar.write(model.precision_line)  # the line is complete after the first forward
        history.append(
            {
                "step": done,
                "seconds": elapsed,
                "loss": loss,
                "bits_per_byte": loss * BITS,
                "grad_norm": norm,
                "tokens_per_second": world * args.batch * args.seq / (elapsed - before),
                **memory,
            }
        )
        show(bar, history[-1], progress)
    bar.close()
    return history, progress >= 1.0


def show(bar: tqdm, entry: dict, progress: float) -> None:
    """Moves the progress bar to `progress` (0 to 1) and shows the last step's figures."""
    bar.set_postfix_str(
        f"step {entry['step']}, loss {entry['loss']:.3f}, {entry['bits_per_byte']:.2f} bits/byte, "
        f"{entry['tokens_per_second']:,.0f} tokens/s, "
        f"{entry['rss_mb']:.0f} MB RSS, {entry['pss_mb']:.0f} MB PSS",
        refresh=False,
    )
    bar.update(min(progress, 1.0) - bar.n)


def draw_curve(history: list[dict], validation: float | None, path: Path, title: str) -> None:
    """Draws bits per byte over steps as a PNG: each step, a running mean, the final validation."""
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
    if validation is not None:
        axes.plot(steps[-1], validation, "o", color="tab:orange", label="validation, at the end")
    axes.set(title=title, xlabel="step", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def load_plain(path: Path, config: GPTConfig, dtype: torch.dtype, device: torch.device) -> GPT:
    """Loads saved weights into the plain model, without any part of FSDP."""
    plain = GPT(config)
    plain.load_state_dict(torch.load(path, weights_only=True))
    return plain.to(device, dtype)


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes the full weights under the plain model's names. Every rank must take part."""
    if isinstance(model, FSDP):
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)  # empty except on rank 0
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, path)


def check_and_sample(
    sharded_loss: float, batches: list[Batch], args: Arguments, device: torch.device
) -> dict:
    """Loads the weights into the plain model, which must have the same loss, and samples text."""
    out, config = Path(args.out), GPTConfig()
    plain = load_plain(out / "weights.pt", config, getattr(torch, args.dtype), device)
    plain_loss = validate(plain, batches)
    print(
        f"validation: {sharded_loss * BITS:.4f} bits/byte sharded, "
        f"{plain_loss * BITS:.4f} with the saved weights in the plain model"
    )
    if not abs(plain_loss - sharded_loss) <= 1e-3:  # NaN, too
        raise SystemExit("the saved weights do not give the sharded model's loss")
    text = generate(plain, PROMPT, 240, config.context, args.seed)
    (out / "sample.txt").write_bytes(text)
    rule = "-" * 80
    print(f"sample:\n{rule}\n{text.decode(errors='replace')}\n{rule}")
    return {
        "validation_bits_per_byte": sharded_loss * BITS,
        "plain_validation_bits_per_byte": plain_loss * BITS,
    }


def finish(
    model: nn.Module,
    data: Tensor,
    history: list[dict],
    args: Arguments,
    complete: bool,
    device: torch.device,
) -> None:
    """Saves weights, history and curve; after a complete run also validates and samples."""
    out = Path(args.out)
    if dist.get_rank() == 0 and not complete:
        print(f"interrupted after step {len(history)}: saving what there is", flush=True)
    save_weights(model, out / "weights.pt")
    result = {"args": vars(args), "ranks": dist.get_world_size(), "complete": complete}
    result["device"] = device.type
    if complete:
        rng = torch.Generator().manual_seed(args.seed)  # the same batches on each rank
        batches = [draw_batch(data, 8, args.seq, rng, device) for _ in range(8)]
        loss = validate(model, batches)  # every rank must take part
        if dist.get_rank() == 0:
            result |= check_and_sample(loss, batches, args, device)
    if dist.get_rank() == 0:
        (out / "history.json").write_text(json.dumps({**result, "history": history}, indent=1))
        title = f"byte-level GPT on the Python library, {args.dtype}, {result['ranks']} ranks"
        draw_curve(history, result.get("validation_bits_per_byte"), out / "loss.png", title)
        print(f"wrote {', '.join(sorted(file.name for file in out.iterdir()))} to {out}/")


def parse_args() -> Arguments:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="dtype of the gathered weights and of the computation",
    )
    parser.add_argument("--minutes", type=float, default=3.0, help="training time")
    parser.add_argument("--steps", type=int, help="train this many steps instead of --minutes")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence, at most 256")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument(
        "--api",
        choices=["FSDP", "fully_shard"],
        default="FSDP",
        help="interface of FSDP1 or of FSDP2",
    )
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="demo-out", help="folder for what comes out")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: as said above")
    parser.add_argument("--ranks", type=int, help="processes, if not under torchrun")
    args = parser.parse_args()
    if args.ranks is None:
        args.ranks = 2 if args.device == "cpu" else gpus() or 2
    if not 1 <= args.seq <= GPTConfig.context:
        parser.error(f"--seq must be 1 to {GPTConfig.context}")
    if args.minutes <= 0 or (args.steps is not None and args.steps < 1) or args.ranks < 1:
        parser.error("--minutes, --steps and --ranks must be positive")
    return args


def main() -> int:
    """Runs one rank. Returns the exit status."""
    args = parse_args()
    stop = StopRequest()
    device = device_of_rank(args)
    start_group(device)
    torch.manual_seed(args.seed)  # the same initial weights on each rank
    training, validation = read_corpus()
    model = shard(GPT(GPTConfig()), args, device)
    if dist.get_rank() == 0:
        print(
            f"{len(training) / 1e6:.1f} MB to train on, {len(validation) / 1e6:.1f} MB to "
            f"validate, {dist.get_world_size()} ranks on {device.type}"
        )
    history, complete = train(model, training, args, stop, device)
    stop.training = False
    finish(model, validation, history, args, complete, device)
    dist.destroy_process_group()
    return 0 if complete else 130


def launch(ranks: int) -> int:
    """Starts this script on `ranks` processes of this machine with torchrun's own launcher."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    try:
        run.main(["--standalone", f"--nproc-per-node={ranks}", *sys.argv])
    except SignalException as error:  # Ctrl-C: the ranks got the signal and have ended
        return 128 + error.sigval
    except ChildFailedError as error:  # the rank has printed its error
        return next(iter(error.failures.values())).exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main() if "RANK" in os.environ else launch(parse_args().ranks))

"""Time checkpoints of two ranks beside torch's DCP and beside plain reads and writes.

    python benchmarks/bench_checkpoint.py --json

The model is a GPT of 85 M parameters (`--model 85m`) with AdamW's moments, 1 GB in all, sharded
over two ranks. DCP saves the same model under torch's fully_shard; DCP takes the DTensors without
a copy. Each round makes every save and every load once, in an order that rotates from round to
round. A time is that of the slower rank.

plain write   every rank writes as many bytes as its half of the checkpoint into one new file, with
              O_DIRECT in steps of 4 MiB, and calls fsync; the file's space is allocated before
              (posix_fallocate)
plain save    the plain write together with what any save must do: rank 0 allocates the space of a
              new file; after both ranks have written, rank 0 renames the new file over the file of
              the previous save, which frees the space of the replaced file; all of this is timed
fsdpc save, old one gone
              a save that replaces a checkpoint, timed until the replaced checkpoint's space is
              free; the row "fsdpc save" is timed until the call returns, which is earlier
Before each save the benchmark waits until the space of all removed files is free and all pages are
on the disk, as in a training with minutes between two saves. `--model 10m` is small and shows the
fixed costs.

plain read    every rank reads its half with pread in steps of 1 MiB into memory that was touched
              before
load          checksums are verified before the load changes the model (the default), during the
              load ("verified meanwhile"), or not at all
blocking      how long the call of a save in the background blocks; the next columns are the time of
              a step during the save, and the time until the save is durable

parts         parts of a save on rank 0: "plan" makes the plan; "create" allocates the space;
              "write" copies, digests and writes this rank's ranges; "sync" makes them durable and
              waits for the other rank; the other parts write the manifest and rename the folder

Files are dropped from the page cache (posix_fadvise) before they are read. "peak" is the growth of
a rank's memory during a save or load after a warm-up. It is the larger of two measures, which
differ in pages that both ranks map: resident memory (VmHWM) counts the whole page in each rank;
PSS, which is read every few milliseconds, counts half of it in each. A save in the background keeps
a staging buffer ("staging"), one copy of the rank's shards, which is allocated before "peak"
begins.

`--model many`: 20,000 parameters of 40 elements in 1,000 units of fully_shard, 3.2 MB, saved
without an optimizer and with AdamW. Rows with "first" are the first save of a model. "cpu" is the
processor time of rank 0. "copy" copies as many bytes from memory to memory, tensor by tensor.
`--peer no` leaves out DCP, whose save of 20,000 parameters takes minutes.

`--every` times steps of bench_step.py's workload: with a save in the background after each step,
and, in turn, without saves. A save waits until the previous save is durable. "frozen": only the
last block requires gradients; for all other parameters a save adds hard links to the files of the
previous save. "dcp": FSDP2's steps, with dcp.async_save or without saves. "MB": the peak memory of
one save until it is on the disk.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
from bench_step import SAMPLE_SECONDS, end_rank, pss_mb, run_ranks, start_rank

MODELS = {"10m": (6, 384), "85m": (12, 768)}
WRITE_STEP, READ_STEP = 4 << 20, 1 << 20
STEPS = 3
BLOCKING = "blocking of a save in the background"
UNITS, IN_UNIT, ELEMENTS = 1000, 20, 40


def workload(model: str) -> object:
    from engines import GPTConfig, Workload

    layers, width = MODELS[model]
    config = GPTConfig(layers=layers, width=width, heads=width // 64)
    return Workload(config, batch=1, seq=64, steps=1)


class Bench:
    """One rank's model and folder, and the saves and loads that are timed."""

    def __init__(self, rank: int, world: int, model: str, folder: Path) -> None:
        import torch
        from engines import build, random_batch

        self.rank, self.world, self.folder = rank, world, folder
        work = workload(model)
        self.training = build("fsdpc", work)
        self.batch = random_batch(work, rank)
        self.training.step(self.batch)
        self.model, self.optimizer = self.training.model, self.training.optimizer
        self.peer = build("fsdp2", work)
        self.peer.step(self.batch)
        state = sum(
            value.nbytes
            for values in self.optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        )
        self.own = sum(param.nbytes for param in self.model.parameters()) + state
        self.total = int(summed(self.own))
        self.piece = -(-self.total // world) // WRITE_STEP * WRITE_STEP + WRITE_STEP
        self.plain = folder / "plain"
        self.buffer = mmap.mmap(-1, self.piece)  # begins at a page boundary, as O_DIRECT requires
        self.buffer.write(os.urandom(1 << 20) * (self.piece >> 20))

    # --- saves ---

    def new_plain_file(self) -> None:
        """Make a new file before each plain write, because a save also starts with new files."""
        if self.rank == 0:
            self.plain.unlink(missing_ok=True)
            with open(self.plain, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.piece * self.world)

    def plain_write(self, path: Path | None = None) -> None:
        fd = os.open(path or self.plain, os.O_WRONLY | os.O_DIRECT)
        view = memoryview(self.buffer)
        for at in range(0, self.piece, WRITE_STEP):
            os.pwrite(fd, view[at : at + WRITE_STEP], self.rank * self.piece + at)
        os.fsync(fd)
        os.close(fd)

    def plain_save(self) -> None:
        new = self.plain.with_suffix(".new")
        if self.rank == 0:
            with open(new, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, self.piece * self.world)
        barrier()
        self.plain_write(new)
        barrier()
        if self.rank == 0:
            new.replace(self.plain.with_suffix(".saved"))
            fd = os.open(self.folder, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    def fsdpc_save_and_free(self) -> None:
        from fsdpc.checkpoint import folders

        self.fsdpc_save()
        folders.finish_removing()

    def fsdpc_save(self) -> None:
        from fsdpc import checkpoint

        checkpoint.save(self.folder / "fsdpc", self.model, self.optimizer, overwrite=True)

    def phases(self) -> dict[str, float]:
        """Return the seconds of each part of a save on this rank. The ranks wait for each other in
        "create", "sync" and "publish".
        """
        from fsdpc.checkpoint.ranks import ranks_of
        from fsdpc.checkpoint.saving import make_plan, write_plan

        barrier()
        marks = [("plan", time.perf_counter())]
        ranks, target = ranks_of(None), self.folder / "fsdpc"
        options: dict = {"dtype": None, "step": None, "overwrite": True}
        plan = make_plan(target, ranks, self.model, self.optimizer, None, None, **options)
        write_plan(plan, ranks, failpoint=lambda name: marks.append((name, time.perf_counter())))
        marks.append(("end", time.perf_counter()))
        found: dict[str, float] = {}
        for (name, begin), (_, end) in zip(marks, marks[1:], strict=False):
            found[name] = found.get(name, 0.0) + end - begin
        return found

    def dcp_state(self) -> dict:
        return dcp_state(self.peer.model, self.peer.optimizer)

    def dcp_save(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.dcp_state(), checkpoint_id=self.folder / "dcp")

    # --- loads ---

    def plain_read(self) -> None:
        fd = os.open(self.plain, os.O_RDONLY)
        view = memoryview(self.buffer)
        for at in range(0, self.piece, READ_STEP):
            os.preadv(fd, [view[at : at + READ_STEP]], self.rank * self.piece + at)
        os.close(fd)

    def fsdpc_load(self, verify: str) -> None:
        from fsdpc import checkpoint

        checkpoint.load(self.folder / "fsdpc", self.model, self.optimizer, verify=verify)

    def dcp_load(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.dcp_state()
        dcp.load(state, checkpoint_id=self.folder / "dcp")
        set_state_dict(
            self.peer.model,
            self.peer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    # --- in the background ---

    def steps(self, count: int = STEPS) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            self.training.step(self.batch)
        return (time.perf_counter() - begin) / count

    def fsdpc_async(self) -> tuple[float, float, float]:
        """Return seconds of the call, of a step during the save, and until the save is durable."""
        from fsdpc import checkpoint

        begin = time.perf_counter()
        handle = checkpoint.save(
            self.folder / "fsdpc", self.model, self.optimizer, overwrite=True, async_=True
        )
        blocked = time.perf_counter() - begin
        step = self.steps()
        handle.wait()
        return blocked, step, time.perf_counter() - begin

    def fsdpc_background(self) -> None:
        from fsdpc import checkpoint

        target = self.folder / "fsdpc"
        handle = checkpoint.save(target, self.model, self.optimizer, overwrite=True, async_=True)
        handle.wait()

    def dcp_async(self) -> tuple[float, float, float]:
        import torch.distributed.checkpoint as dcp

        begin = time.perf_counter()
        future = dcp.async_save(self.dcp_state(), checkpoint_id=self.folder / "dcp")
        blocked = time.perf_counter() - begin
        step = self.steps()
        future.result()
        return blocked, step, time.perf_counter() - begin


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def summed(value: float) -> float:
    return reduced(value, "SUM")


def reduced(value: float, how: str) -> float:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, how))
    return tensor.item()


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes on the slower rank."""
    gc.collect()
    barrier()
    begin = time.perf_counter()
    call()
    return reduced(time.perf_counter() - begin, "MAX")


def dcp_state(model: Any, optimizer: Any) -> dict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states = get_state_dict(model, optimizer)
    return dict(zip(("model", "optimizer"), states, strict=True))


def settle(rank: int) -> None:
    """Wait until the space of removed files is free and all written pages are on the disk."""
    from fsdpc.checkpoint import folders

    folders.finish_removing()
    if rank == 0:
        os.sync()
    barrier()


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in [folder] if folder.is_file() else folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def peak_of(call: Callable[[], object]) -> float:
    """Return the largest ``own_peak`` of the ranks, in MB."""
    return reduced(own_peak(call), "MAX")


def own_peak(call: Callable[[], object]) -> float:
    """Return the largest growth of this process's memory during the call in MB."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    resident, shared = memory("VmRSS"), pss_mb("self")
    seen, done = [shared], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_SECONDS):
            seen.append(pss_mb("self"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return max((memory("VmHWM") - resident) / 1e6, max(seen) - shared)


def memory(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * float(line.split()[1])
    raise LookupError(name)


def job(rank: int, world: int, folder: str, out: Connection, model: str, rounds: int) -> None:
    """Run one rank of the benchmark; rank 0 sends the figures through ``out``."""
    start_rank(rank, world, folder)
    bench = Bench(rank, world, model, Path(folder))
    saves = {
        "plain write": bench.plain_write,
        "plain save": bench.plain_save,
        "fsdpc save": bench.fsdpc_save,
        "fsdpc save, old one gone": bench.fsdpc_save_and_free,
        "dcp save": bench.dcp_save,
    }
    loads = {
        "plain read": (bench.plain_read, "plain"),
        "fsdpc load": (lambda: bench.fsdpc_load("before"), "fsdpc"),
        "fsdpc load, verified meanwhile": (lambda: bench.fsdpc_load("during"), "fsdpc"),
        "fsdpc load, not verified": (lambda: bench.fsdpc_load("no"), "fsdpc"),
        "dcp load": (bench.dcp_load, "dcp"),
    }

    def load(call: Callable[[], object], name: str) -> float:
        if rank == 0:
            forget(bench.folder / name)
        return timed(call)

    def save(call: Callable[[], object]) -> float:
        settle(rank)
        if call == bench.plain_write:
            bench.new_plain_file()
        return timed(call)

    for call in saves.values():
        save(call)
    cases = {name: lambda call=call: save(call) for name, call in saves.items()}
    cases |= {name: lambda a=arguments: load(*a) for name, arguments in loads.items()}
    seconds = common.interleave(cases, rounds)
    background: dict[str, list[tuple[float, float, float]]] = {}
    alone = []
    for turn in range(rounds + 1):
        barrier()
        step = reduced(bench.steps(), "MAX")
        for name, call in (("fsdpc", bench.fsdpc_async), ("dcp", bench.dcp_async)):
            barrier()
            figures = tuple(reduced(value, "MAX") for value in call())
            if turn:
                background.setdefault(name, []).append(figures)
        if turn:
            alone.append(step)
    parts = []
    for _ in range(rounds):
        settle(rank)
        parts.append(bench.phases())
    peaks = {
        name: peak_of(call)
        for name, call in (
            ("fsdpc save", bench.fsdpc_save),
            ("fsdpc save in the background", bench.fsdpc_background),
            ("fsdpc load", lambda: bench.fsdpc_load("before")),
            ("fsdpc load, verified meanwhile", lambda: bench.fsdpc_load("during")),
            ("fsdpc load, not verified", lambda: bench.fsdpc_load("no")),
            ("dcp save", bench.dcp_save),
            ("dcp load", bench.dcp_load),
        )
    }
    if rank == 0:
        out.send({
            "bytes": bench.total, "staging_mb": bench.own / 1e6, "seconds": seconds,
            "background": background, "step": alone, "peak_mb": peaks, "phases": parts,
        })  # fmt: skip
    end_rank()


def many(make: Callable[..., object], units: int) -> object:
    """Return a model of `units` layers of small parameters; `make` shards each layer as a unit."""
    import torch
    from torch import nn

    layers = nn.ModuleList([
        nn.ParameterList([nn.Parameter(torch.randn(ELEMENTS)) for _ in range(IN_UNIT)])
        for _ in range(units)
    ])  # fmt: skip
    for layer in layers:
        make(layer)
    return layers


def many_job(
    rank: int, world: int, folder: str, out: Connection, units: int, rounds: int, peer: bool
) -> None:
    """Run one rank of `--model many`; rank 0 sends the figures through ``out``."""
    start_rank(rank, world, folder)
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    import fsdpc
    from fsdpc import checkpoint

    ours, theirs = many(fsdpc.fully_shard, units), many(fully_shard, units) if peer else None
    adamw = torch.optim.AdamW(ours.parameters())
    for param in ours.parameters():
        param.grad = torch.zeros_like(param)
    adamw.step()
    blocked: list[float] = []
    cpu: dict[str, list[float]] = {}

    def save(**options: bool) -> None:
        begin, own = time.perf_counter(), time.thread_time()
        handle = checkpoint.save(f"{folder}/fsdpc", ours, overwrite=True, **options)
        if handle is not None:
            cpu.setdefault(BLOCKING, []).append(time.thread_time() - own)
            blocked.append(reduced(time.perf_counter() - begin, "MAX"))
            handle.wait()

    def dcp_save() -> None:
        dcp.save(get_model_state_dict(theirs), checkpoint_id=f"{folder}/dcp")

    def measured(name: str, call: Callable[[], object]) -> float:
        def counted() -> None:
            begin = time.process_time()
            call()
            cpu.setdefault(name, []).append(time.process_time() - begin)

        settle(rank)
        return timed(counted)

    sources = [param.to_local().detach() for param in ours.parameters()]
    targets = [source.clone() for source in sources]
    calls: dict[str, Callable[[], object]] = {
        "fsdpc save": save,
        "fsdpc save in the background": lambda: save(async_=True),
        "fsdpc save with AdamW": lambda: checkpoint.save(
            f"{folder}/adamw", ours, adamw, overwrite=True
        ),
        **({"dcp save": dcp_save} if peer else {}),
        "copy": lambda: [
            target.copy_(source) for target, source in zip(targets, sources, strict=True)
        ],
    }
    first = {name: [measured(name, call)] for name, call in calls.items()}
    peaks = {name: peak_of(call) for name, call in calls.items()}
    cpu.clear()
    blocked.clear()
    cases = {name: lambda a=(name, call): measured(*a) for name, call in calls.items()}
    seconds = common.interleave(cases, rounds)
    seconds[BLOCKING] = blocked
    seconds |= {f"{name}, first": values for name, values in first.items() if name != "copy"}
    if rank == 0:
        spreads = {name: common.spread(values) for name, values in seconds.items()}
        cpus = {name: common.spread(values) for name, values in cpu.items()}
        sizes = {"units": units, "parameters": units * IN_UNIT}
        out.send({**sizes, "seconds": spreads, "cpu_s": cpus, "peak_mb": peaks})
    end_rank()


def every_job(rank: int, world: int, folder: str, out: Connection, model: str, rounds: int) -> None:
    """Run one rank of `--every`; rank 0 sends seconds, ratios and peaks."""
    start_rank(rank, world, folder)
    found, peaks = {}, {}
    for kind in ("all", "frozen"):
        both = [EveryStep(name, rank, model, f"{folder}/{kind}") for name in ("fsdpc", "dcp")]
        for each in both:
            each.timed(True)
            each.blocked.clear()
        cases = {
            (each.name, case): lambda each=each, case=case: each.timed(case == "saved")
            for each in both
            for case in ("step", "saved")
        }
        seconds = common.interleave(cases, rounds)
        for each in both:
            own = {case: seconds[each.name, case] for case in ("step", "saved")}
            found[f"{kind}, {each.name}"] = own | {"blocked": list(each.blocked)}
            peaks[f"{kind}, {each.name}"] = peak_of(lambda each=each: (each.save(), each.wait()))
    if rank == 0:
        ratios = {}
        for kind, own in found.items():
            pairs = zip(own["saved"], own["step"], strict=True)
            ratios[kind] = common.spread([saved / step for saved, step in pairs])
        spreads = {k: {n: common.spread(s) for n, s in v.items()} for k, v in found.items()}
        out.send({"every": spreads, "ratio": ratios, "peak_mb": peaks})
    end_rank()


class EveryStep:
    """A training whose steps are timed without saves, or with a save in the background after each
    step. ``blocked`` has the seconds for which each save blocked.
    """

    def __init__(self, name: str, rank: int, model: str, folder: str) -> None:
        from engines import WORKLOADS, build, random_batch
        from torch.distributed import new_group

        work = WORKLOADS[model]
        self.name, self.rank, self.folder = name, rank, f"{folder}-{name}"
        self.training = build("fsdpc" if name == "fsdpc" else "fsdp2", work)
        self.batch = random_batch(work, rank)
        self.blocked: list[float] = []
        self.future: Any = None
        self.group = new_group()  # for saves only, so that they receive no messages of a step
        if folder.endswith("frozen"):
            for key, param in self.training.model.named_parameters():
                param.requires_grad_(f".{work.config.layers - 1}." in key)

    def wait(self) -> None:
        if self.future is not None:
            (self.future.wait if self.name == "fsdpc" else self.future.result)()
        self.future = None

    def save(self) -> None:
        model, optimizer = self.training.model, self.training.optimizer
        begin = time.perf_counter()
        if self.name == "fsdpc":
            from fsdpc import checkpoint

            self.future = checkpoint.save(
                self.folder, model, optimizer, overwrite=True, async_=True
            )
        else:
            import torch.distributed.checkpoint as dcp

            self.wait()
            self.future = dcp.async_save(
                dcp_state(model, optimizer), checkpoint_id=self.folder, process_group=self.group
            )
        self.blocked.append(time.perf_counter() - begin)

    def timed(self, saves: bool) -> float:
        def steps() -> None:
            for _ in range(STEPS):
                self.training.step(self.batch)
                if saves:
                    self.save()

        settle(self.rank)
        took = timed(steps) / STEPS
        self.wait()
        return took


def print_every(result: dict) -> None:
    rows = [
        [kind, *(f"{steps[name]['median']:.3f}" for name in ("step", "saved", "blocked")),
         f"{result['ratio'][kind]['median']:.3f}", f"{result['peak_mb'][kind]:.0f}"]
        for kind, steps in result["every"].items()
    ]  # fmt: skip
    heads = ["parameters that train", "step, s", "with its save, s", "blocked, s", "ratio", "MB"]
    common.print_table(heads, rows)


def print_many(result: dict) -> None:
    rows = [
        [
            name,
            f"{took['median']:.3f}",
            f"{result['cpu_s'].get(name, {}).get('median', float('nan')):.3f}",
            f"{result['peak_mb'].get(name, 0):.0f}",
        ]
        for name, took in result["seconds"].items()
    ]
    title = f"{result['parameters']:,} parameters"
    common.print_table([title, "s", "cpu s, rank 0", "peak MB"], rows)


def report(found: dict) -> dict:
    """Return medians and quartiles of the figures; ratios are taken within a round."""
    seconds = found["seconds"]
    result: dict = {key: found[key] for key in ("bytes", "staging_mb", "peak_mb")} | {"cases": {}}
    for name, values in seconds.items():
        base = seconds["plain read" if "load" in name or "read" in name else "plain write"]
        ratios = [a / b for a, b in zip(values, base, strict=True)]
        result["cases"][name] = {"s": common.spread(values), "ratio": common.spread(ratios)}
    names = found["phases"][0]
    result["phases"] = {n: common.spread([row[n] for row in found["phases"]]) for n in names}
    result["step_s"] = common.spread(found["step"])
    result["background"] = {
        name: {
            part: common.spread([row[i] for row in rows])
            for i, part in enumerate(("blocking_s", "step_beside_s", "durable_s"))
        }
        for name, rows in found["background"].items()
    }
    return result


def print_report(result: dict) -> None:
    def cell(values: dict, digits: int = 2) -> str:
        return "{median:.{d}f} ({q1:.{d}f}..{q3:.{d}f})".format(d=digits, **values)

    rows = [
        [name, cell(case["s"]), cell(case["ratio"]), f"{result['peak_mb'].get(name, 0):.0f}"]
        for name, case in result["cases"].items()
    ]
    common.print_table([f"{result['bytes'] / 1e9:.2f} GB", "s", "x plain", "peak MB"], rows)
    rows = [[name, cell(values, 4)] for name, values in result["phases"].items()]
    common.print_table(["parts of a save, rank 0", "s"], rows)
    rows = [
        [name, *(cell(part[p], 3) for p in ("blocking_s", "step_beside_s", "durable_s"))]
        for name, part in result["background"].items()
    ]
    rows.append(["no save", "", cell(result["step_s"], 3), ""])
    common.print_table(["in the background", "blocking s", "step s", "durable s"], rows)
    peak = result["peak_mb"]["fsdpc save in the background"]
    print(f"peak of a save in the background: {peak:.0f} MB; staging {result['staging_mb']:.0f} MB")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="85m", choices=[*MODELS, "many"])
    parser.add_argument("--every", action="store_true", help="a save after each step")
    parser.add_argument("--peer", default="yes", choices=["yes", "no"], help="of --model many")
    parser.add_argument("--units", type=int, default=UNITS, help="of --model many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--note", default="", help="kept in the JSON, e.g. what else was running")
    parser.add_argument(
        "--json",
        nargs="?",
        const="checkpoint.json",
        metavar="PATH",
        help="write JSON, by default to benchmarks/results/checkpoint.json",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.every and args.model == "many":
        raise SystemExit("--every needs a model that trains: 10m or 85m")
    run = common.describe_run(kept=bool(args.json))
    tempfile.tempdir = args.folder  # where run_ranks makes its folder
    free = shutil.disk_usage(args.folder).free
    if free < 8 << 30:
        raise SystemExit(f"{args.folder} has {free >> 20} MB left; 8 GB are needed")
    if args.model == "many":
        result = run_ranks(many_job, 2, args.units, args.rounds, args.peer == "yes")
        print_many(result)
    elif args.every:
        result = run_ranks(every_job, 2, args.model, args.rounds)
        print_every(result)
    else:
        result = report(run_ranks(job, 2, args.model, args.rounds))
        print_report(result)
    if args.json:
        content = {**run, "model": args.model, "note": args.note, **result}
        common.write_json(common.RESULTS / args.json, content)


if __name__ == "__main__":
    main()

"""Time sharded steps of matrix optimizers against the unsharded step divided by the ranks.

python benchmarks/bench_muon.py                      # print
python benchmarks/bench_muon.py --json               # and write results/muon.json
python benchmarks/bench_muon.py --world 4 --json     # results/muon_4ranks.json; 4 processors
python benchmarks/bench_muon.py --world 4 --width 512 --only float32 --json
                                                     # results/muon_4ranks_float32.json
python benchmarks/bench_muon.py --optimizer SOAP     # or Shampoo, Adafactor

The model consists of the matrices of a GPT: --blocks blocks of width --width. All cases have random
gradients and take turns in the same single-threaded processes. A turn of SOAP and Shampoo is
--every steps, the last of which computes bases or roots; its time is divided by --every.
"unsharded" is the step of the whole model. The reference is "unsharded, torch" if torch has the
class, else "unsharded"; for cases in float32 the reference is "unsharded, float32". All ranks run
the unsharded step at the same time, so that as many cores are busy as in the other cases. A time is
the processor time of the rank that takes most, including its threads that send. A share is the time
divided by (the reference's time in the same round / the number of ranks). "moved" is what the
rank that sends most sends in a step, divided by what a rank sends in one reduce-scatter and one
all-gather of float32 matrices.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdpc
from fsdpc import optim

PERIODIC = ("SOAP", "Shampoo")


class Block(nn.Module):
    """The matrices of a block. The forward uses all of them, so that each one gets a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        self.all = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(each(x.new_ones(1, each.in_features)).sum() for each in self.all)


def model(blocks: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def with_gradients(made: nn.Module) -> list[Any]:
    params = list(made.parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def sharded(shard: Callable[..., Any], made: nn.Sequential) -> nn.Module:
    for each in made:
        shard(each)
    return shard(made)


def wrapped(made: nn.Sequential) -> nn.Module:
    blocks = list(made)
    policy = torch.distributed.fsdp.wrap.CustomPolicy(lambda module: module in blocks)
    place = torch.device("cpu")
    return fsdpc.FSDP(made, auto_wrap_policy=policy, use_orig_params=True, device_id=place)


def cases_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the optimizers by name. The first one is the reference, except for float32."""

    def new() -> nn.Sequential:
        return model(given.blocks, given.width)

    kind = getattr(optim, given.optimizer)
    beside = getattr(torch.optim, given.optimizer, None)
    every = {"precondition_frequency": given.every} if given.optimizer in PERIODIC else {}
    flag = {kind._flag: True} if hasattr(kind, "_flag") else {}
    rows = sharded(fsdpc.fully_shard, new())
    flat = wrapped(new())
    flat(torch.ones(1, given.width)).sum().backward()  # makes gradients of the shards' shapes
    for grad in (param.grad for param in flat.parameters() if param.grad is not None):
        grad.normal_()  # because decompositions of degenerate matrices take longer
    found = {} if beside is None else {"unsharded, torch": beside(with_gradients(new()))}
    found |= {
        "unsharded": kind(with_gradients(new()), **every),
        "fully_shard": kind([{"params": with_gradients(rows), **flag}], **every),
        "FSDP": kind([{"params": list(flat.parameters()), **flag}], **every),
    }
    found["kept"] = [rows, flat]
    return found | (others_of_muon(new) if given.optimizer == "Muon" else {})


def others_of_muon(new: Callable[[], nn.Sequential]) -> dict[str, Any]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = sharded(fsdpc.fully_shard, new())
    torch_rows = sharded(lambda each: fully_shard(each, mesh=mesh), new())
    group = {"params": with_gradients(rows), "use_muon": True}
    return {
        "unsharded, float32": optim.Muon(with_gradients(new()), ns_dtype=torch.float32),
        "fully_shard, float32": optim.Muon([group], ns_dtype=torch.float32),
        "torch.optim.Muon, FSDP2": torch.optim.Muon(with_gradients(torch_rows)),
        "kept, too": [rows, torch_rows],
    }


def timed(optimizer: Any) -> float:
    """Return the slowest rank's mean seconds of a step, over ``precondition_frequency`` steps."""
    dist.barrier()
    steps = optimizer.param_groups[0].get("precondition_frequency", 1)
    begin = time.process_time()
    for _ in range(steps):
        optimizer.step()
    took = torch.tensor((time.process_time() - begin) / steps)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def sent(optimizer: Any) -> float:
    """Return the bytes of a step on the rank that sends most, divided by the bytes that a rank
    sends in one reduce-scatter and one all-gather in float32.
    """
    [route] = optimizer._routes
    rank, world = dist.get_rank(), dist.get_world_size()
    there = sum(count for r in route.rounds for to, count in enumerate(r.sent) if to != rank)
    back = sum(count for r in route.rounds for to, count in enumerate(r.received) if to != rank)
    numel = sum(member.matrix.numel for member in route.members)
    item = optimizer._wire(route.members[0].param).itemsize
    moved = torch.tensor(float(item * (there * route.lanes + back)))
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    return float(moved) / (2 * 4 * numel * (world - 1) / world)


def run_rank(rank: int, store: str, given: argparse.Namespace) -> None:
    common.end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=given.world
    )
    cases = cases_of(given)
    kept = [cases.pop(name, None) for name in ("kept", "kept, too")]
    cases = {name: case for name, case in cases.items() if given.only in name}
    for optimizer in cases.values():
        timed(optimizer)
    found = common.interleave({n: lambda o=o: timed(o) for n, o in cases.items()}, given.rounds)
    moved = {name: sent(cases[name]) for name in ("fully_shard", "FSDP") if name in cases}
    if rank == 0:
        report(found, moved, given)
    dist.barrier()
    del kept
    dist.destroy_process_group()


def report(found: dict[str, list[float]], moved: dict[str, float], given: Any) -> None:
    rows = []
    for name, times in found.items():
        whole = "unsharded, float32" if name.endswith("float32") else next(iter(found))
        part = [seconds / given.world for seconds in found[whole]]
        shares = common.spread([t / p for t, p in zip(times, part, strict=True)])
        row = {"case": name, "processor_seconds": common.spread(times), "share": shares}
        rows.append({**row, "moved": round(moved[name], 4)} if name in moved else row)
    head = ["", "ms", f"over 1/{given.world} of the unsharded step", "moved"]
    common.print_table(
        head,
        [
            (
                row["case"],
                f"{1e3 * row['processor_seconds']['median']:.1f}",
                f"{row['share']['median']:.3f}",
                row.get("moved", "-"),
            )
            for row in rows
        ],
    )
    if given.json:
        names = ["optimizer", "blocks", "width", "rounds"]
        names += ["every"] if given.optimizer in PERIODIC else []
        options = {"ranks": given.world} | {name: getattr(given, name) for name in names}
        name = given.optimizer.lower()
        name += "" if given.world == 2 else f"_{given.world}ranks"
        name += f"_{given.only}.json" if given.only else ".json"
        common.write_json(name, {**given.run, **options, "cases": rows})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--optimizer", default="Muon", choices=["Muon", "Adafactor", *PERIODIC])
    parser.add_argument("--every", type=int, default=10, help="steps between bases or roots")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.run = common.describe_run(given.json)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (f"{folder}/store", given), nprocs=given.world)


if __name__ == "__main__":
    main()

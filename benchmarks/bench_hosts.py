"""Time training steps of ranks on several hosts with shaped links, against FSDP1, FSDP2 and DDP.

python benchmarks/bench_hosts.py                          # print; needs root, see namespaces.py
python benchmarks/bench_hosts.py --json                   # and write results/hosts.json
python benchmarks/bench_hosts.py --add --hosts 2,2        # replace or add these cases there
python benchmarks/bench_hosts.py --json --coded --rates 1gbit   # weights, gradients in fewer bits
python benchmarks/bench_hosts.py --hosts 1,1 2,2 --rates 1gbit 10gbit --models 10m 40m

Hosts are network namespaces of this machine. All engines run in the same processes and take turns
in each round. A step's time is that of the slowest rank; "/ local" divides it by the time of the
unsharded step ("local") in the same round. "sent" is what a host's interface sent in a step,
divided by the bytes of the model's parameters. "floor" is max(local, bytes / rate), where bytes are
those of two gathers and one reduce-scatter. "a gather takes ... of the line" is the fraction of the
link's rate that a gather reaches: the median of five gathers of 64 MiB without computation.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import common
import namespaces
import torch
import torch.distributed as dist
from engines import (
    GPTConfig,
    Training,
    Workload,
    adamw,
    build,
    fsdpc,
    plain_model,
    random_batch,
    sharded_in_place,
)
from torch import nn

MODELS = {
    "10m": Workload(GPTConfig(layers=6, width=384, heads=6), batch=2, seq=64, steps=1),
    "40m": Workload(GPTConfig(layers=12, width=512, heads=8), batch=2, seq=64, steps=1),
}
BESIDE = ["local", "ddp", "fsdp1", "fsdp2", "fsdpc", "fsdpc2", "fsdpc-2-slots"]
# By engine: the codec of gathered weights, the codec of reduced gradients (None: not quantized),
# and whether weights stay gathered after forward.
POLICIES: dict[str, tuple[str, str | None, bool]] = {
    "fsdpc2-int8": ("int8", None, False),
    "fsdpc2-nf4": ("nf4", None, False),
    "fsdpc2-int8-int8": ("int8", "int8", False),
    "fsdpc2-int8-int4": ("int8", "int4_stochastic", False),
    "fsdpc2-nf4-int4": ("nf4", "int4_stochastic", False),
    "fsdpc2-int8-int4-kept": ("int8", "int4_stochastic", True),
}
CODED = ["local", "fsdp2", "fsdpc2", *POLICIES]
# These engines run only if all hosts have the same number of ranks, at least 2.
INSIDE = ["fsdpc2-kept", "fsdpc-hybrid"]
PROBE_NUMEL = 16 << 20


def ddp(work: Workload) -> Training:
    """Build torch's DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(plain_model(work))
    return Training(model, adamw(model, work))


def kept(work: Workload) -> Training:
    """Build fsdpc.fully_shard that keeps weights sharded within each host after forward."""
    import fsdpc

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    return sharded_in_place(work, partial(fsdpc.fully_shard, reshard_after_forward=ranks))


def hybrid(work: Workload) -> Training:
    """Build fsdpc's FSDP with HYBRID_SHARD: sharded within each host, replicated across hosts."""
    from fsdpc import ShardingStrategy

    return fsdpc(work, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def coded(codec: str, reduce_codec: str | None, keeps: bool, work: Workload) -> Training:
    """Build fsdpc.fully_shard that quantizes gathered weights and, if asked, reduced gradients."""
    import fsdpc

    def shard(module: nn.Module, **options: Any) -> nn.Module:
        options["mp_policy"] = fsdpc.QuantizedPolicy(codec=codec, reduce_codec=reduce_codec)
        if keeps:
            options["reshard_after_forward"] = False
        return fsdpc.fully_shard(module, **options)

    return sharded_in_place(work, shard)


def two_slots(work: Workload) -> Training:
    """Build fsdpc's FSDP with 2 gather slots. The default between hosts is 3."""
    training = fsdpc(work)
    training.before_forward = lambda: os.environ.update(FSDPC_GATHER_SLOTS="2")
    training.after_backward = lambda: os.environ.pop("FSDPC_GATHER_SLOTS")
    return training


BUILDERS = {
    "fsdpc-2-slots": two_slots,
    "ddp": ddp,
    "fsdpc2-kept": kept,
    "fsdpc-hybrid": hybrid,
    **{name: partial(coded, *options) for name, options in POLICIES.items()},
}


class Idle(nn.Module):
    """A module whose forward gathers a large weight but computes almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(PROBE_NUMEL))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight[0]


def share_of_line(rate: float) -> float:
    """Return the rate at which hosts send each other their shards, as a fraction of ``rate``."""
    from fsdpc import FullyShardedDataParallel
    from fsdpc._comm.bootstrap import comm_for_group

    model = FullyShardedDataParallel(Idle())
    hosts, found = comm_for_group(dist.group.WORLD).senders + 1, []
    with torch.no_grad():
        for _ in range(5):
            dist.barrier()
            begun = time.perf_counter()
            model(torch.zeros(1))
            seconds = time.perf_counter() - begun
            found.append(4 * PROBE_NUMEL / hosts * (hosts - 1) / seconds / rate)
    return statistics.median(found)


def sent() -> int:
    """Return the bytes that this host has sent so far."""
    with open("/sys/class/net/eth0/statistics/tx_bytes", encoding="ascii") as file:
        return int(file.read())


def timed(training: Training, work: Workload, number: int) -> tuple[float, int]:
    """Return the seconds of the slowest rank's step and the bytes that this rank's host sent."""
    batch = random_batch(work, 100 * number + dist.get_rank())
    dist.barrier()
    before, begun = sent(), time.perf_counter()
    training.step(batch)
    seconds = torch.tensor([time.perf_counter() - begun])
    dist.barrier()
    after = sent()
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item(), after - before


def run_rank(model: str, engines: Sequence[str], rounds: int, rate: float) -> dict[str, Any]:
    """Time the steps of every engine. Collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = MODELS[model]
    trainings = {
        name: BUILDERS[name](work) if name in BUILDERS else build(name, work) for name in engines
    }
    nbytes = 4 * sum(p.numel() for p in plain_model(work).parameters())
    for training in trainings.values():
        for number in range(2):
            timed(training, work, number)
    cases = {
        name: (lambda training=training: timed(training, work, 2))
        for name, training in trainings.items()
    }
    found = common.interleave(cases, rounds)  # type: ignore[arg-type]
    local = [seconds for seconds, _ in found["local"]]
    result: dict[str, Any] = {"bytes": nbytes, "line": share_of_line(rate) if rate else None}
    for name, values in found.items():
        steps = [seconds for seconds, _ in values]
        result[name] = {
            "step_s": common.spread(steps),
            "to_local": common.spread([a / b for a, b in zip(steps, local, strict=True)]),
            "sent": common.spread([count / nbytes for _, count in values]),
        }
    dist.barrier()
    return result


def run_case(model: str, ranks: Sequence[int], rate: str, args: argparse.Namespace) -> dict:
    """Run one case on new hosts. Raises ``SystemExit`` if a rank fails."""
    with namespaces.hosts(len(ranks), rate, args.delay_ms / 1e3) as hosts:
        processes = []
        for env in hosts.environment(ranks):
            command = ["ip", "netns", "exec", env["FSDPC_TEST_HOST"], sys.executable, __file__]
            inside = INSIDE if min(ranks) > 1 and len(set(ranks)) == 1 else []
            engines = args.engines or [*BESIDE, *inside]
            wanted = [model, str(namespaces.bytes_per_second(rate)), str(args.rounds), *engines]
            out = subprocess.PIPE if env["RANK"] == "0" else subprocess.DEVNULL
            command += ["--rank", *wanted]
            processes.append(subprocess.Popen(command, env={**os.environ, **env}, stdout=out))
        try:
            text, _ = processes[0].communicate(timeout=args.timeout)
            codes = [process.wait(timeout=60) for process in processes]
        finally:
            for process in processes:
                process.send_signal(signal.SIGKILL)
    if any(codes):
        raise SystemExit(f"{model} on {ranks} at {rate}: ranks ended with {codes}")
    return json.loads(text.decode().splitlines()[-1])


def show(found: dict[str, Any], model: str, ranks: Sequence[int], rate: str) -> None:
    """Print the table of one case."""
    floor = 3 * (len(ranks) - 1) / len(ranks)
    wire = floor * found["bytes"] / namespaces.bytes_per_second(rate)
    limit = max(found["local"]["step_s"]["median"], wire)
    line = f", a gather takes {found['line']:.0%} of the line" if found["line"] else ""
    print(f"\n{model}, {'+'.join(map(str, ranks))}, {rate}: floor {limit:.3f} s{line}")
    rows = []
    for name, row in found.items():
        if isinstance(row, dict) and "step_s" in row:
            step = row["step_s"]
            rows.append(
                [
                    name,
                    f"{step['median']:.3f} ({step['q1']:.3f}..{step['q3']:.3f})",
                    f"{row['to_local']['median']:.2f}",
                    f"{step['median'] / limit:.2f}",
                    f"{row['sent']['median']:.2f}",
                ]
            )
    common.print_table(["engine", "step, s", "/ local", "/ floor", "sent, x"], rows)


def names_of(case: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that identify a case."""
    return case["model"], case["ranks"], case["rate"], case.get("delay_ms", 0.0)


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", nargs="+", default=["1,1"], help="ranks of each host: 1,1 2,2")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit"])
    parser.add_argument("--delay-ms", type=float, default=0.0, help="of each direction")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["40m"])
    parser.add_argument("--engines", nargs="+", choices=[*BESIDE, *INSIDE, *CODED])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one case")
    parser.add_argument("--json", action="store_true", help="write results/hosts.json")
    parser.add_argument("--coded", action="store_true", help="codecs; results/hosts_coded.json")
    parser.add_argument("--add", action="store_true", help="add to results/hosts.json")
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        model, rate, rounds, *engines = args.rank
        print(json.dumps(run_rank(model, engines, int(rounds), float(rate))), flush=True)
        os._exit(0)  # other libraries' engines leave threads running that would delay the exit
    if namespaces.missing():
        raise SystemExit(namespaces.missing())
    args.engines = args.engines or (CODED if args.coded else None)
    name = "hosts_coded.json" if args.coded else "hosts.json"
    run = common.describe_run(args.json or args.add)
    result: dict[str, Any] = {"cases": []}
    if args.add:
        result = json.loads((common.RESULTS / name).read_text())
    for model in args.models:
        for text in args.hosts:
            for rate in args.rates:
                ranks = [int(count) for count in text.split(",")]
                found = run_case(model, ranks, rate, args)
                show(found, model, ranks, rate)
                case = {"model": model, "ranks": ranks, "rate": rate, "run": run, **found}
                if args.delay_ms:
                    case["delay_ms"] = args.delay_ms
                others = [c for c in result["cases"] if names_of(c) != names_of(case)]
                result["cases"] = [*others, case]
    if args.json or args.add:
        common.write_json(name, result)


if __name__ == "__main__":
    main()

"""Cases of the fuzzer, drawn from a seed: a configuration, a model and operations.

`without` switches features off, and `Cut` leaves parts of a case out; all other draws stay the
same.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import kinds
import torch
from torch import Tensor, nn
from torch.nn import functional
from trees import Builder, Cut


@dataclasses.dataclass(frozen=True)
class Config:
    """The options by which a case's model is sharded."""

    world: int
    collectives: str
    strategy: str
    use_orig: bool
    by_policy: bool
    backward_prefetch: str
    forward_prefetch: bool
    limit: bool
    gather_slots: int  # the number of gather slots; 0: the default number
    reduce_slots: int
    param: str  # the param_dtype of MixedPrecision, or "" for none
    reduce: str
    # How a program reads full gradients. "swap": it puts them in the parameters' place, and gathers
    # the parameters. "summon": it calls summon_full_params with gradients.
    grads_by: str
    jitter: bool  # True: ranks are late at random places
    mix: bool  # True: strategies (with `in_place`: reshard_after_forward) differ by unit
    # True (only if `collectives` is "c10d"): units are exchanged over a wire by sends and receives.
    flies: bool = False
    # With `flies`: one letter for each rank, the same letter for ranks of one host. "": each rank
    # is on its own host.
    hosts: str = ""
    in_place: bool = False  # True: fully_shard shards the model; False: a wrapper shards it
    second: bool = False  # True: a second sharded model exists during the case
    # Not "": the model is sharded on the meta device (without `in_place`: on all ranks but 0). With
    # `in_place`, "empty", "assign" or "rank0" says how it is filled, see `filled` in sides.py.
    meta: str = ""
    # The next fields matter only with `in_place`.
    meshes: str = "one"  # how the units' meshes are made: see `another_mesh` in sides.py
    keeps_root: bool = False  # True: the root stays gathered after forward
    hook: bool = False  # True: each unit gets a hook by set_all_reduce_hook
    wide: bool = False  # True: units with several outputs cast these outputs to float64


@dataclasses.dataclass(frozen=True)
class Op:
    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass
class Case:
    seed: str
    config: Config
    width: int
    rows: int
    model: nn.Module
    ops: list[Op]
    optimizer: str
    features: set[str]
    nodes: int
    # With `in_place`: a copy of the model from before sharding, into which averages are loaded.
    model_before: Any = None
    # For each operation "func": whether torch.func worked with the unsharded model on all ranks.
    taken: list[bool] = dataclasses.field(default_factory=list)


STYLES = {  # ways to run a micro-batch's backward, with the weights by which they are drawn
    "plain": 6,
    "two_losses": 1.5,
    "retain_twice": 1.2,
    "two_forwards": 1.5,
    "two_forwards_sum": 1.2,
    "reversed": 0.8,
    "penalty": 1,
    "penalty_each": 0.6,
    "grad_input": 0.8,
    "discarded": 0.8,
    "no_grad_first": 0.8,
    "part_of_output": 0.7,
    "inputs_only": 0.5,
    "asked": 0.6,
    "asked_into": 0.5,
    "head_weight": 0.8,
}
OPS = {
    "train": 10, "eval": 1.5, "inference": 0.7, "fail": 0.8, "freeze": 0.8, "summon_read": 0.8,
    "summon_write": 0.8, "save_load": 0.8, "save_sharded": 0.6, "user_set": 0.9,
    "swap_optimizer": 0.6, "ema": 0.3, "rebuild_graph_late": 0.5, "optim_state": 0.4,
    "write_lost": 0.4, "changed_before_backward": 0.5, "added": 0.4, "fork": 0.5, "flags": 0.5,
    "func": 0.5, "load_part": 0.5, "unshard": 0.6,
}  # fmt: skip

LATER = ("freeze_summoned", "switched", "uncalled")  # operations that a separate generator draws
# Styles that ask for gradients (see Side.ask). fsdpc refuses autograd.grad inside no_sync, so these
# styles run without no_sync.
ASKED = ("asked", "asked_into")

SWITCHES = (  # the features that can be switched off besides kinds, operations and styles
    "unfreeze", "jitter", "mix", "mixed", "c10d", "hybrid", "no_shard", "no_sync", "clip",
    "fully_shard", "fsdp1", "second", "meta", "meshes", "hook", "wide", *LATER,
)  # fmt: skip


def config_of(seed: str, without: frozenset[str], world: int = 0) -> Config:
    rng = random.Random(seed + ":config")
    later = random.Random(seed + ":config2")  # for newer features, so that older draws stay equal
    drawn = rng.choices([1, 2, 3, 4], [1, 6, 3, 2])[0]
    world = world or drawn
    collectives = rng.choices(["shm", "c10d"], [4, 1])[0]
    strategy = rng.choices(
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"],
        [8, 3, 1, 1, 1],
    )[0]
    if "HYBRID" in strategy and (world != 4 or "hybrid" in without):
        strategy = "FULL_SHARD"
    if strategy == "NO_SHARD" and "no_shard" in without:
        strategy = "FULL_SHARD"
    mixed = rng.random() < 0.15 and "mixed" not in without
    kept = Config(
        world=world,
        collectives="shm" if "c10d" in without else collectives,
        strategy=strategy,
        use_orig=rng.random() < 0.5,
        by_policy=rng.random() < 0.5,
        backward_prefetch=rng.choices(["BACKWARD_PRE", "BACKWARD_POST", ""], [3, 1, 1])[0],
        forward_prefetch=rng.random() < 0.3,
        limit=rng.random() < 0.8,
        gather_slots=rng.choice([0, 0, 1, 2, 3]),
        reduce_slots=rng.choice([0, 0, 1, 2]),
        param=rng.choice(["bfloat16", "bfloat16", "float16"]) if mixed else "",
        reduce=rng.choice(["", "float32", "float32"]) if mixed else "",
        grads_by=rng.choice(["swap", "summon"]),
        jitter=later.random() < 0.12 and "jitter" not in without,
        mix=later.random() < 0.15 and "mix" not in without,
    )
    newest = random.Random(seed + ":config3")
    in_place = newest.random() < 0.4 and "fully_shard" not in without
    if in_place or "fsdp1" in without:
        strategy = "FULL_SHARD" if kept.strategy == "NO_SHARD" else kept.strategy
        kept = dataclasses.replace(kept, in_place=True, use_orig=True, strategy=strategy)
    wire = random.Random(seed + ":flies")
    flies = wire.random() < 0.7 and kept.collectives == "c10d"
    hosts = "a" + "".join(wire.choice("ab") for _ in range(1, world))
    hosts = hosts if flies and "b" in hosts and wire.random() < 0.7 else ""
    kept = dataclasses.replace(kept, flies=flies, hosts=hosts)
    return dataclasses.replace(kept, **habits_of(random.Random(seed + ":config4"), kept, without))


def habits_of(rng: random.Random, config: Config, without: frozenset[str]) -> dict[str, Any]:
    drawn = {
        "second": rng.random() < 0.2,
        "meta": rng.choice(["empty", "assign", "rank0"]) if rng.random() < 0.15 else "",
        "meshes": rng.choice(["one", "one", "each", "copy", "pickle"]),
        "keeps_root": rng.random() < 0.5,
        "hook": rng.random() < 0.15,
        "wide": rng.random() < 0.3,
    }
    of_class = {"second", "meta"}
    return {
        name: value
        for name, value in drawn.items()
        if name not in without and (config.in_place or name in of_class)
    }


# Kinds that torch's fully_shard refuses too: kinds with parameters of no dimension, and kinds with
# parameters that are not contiguous.
NOT_IN_PLACE = frozenset({"scale", "odd"})
NOT_IN_MIXED = frozenset({"batchnorm", "float64", "integer", "buffers", "teacher", "rnn", "norm"})


def draw_case(seed: str, cut: Cut, world: int = 0) -> Case:
    """Draw a case, which is the same on every rank. `seed` is a string "seed:number"."""
    config = config_of(seed, cut.without, world)
    rng = random.Random(seed + ":case")
    torch.manual_seed(rng.randrange(1 << 30))
    width, rows = rng.choice([1, 3, 4, 5, 7]), rng.choice([2, 3, 4])
    if config.param:
        cut = cut.also(without=NOT_IN_MIXED)
    if config.in_place:
        cut = cut.also(without=NOT_IN_PLACE)
    builder = Builder(seed + ":tree", width, cut)
    body = builder.build(rng.choice([1, 2, 3, 4]), rng.choice([2, 5, 9, 16]))
    model = Root(width, body)
    if on_some_ranks(model, "Teacher"):  # all ranks must take part in a root's first forward
        return draw_case(seed, cut.also(without=frozenset({"teacher"})), world)
    ops = [
        op
        for i, op in enumerate(draw_ops(random.Random(seed + ":ops"), cut.without, config))
        if i not in cut.ops
    ]
    if on_some_ranks(model, "Fuse"):  # some ranks would raise, and the others go on to backward
        ops = [op for op in ops if op.name != "fail"]
    later = random.Random(seed + ":later")
    if later.random() < 0.1 and "unfreeze" not in cut.without:
        ops.insert(
            later.randrange(len(ops)), Op("unfreeze", {"choice": later.random(), "again": 0})
        )
    if later.random() < 0.2:
        name = later.choice(LATER)
        arguments = {"choice": later.random(), "again": 0}
        if name not in cut.without:
            ops.insert(later.randrange(len(ops)), Op(name, arguments))
    if any(getattr(module, "by_data", False) for module in model.modules()):
        raising = ("changed_before_backward", "write_lost")  # these may raise on some ranks only
        ops = [op for op in ops if op.name not in raising]
    for op in ops:  # torch cannot take the maximum of a DTensor's empty shard
        if config.in_place and op.arguments.get("norm") == float("inf"):
            op.arguments["norm"] = 2.0
    optimizer = rng.choice(["sgd", "momentum", "adamw", "adagrad"])
    if not config.use_orig:
        # In a flat parameter, the gradients of unused members are zeros. Plain SGD changes nothing
        # where a gradient is zero.
        optimizer = "sgd"
    features = (
        builder.used
        | {op.name for op in ops}
        | {op.arguments["style"] for op in ops if op.name == "train"}
    )
    return Case(seed, config, width, rows, model, ops, optimizer, features, builder.count)


def on_some_ranks(model: nn.Module, kind: str) -> bool:
    """Return True if a node of this kind runs on some ranks only."""
    return any(
        type(inner).__name__ == kind
        for outer in model.modules()
        if getattr(outer, "by_data", False)
        for inner in outer.modules()
    )


def draw_ops(rng: random.Random, without: frozenset[str], config: Config) -> list[Op]:
    ops = []
    for _ in range(rng.choice([2, 3, 3, 4, 6])):
        name = rng.choices(list(OPS), list(OPS.values()))[0]
        own = random.Random(rng.random())
        if name in without:
            name = "train"
        ops.append(
            Op(
                name,
                draw_train(own, without)
                if name == "train"
                else {"choice": own.random(), "again": own.random()},
            )
        )
    return [*ops, Op("train", draw_train(random.Random(rng.random()), without))]


def draw_train(rng: random.Random, without: frozenset[str]) -> dict[str, Any]:
    style = rng.choices(list(STYLES), list(STYLES.values()))[0]
    arguments = {
        "style": "plain" if style in without else style,
        "micros": rng.choice([1, 1, 1, 2, 3]),
        "no_sync": rng.random() < 0.4 and "no_sync" not in without and style not in ASKED,
        "input_grad": rng.random() < 0.4,
        "clip": rng.choice([None, None, None, 0.1, 1e-3]) if "clip" not in without else None,
        "norm": rng.choice([2.0, 2.0, float("inf"), 1.0]),
        "zero": rng.choices(["none", "zeros", "before"], [3, 1, 1])[0],
        "grads": rng.random() < 0.7,
        "step": rng.random() < 0.9,
        "by_utils": rng.random() < 0.5,
    }
    return arguments


class Root(nn.Module):
    def __init__(self, width: int, body: nn.Module) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(width, width), body
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(torch.tanh(self.body(torch.tanh(self.stem(x)))))
        if kinds.STATE.uncalled:
            out = out + 0.1 * functional.linear(x, self.stem.weight)
            out = out + 0.1 * functional.linear(x, self.head.weight)
        return out

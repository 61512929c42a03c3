"""Random module trees, in which every node takes and returns a tensor of (rows, width).

A tree depends only on its seed. The draws do not depend on what is switched off: a kind in
`Cut.without`, or a node in `Cut.nodes`, becomes a plain layer, and the other nodes stay the
same. A failing case can therefore be made smaller step by step.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import kinds
from kinds import Node
from torch import nn

WRAPPED = 0.55  # the share of nodes that become units


@dataclasses.dataclass(frozen=True)
class Cut:
    """The parts that are left out of a case. `without` has the names of features; the other fields
    have the numbers of nodes, units and operations."""

    without: frozenset[str] = frozenset()
    nodes: frozenset[int] = frozenset()
    units: frozenset[int] = frozenset()
    ops: frozenset[int] = frozenset()

    def also(self, **more: set) -> Cut:
        return dataclasses.replace(self, **{k: getattr(self, k) | v for k, v in more.items()})


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to make a node. `children` is the number of its subtrees."""

    name: str
    weight: float
    children: int
    make: Callable[..., Node]


KINDS = [
    # leaves
    Kind("linear", 6, 0, kinds.Linear),
    Kind("mlp", 4, 0, kinds.Mlp),
    Kind("norm", 2, 0, kinds.Norm),
    Kind("batchnorm", 1, 0, kinds.BatchNorm),
    Kind("scale", 1.5, 0, kinds.Scale),
    Kind("odd", 1.5, 0, kinds.Odd),
    Kind("lora", 2, 0, kinds.Lora),
    Kind("lora_modules", 1.5, 0, kinds.LoraOfModules),
    Kind("frozen", 1.5, 0, kinds.Frozen),
    Kind("embedding", 1, 0, kinds.Embedding),
    Kind("conv", 1, 0, kinds.Conv),
    Kind("float64", 0.7, 0, kinds.Float64),
    Kind("integer", 0.5, 0, kinds.Integer),
    Kind("buffers", 1, 0, kinds.Buffers),
    Kind("unused", 1.2, 0, kinds.Unused),
    Kind("tied", 1, 0, kinds.Tied),
    Kind("rnn", 0.7, 0, kinds.Recurrent),
    Kind("attention", 1, 0, kinds.Attention),
    Kind("force", 0.6, 0, kinds.Force),
    Kind("writes", 0.8, 0, kinds.Writes),
    # around subtrees
    Kind("residual", 3, 1, kinds.Residual),
    Kind("sequence", 3, 2, kinds.Sequence),
    Kind("parallel", 2.5, 2, kinds.Parallel),
    Kind("three", 1.5, 3, kinds.Parallel),
    Kind("twice", 1.2, 1, kinds.Twice),
    Kind("both", 1, 1, kinds.Both),
    Kind("loop", 1, 1, kinds.Loop),
    Kind("rank_loop", 0.8, 1, kinds.RankLoop),
    Kind("branch", 1.2, 2, kinds.Branch),
    Kind("drop", 1, 1, kinds.Drop),
    Kind("detach", 1, 1, kinds.Detach),
    Kind("no_grad", 0.8, 1, kinds.NoGrad),
    Kind("checkpoint", 1.2, 1, kinds.Checkpoint),
    Kind("reentrant", 0.8, 1, kinds.Reentrant),
    Kind("thread", 0.4, 1, kinds.Thread),
    Kind("inplace", 1.2, 1, kinds.Inplace),
    Kind("outputs", 1.5, 1, kinds.Outputs),
    Kind("cross", 1, 2, kinds.Cross),
    Kind("keyword", 0.8, 1, kinds.Keyword),
    Kind("slow", 1.2, 1, kinds.Slow),
    Kind("hooked", 0.8, 1, kinds.Hooked),
    Kind("fuse", 1, 1, kinds.Fuse),
    Kind("returns_view", 0.6, 2, kinds.ReturnsView),
    Kind("returns_param", 0.4, 1, kinds.ReturnsParam),
    Kind("generator", 0.3, 1, kinds.GeneratorOut),
    Kind("by_hand", 0.4, 1, kinds.TiedByHand),
    Kind("teacher", 0.4, 1, kinds.Teacher),
    Kind("compressed", 0.5, 1, kinds.Compressed),
    Kind("checked", 0.7, 1, kinds.Checked),
    Kind("renamed", 0.3, 1, kinds.Renamed),
    Kind("shared", 1, 0, kinds.Linear),  # reuses a node that is already in the tree
]


class Builder:
    """Draws one tree."""

    def __init__(self, seed: str, width: int, cut: Cut) -> None:
        self.rng = random.Random(seed)
        self.width, self.cut = width, cut
        self.count = 0
        self.pool: list[Node] = []
        self.used: set[str] = set()

    def build(self, depth: int, budget: int) -> Node:
        """Draws a node and its subtrees: at most `budget` nodes, nested at most `depth` deep."""
        number, self.count = self.count, self.count + 1
        choices = [k for k in KINDS if k.children == 0 or (depth > 0 and k.children < budget)]
        kind = self.rng.choices(choices, [k.weight for k in choices])[0]
        wrapped = self.rng.random() < WRAPPED
        seed = self.rng.random()
        again = self.rng.random()
        children = [
            self.build(depth - 1, max(1, budget // kind.children)) for _ in range(kind.children)
        ]
        node = self.make(kind, number, children, random.Random(seed), again)
        if node.number == number:
            node.wrapped = wrapped and number not in self.cut.units
            self.pool.append(node)
        elif not node.wrapped:  # a shared node must be a unit; else two units would share weights
            node.wrapped = node.number not in self.cut.units
        return node

    def make(
        self, kind: Kind, number: int, children: list[Node], rng: random.Random, again: float
    ) -> Node:
        left_out = kind.name in self.cut.without or number in self.cut.nodes
        if kind.name == "shared" and self.pool and not left_out:
            self.used.add("shared")
            return self.pool[int(again * len(self.pool))]
        if left_out:
            kind_made = kinds.Sequence if children else kinds.Linear
        else:
            kind_made = kind.make
            self.used.add(kind.name)
        node = kind_made(self.width, rng, *children)
        node.number, node.label = number, kind_made.__name__
        return node


def describe(node: nn.Module, indent: str = "", seen: set[int] | None = None) -> str:
    """Lists the tree in lines: each node's number and kind, and * if it is a unit."""
    seen = set() if seen is None else seen
    lines = []
    if isinstance(node, Node):
        again = node.number in seen
        lines.append(
            f"{indent}{node.number} {node.label}{'*' if node.wrapped else ''}"
            f"{' (again)' if again else ''} {node.note}".rstrip()
        )
        if again:
            return lines[0]
        seen.add(node.number)
        indent += "  "
    for child in filter(None, node._modules.values()):  # children() skips repeated modules
        text = describe(child, indent, seen)
        if text:
            lines.append(text)
    return "\n".join(lines)

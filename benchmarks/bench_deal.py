"""Print how evenly optimizers deal the matrices of large models to ranks, computed from shapes.

python benchmarks/bench_deal.py

A figure is the work of the rank with the most work divided by the mean work of all ranks, computed
by the functions that the optimizers call. "flat" and "rows" are the two layouts of shards.
"largest" is the work of the largest matrix divided by the same mean; no deal of whole matrices can
be below this. "stays" is the fraction of elements that are not sent, because they lie on the rank
that owns their matrix. Each layer is a unit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import common
import numpy as np

from fsdpc import _C
from fsdpc._spans.rows import block
from fsdpc._spans.span import Span
from fsdpc.optim import SOAP, Muon
from fsdpc.optim._matrices import cut
from fsdpc.optim._owned import Member, owners_of
from fsdpc.optim._places import ParamSpan

WORLDS = (8, 16, 32, 64, 128, 256, 512, 1024)
Shapes = list[tuple[int, ...]]
Kind = tuple[type, dict[str, Any]]
KINDS: dict[str, Kind] = {
    "Muon": (Muon, {"ns_steps": 5}),
    "SOAP": (SOAP, {"max_precondition_dim": 10000, "precondition_frequency": 10}),
}


def llama(width: int, keys: int, hidden: int, layers: int) -> list[Shapes]:
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    return [attention + [(hidden, width)] * 2 + [(width, hidden)]] * layers


def deepseek_v3() -> list[Shapes]:
    """Return the shapes of 3 dense layers, then 58 layers of 256 experts and a shared expert. All
    layers have latent attention.
    """
    w = 7168
    attention = [(1536, w), (24576, 1536), (576, w), (32768, 512), (w, 16384)]
    dense = [(18432, w), (18432, w), (w, 18432)]
    shared = [(256, w), (2048, w), (2048, w), (w, 2048)]
    experts = [(256, 2048, w), (256, 2048, w), (256, w, 2048)]
    return [attention + dense] * 3 + [attention + shared + experts] * 58


MODELS = {
    "Llama-3-8B": llama(4096, 1024, 14336, 32),
    "Llama-3-70B": llama(8192, 1024, 28672, 80),
    "DeepSeek-V3": deepseek_v3(),
}


def spans_of(shapes: Shapes, world: int, by_rows: bool) -> list[Sequence[Span]]:
    """Return every rank's span of each parameter of a unit."""
    if by_rows:
        return [[block(shape, world, rank) for rank in range(world)] for shape in shapes]
    types = ("float32", "float32", "float32", True)
    specs = [(f"p{i}", int(np.prod(shape)), *types) for i, shape in enumerate(shapes)]
    return [[Span(*span) for span in spans] for spans in _C.layout(specs, world, 64, True)["spans"]]


def members_of(units: list[Shapes], world: int, by_rows: bool, kind: Kind) -> list[Member]:
    known: dict[int, list[Sequence[Span]]] = {}
    found = []
    for shapes in units:
        spans = known.setdefault(id(shapes), []) or spans_of(shapes, world, by_rows)
        known[id(shapes)] = spans
        for shape, ranks in zip(shapes, spans, strict=True):
            own = ParamSpan(*ranks[0], shape)
            found += [Member(None, own, m, ranks, kind[1]) for m in cut(None, "", shape)]  # type: ignore[arg-type]
    return found


class Dealt(NamedTuple):
    most: float  # largest load of a rank / mean load
    largest: float  # largest work of one matrix / mean load
    stays: float


def dealt(units: list[Shapes], world: int, by_rows: bool, name: str) -> Dealt:
    kind = KINDS[name]
    members = members_of(units, world, by_rows, kind)
    work = [kind[0]._work(None, member) for member in members]
    owners = owners_of(members, work, world, kind[0]._owners_hold)
    loads = np.bincount(owners, weights=np.array(work, dtype=float), minlength=world)
    kept = sum(m.piece(owner)[1] for m, owner in zip(members, owners, strict=True))
    mean = sum(work) / world
    return Dealt(max(loads) / mean, max(work) / mean, kept / sum(m.matrix.numel for m in members))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS)
    given = parser.parse_args()
    rows = []
    for model in given.models:
        for world in given.worlds:
            row = [model, str(world)]
            for name in KINDS:
                flat, by_rows = (dealt(MODELS[model], world, each, name) for each in (False, True))
                row += [f"{flat.most:.2f}", f"{by_rows.most:.2f}", f"{flat.largest:.2f}"]
                row += [f"{flat.stays:.2f}", f"{by_rows.stays:.2f}"]
            rows.append(row)
    columns = ("flat", "rows", "largest", "flat stays", "rows stays")
    head = [f"{name}: {what}" for name in KINDS for what in columns]
    common.print_table(["model", "ranks", *head], rows)


if __name__ == "__main__":
    main()

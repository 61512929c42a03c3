"""The command-line options of plans and simulations, and their translation to a setup."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from fsdpc.plan.cards import CARDS, Card, bit_rate_of, bytes_of, card, seconds_of
from fsdpc.plan.ledger import Build
from fsdpc.plan.model import CHOICES, CPU, STRATEGIES, ZERO, Setup, check
from fsdpc.plan.sources import geometry
from fsdpc.plan.states import OPTIMIZERS

WRAPS = ("blocks", "embeddings", "whole")


@dataclass(frozen=True)
class Wanted:
    """The meaning of a command line. ``builds``: for each value of ``--wrap``, a function that
    builds the model with this wrap. ``build``: the function for the wrap that the user chose.
    """

    build: Build
    builds: dict[str, Build]
    setup: Setup
    card: Card
    usable: int | None
    notes: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_place(parser)
    _add_training(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("the model")
    model.add_argument(
        "model",
        nargs="?",
        help="module:function that returns model, (model, inputs) or (model, inputs, loss); a "
        "transformers config.json; or one of " + ", ".join(geometry.PRESETS),
    )
    model.add_argument("--params", type=geometry.count_of, metavar="N", help="such as 7b or 350m")
    for name in ("layers", "hidden", "heads", "kv-heads", "ffn", "vocab"):
        model.add_argument(f"--{name}", type=int, metavar="N")
    model.add_argument("--experts", type=int, default=0, metavar="N")
    model.add_argument("--top-k", type=int, default=2, metavar="N")
    model.add_argument(
        "--wrap",
        default="blocks",
        help="blocks (default), embeddings (embedding and head are units, too), whole; "
        "for module:function also class names with commas between them",
    )
    model.add_argument(
        "--api",
        choices=("FullyShardedDataParallel", "fully_shard"),
        default="FullyShardedDataParallel",
        help="how module:function is sharded, unless it returns a dict with 'shard'",
    )


def _add_place(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where it runs")
    where.add_argument("--gpu", help="one of " + ", ".join(CARDS))
    where.add_argument(
        "--memory",
        type=bytes_of,
        metavar="SIZE",
        help="usable bytes instead of the GPU's: 24GB is 24e9, 22.5GiB is 2**30 each",
    )
    where.add_argument("--cpu", action="store_true", help="ranks on processors of one host")
    where.add_argument("--world", type=int, default=8, help="ranks (default 8)")
    where.add_argument("--ranks-per-host", type=int, default=8, metavar="N")
    where.add_argument(
        "--link",
        type=bit_rate_of,
        metavar="RATE",
        help="of a host's interfaces together, as fsdpc doctor measures it: 10Gbit",
    )
    where.add_argument(
        "--latency", type=seconds_of, metavar="TIME", help="between two hosts, one way: 0.2ms"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options of the training. Each is stored under the name of its field of ``Setup``, and
    has the default of that field.
    """
    group = parser.add_argument_group("how it is trained")
    shape = group.add_mutually_exclusive_group()

    def option(flag: str, help: str | None = None, *, field: str = "", **how: Any) -> None:
        name = field or flag[2:].replace("-", "_")
        where = shape if name == "strategy" else group
        where.add_argument(flag, dest=name, default=getattr(Setup, name), help=help, **how)

    number = partial(option, type=int, metavar="N")
    ratio = partial(option, type=float, metavar="RATIO")
    switch = partial(option, action="store_true")
    choice = {
        name: partial(option, choices=tuple(filter(None, allowed)))
        for name, allowed in CHOICES.items()
    }
    option("--strategy", choices=STRATEGIES)
    shape.add_argument("--zero", type=int, choices=(1, 2, 3), help="the strategy for a ZeRO stage")
    number("--shard", "HYBRID strategies: ranks that share one copy (default: those of a host)")
    option("--storage", "dtype of the shards (default fp32)")
    group.add_argument("--compute", default="bf16", help="dtype of gathered values, or 'storage'")
    option("--reduce", "dtype in which gradients travel (default: the engine's)")
    option("--optimizer", choices=OPTIMIZERS)
    switch("--offload", "CPUOffload(offload_params=True)")
    ratio(
        "--offload-states",
        "part of the optimizer states in host memory, 0 to 1, with the parameters on the GPU "
        "(fsdpc.optim.Host)",
        field="host",
    )
    switch("--in-backward", "each unit is stepped in backward (fsdpc.optim.in_backward)")
    option(
        "--disk",
        "optimizer states on a disk, with so much memory for buffers (fsdpc.optim.Disk)",
        type=int,
        metavar="MIB",
    )
    ratio("--checkpointing", "part of the blocks that is recomputed, 0 to 1")
    ratio(
        "--recomputed",
        "part of the forward's FLOPs that is computed again, where selective checkpointing "
        "keeps products (step time only; default: that of --checkpointing)",
    )
    number(
        "--tensor-parallel",
        "GPUs among which each of the ranks' heads, MLPs and vocabulary are divided",
        field="tensor",
    )
    number("--pipeline-parallel", "and their blocks", field="pipeline")
    choice["compress"]("--compress", "saved activations in fewer bits (fsdpc.activations.compress)")
    switch("--offload-activations", "saved activations in host memory (fsdpc.activations.offload)")
    for name in ("micro-batch", "sequence", "accumulation"):
        number(f"--{name}")
    choice["sync"]("--sync", "last: no_sync for all micro-batches but the last")
    choice["attention"]("--attention")
    choice["loss"]("--loss")
    number("--gather-slots")
    number("--reduce-slots")


def answer(command: str, work: Callable[[], int]) -> int:
    """Return what ``work`` returns. If ``work`` refuses the options, print why and return 2."""
    try:
        return work()
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"fsdpc {command}: {error}", file=sys.stderr)
        return 2


def wanted(options: argparse.Namespace) -> Wanted:
    """Return the meaning of the options. ``ValueError``: the options contradict each other."""
    if options.cpu and (options.suggest or options.simulate or options.gpu):
        raise ValueError("--suggest, --simulate and --gpu rest on a GPU's speeds: leave --cpu away")
    notes: list[str] = []
    strategy = options.strategy
    if options.zero is not None:
        strategy, why = ZERO[options.zero]
        notes.append(f"--zero {options.zero} is {strategy}: {why}")
    given = {f.name: getattr(options, f.name) for f in fields(Setup) if hasattr(options, f.name)}
    given["strategy"] = strategy
    given["compute"] = None if options.compute == "storage" else options.compute
    given["disk"] = options.disk << 20
    setup = check(Setup(**given, **(CPU if options.cpu else {})))
    chosen = _linked(card(options.gpu or "h100"), options)
    usable = options.memory
    if usable is None and options.gpu:
        usable = chosen.usable
        notes.append(f"{chosen.name}: {usable / 2**30:.2f} GiB usable ({chosen.source})")
    builds = _builds(options)
    if (setup.offload or options.offload_activations) and options.cpu:
        notes.append("offload has no effect on the CPU")
    return Wanted(builds[options.wrap], builds, setup, chosen, usable, tuple(notes))


def _linked(card: Card, options: argparse.Namespace) -> Card:
    """Return the card, with the rate and the latency of the network if the user gives them."""
    if options.cpu and (options.link or options.latency):
        raise ValueError(
            "--link and --latency are for times, which rest on a GPU: leave --cpu away"
        )
    if options.link:
        card = replace(card, network=options.link / options.ranks_per_host, reached=1.0)
    return replace(card, latency=options.latency) if options.latency else card


_BY_FORMULA = {
    "--micro-batch": "micro_batch",
    "--attention": "attention",
    "--loss": "loss",
    "--tensor-parallel": "tensor",
    "--pipeline-parallel": "pipeline",
}


def _builds(options: argparse.Namespace) -> dict[str, Build]:
    if options.model and ":" in options.model:
        for option, name in _BY_FORMULA.items():
            if getattr(options, name) != getattr(Setup, name):
                raise ValueError(
                    f"{option} is for plain numbers; what {options.model} returns decides it"
                )
        return {options.wrap: _Traced(options.model, options.wrap, options.api)}
    if options.model and options.model.endswith(".json"):
        found = _from_config(options)
        if isinstance(found, _Traced):
            return {options.wrap: found}
    elif options.model:
        if options.model not in geometry.PRESETS:
            raise ValueError(_unknown(options.model))
        found = geometry.PRESETS[options.model]
    else:
        numbers = inspect.signature(geometry.from_numbers).parameters
        found = geometry.from_numbers(**{name: getattr(options, name) for name in numbers})
    if options.api == "fully_shard":
        raise ValueError(
            "--api fully_shard cuts parameters between rows, so their shapes are needed: give "
            "module:function, or a config.json where transformers is installed"
        )
    if options.wrap not in WRAPS:
        raise ValueError(f"--wrap must be one of {', '.join(WRAPS)}, got {options.wrap!r}")
    return {
        wrap: partial(geometry.build, found, wrap=wrap)
        for wrap in WRAPS
        if wrap != "whole" or options.wrap == "whole"
    }


def _unknown(name: str) -> str:
    plain = {re.sub(r"[^a-z0-9]", "", known.lower()): known for known in geometry.PRESETS}
    near = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", name.lower()), plain, 1)
    meant = f": did you mean {plain[near[0]]}? Else" if near else ":"
    return (
        f"unknown model {name!r}{meant} give module:function, a config.json, or one of "
        + ", ".join(geometry.PRESETS)
    )


class _Traced:
    """A model that is traced, from ``module:function`` or from a configuration. Setups that differ
    only in options that do not change the trace share one trace.
    """

    def __init__(self, text: str, wrap: str, api: str, config: Any = None) -> None:
        self.text, self.wrap, self.api, self.config = text, wrap, api, config
        self._kept: dict[Any, Any] = {}

    def __call__(self, setup: Setup) -> Any:
        from fsdpc.plan.sources.traced import build_traced, load

        key = (setup.compute, setup.reduce, setup.checkpointing, setup.sequence, setup.micro_batch)
        key += (setup.compress, setup.offload_activations, setup.storage, setup.attention)
        if key not in self._kept:
            factory = load(self.text) if self.config is None else lambda: deepcopy(self.config)
            self._kept[key] = build_traced(factory, setup, self.wrap, self.api)
        return self._kept[key]


def _from_config(options: argparse.Namespace) -> geometry.Geometry | _Traced:
    """Return the model of a ``config.json``, as transformers builds it. If transformers is not
    installed, or an option needs the formula, return the model by formula, which exists for some
    model types only.
    """
    from fsdpc.plan.sources import configs

    values = configs.read(options.model)
    by_formula = bool(options.compress) or options.offload_activations or options.loss == "fused"
    by_formula |= options.tensor > 1 or options.pipeline > 1
    if configs.installed() and not by_formula:
        return _Traced(options.model, options.wrap, options.api, configs.config_of(values))
    try:
        return geometry.geometry_of(values, options.model)
    except ValueError as error:
        if not configs.installed():
            raise
        raise ValueError(
            "--compress, --offload-activations, --loss fused and parts of parallel models are "
            f"planned by formula: leave them away, because {error}"
        ) from error


def at_world(setup: Setup, world: int) -> Setup:
    return check(
        replace(setup, world=world, shard=0 if "HYBRID" not in setup.strategy else setup.shard)
    )

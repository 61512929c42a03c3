"""The inputs of a plan: units, their parameters, and the changes of live memory in a step.

This file does not need torch. Bytes are those of one rank; elements are those of whole parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fsdpc._companions.saved import Away

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_of(text: str) -> str:
    """Return the full name of a dtype (``bfloat16`` for ``bf16``). ``ValueError``: not known."""
    name = SHORT.get(text, text)
    if name not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {text!r}: use one of {', '.join(SHORT)}")
    return name


@dataclass(frozen=True)
class Param:
    """A parameter of a unit. A parameter that several modules use is counted once.

    ``dtype``: None for the plan's storage dtype; ``uint8`` if the parameter is treated as bytes,
    which are not cast and not trained.
    ``row``: elements of one row if the unit is cut between rows (``fully_shard``), else 0.
    ``sides``: rows and columns of the matrix, or of each matrix of a stack; (0, 0) for a vector.
    ``looked_up``: whether the parameter is an embedding or output layer. ``codecs``: the codec of
    gathered values, the codec of gradients that ranks exchange, and whether there is error feedback
    for those gradients.
    """

    name: str
    numel: int
    dtype: str | None = None
    trainable: bool = True
    row: int = 0
    sides: tuple[int, int] = (0, 0)
    codecs: tuple[str, str, bool] = ("", "", False)
    looked_up: bool = False

    @property
    def matrix(self) -> tuple[int, int]:
        """``sides`` if optimizers of matrices step this parameter as a matrix, else (0, 0)."""
        return (0, 0) if self.looked_up else self.sides


@dataclass(frozen=True)
class Unit:
    """One FSDP unit. Equal units share one ``params`` tuple, so that each layout is computed once.

    ``depth``: nesting depth among units, 0 for the root. ``group``: the group of ranks; units of
    different groups do not share slots. ``keeps``: whether the values of a released unit stay until
    backward, in a slot that no other unit uses. ``inside``: whether the optimizer steps the unit in
    backward. ``foreign``: whether Python makes the gathered values, in memory that the engine does
    not own. For an option that is None, the option of the plan is used.
    """

    name: str
    depth: int
    params: tuple[Param, ...]
    reshard: bool | None = None
    offload: bool | None = None
    compute: str | None = None
    reduce: str | None = None
    group: str = ""
    inside: bool | None = None
    keeps: bool = False
    foreign: bool = False

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)


@dataclass(frozen=True)
class Moment:
    """A part of a step, with its live bytes relative to those at the beginning of the part.

    ``rise``: the maximum of live bytes minus those at the beginning. ``delta``: live bytes at the
    end minus those at the beginning. Of the live bytes at the maximum, ``grads`` are those of the
    unit's whole gradients, and ``logits`` are those of logits and loss. ``recomputed``: the part of
    ``rise`` that activation checkpointing computes again.
    """

    phase: str  # "forward" or "backward"
    unit: str
    rise: int
    delta: int
    grads: int = 0
    recomputed: int = 0
    logits: int = 0


@dataclass(frozen=True)
class Model:
    """Units in module order, beginning with the root, and the moments of one forward and backward.

    The moments are those of one micro-batch. ``tokens``: its tokens. ``flops``: the FLOPs of its
    forward and backward. ``notes``: the assumptions that were made. ``traced``: whether the moments
    are from a trace. ``sized``: whether the trace had the setup's micro-batch; if not, it had the
    inputs of the user's program. ``guessed``: whether no model of these shapes is known to exist.
    ``missing``: why there are no moments. ``doubt``: the fraction by which activations of real
    models may exceed those of the moments.
    """

    name: str
    units: tuple[Unit, ...]
    moments: tuple[Moment, ...] = ()
    buffer_bytes: int = 0
    input_bytes: int = 0
    tokens: int = 0
    flops: float = 0.0
    notes: tuple[str, ...] = ()
    blocks: int = 0
    traced: bool = False
    sized: bool = False
    guessed: bool = False
    missing: str = ""
    doubt: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)
    away: Away | None = None  # the activations that are in host memory
    forward: float = 0.0  # FLOPs of a forward; 0: a third of ``flops``
    # ``numel`` counts the bytes of quantized weights. ``packed`` is the number of values of these
    # weights minus the number of their bytes.
    packed: int = 0
    packing: int = 0  # bytes moved to pack saved activations; unpacking moves as many

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def values(self) -> int:
        """The number of parameters: a quantized weight counts as the number of its values."""
        return self.numel + self.packed

    @property
    def width(self) -> float:
        """The width of activations between blocks; estimated from FLOPs for a traced model."""
        if "width" in self.extra:
            return self.extra["width"]
        blocks = self.blocks or sum(unit.depth > 0 for unit in self.units) or 1
        return ((3 * self.forward or self.flops) / (6 * 12 * max(self.tokens, 1) * blocks)) ** 0.5


@dataclass(frozen=True)
class Setup:
    """All options of a run that do not describe the model.

    ``world``: the number of ranks. ``shard``: how many ranks share one copy of the values (0: all,
    as with FULL_SHARD).
    ``transport``: ``stream`` (GPUs), ``shared`` (CPU ranks of one host) or ``wire``. Over a wire,
    each rank receives gradients from ``senders`` other ranks (0: from all; ranks that share memory
    on their hosts have one sender for each other host), and sends gradients to ``receivers`` other
    ranks (None: to all).
    ``swaps``: whether replicas of CPU ranks exchange their sums in backward. With None, replicas do
    so with ``wire``, and do so with ``shared`` only if ``world`` exceeds ``ranks_per_host``.
    ``sync``: whether gradients are reduced after ``every`` micro-batch or only after the ``last``
    micro-batch (``no_sync``).
    ``disk``: bytes of buffers for states on a disk (``fsdpc.optim.Disk``); 0: states in memory.
    ``host``: the fraction of the states of parameters on GPUs that is in host memory;
    ``host_buffers``: bytes of each GPU's buffers for these states (``fsdpc.optim.Host``).
    ``in_backward``: whether the optimizer steps each unit in backward
    (``fsdpc.optim.in_backward``).
    ``offload_activations``: whether GPUs' saved activations are in host memory
    (``fsdpc.activations.offload``).
    ``compress``: dtype of saved activations (``fsdpc.activations.compress``); empty: not changed.
    ``recomputed``: the fraction of the forward's FLOPs that backward repeats. With None,
    it is ``checkpointing``.
    ``tensor``, ``pipeline``: the numbers of GPUs among which tensor and pipeline parallelism divide
    the model of each rank. Only models by formula use them.
    """

    world: int = 8
    shard: int = 0
    strategy: str = "FULL_SHARD"
    storage: str = "float32"
    compute: str | None = None
    reduce: str | None = None
    optimizer: str = "adamw"
    offload: bool = False
    disk: int = 0
    host: float = 0.0
    host_buffers: int = 64 << 20
    in_backward: bool = False
    checkpointing: float = 0.0
    compress: str = ""
    offload_activations: bool = False
    recomputed: float | None = None
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    sequence: int = 2048
    accumulation: int = 1
    sync: str = "every"
    attention: str = "flash"
    loss: str = "unfused"
    gather_slots: int = 0
    reduce_slots: int = 0
    transport: str = "stream"
    senders: int = 0
    swaps: bool | None = None
    receivers: int | None = None
    align_bytes: int = 128
    range_grain: int = 2 << 20
    page_bytes: int = 4096
    ranks_per_host: int = 8
    foreach: bool = True

    @property
    def offloads(self) -> bool:
        """Whether the shards of parameters on GPUs are in host memory."""
        return self.offload and self.transport == "stream"

    @property
    def shards(self) -> int:
        """The number of ranks that share one copy of the values."""
        if self.strategy == "NO_SHARD":
            return 1
        return self.shard or self.world

    @property
    def replicas(self) -> int:
        return self.world // self.shards


CPU = {"transport": "shared", "align_bytes": 64, "range_grain": 4096, "foreach": False}
STRATEGIES = (
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "_HYBRID_SHARD_ZERO2",
)
ZERO = {
    1: (
        "SHARD_GRAD_OP",
        "fsdpc has no stage that shards optimizer states alone: SHARD_GRAD_OP "
        "also shards gradients and, between steps, parameters, for the same bytes on the wire",
    ),
    2: ("SHARD_GRAD_OP", "ZeRO-2 while it computes; between steps parameters are sharded, too"),
    3: ("FULL_SHARD", "ZeRO-3"),
}


def check(setup: Setup) -> Setup:
    """Return the setup with its defaults filled in. ``ValueError`` names an option out of range."""
    for name in _COUNTS:
        if getattr(setup, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(setup, name)}")
    if setup.strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {setup.strategy!r}: use one of {', '.join(STRATEGIES)}")
    hybrid = "HYBRID" in setup.strategy
    if setup.shard and not hybrid:
        raise ValueError(f"shard={setup.shard} needs HYBRID_SHARD or _HYBRID_SHARD_ZERO2")
    if hybrid and not setup.shard:
        setup = replace(setup, shard=min(setup.ranks_per_host, setup.world))
    if setup.world % setup.shards:
        raise ValueError(f"world {setup.world} is not a multiple of shard {setup.shards}")
    for name in ("checkpointing", "recomputed", "host"):
        if not 0 <= (getattr(setup, name) or 0) <= 1:
            raise ValueError(f"{name} must be from 0 to 1, got {getattr(setup, name)}")
    for name, allowed in CHOICES.items():
        if getattr(setup, name) not in allowed:
            raise ValueError(
                f"{name} must be one of {', '.join(allowed)}, got {getattr(setup, name)!r}"
            )
    if setup.host and setup.disk:
        raise ValueError("states are in host memory or on a disk: use one of host and disk")
    if setup.compress and setup.offload_activations:
        raise ValueError("activations are compressed or offloaded: use one of the two options")
    if setup.offload_activations and setup.transport != "stream":
        setup = replace(setup, offload_activations=False)  # activations are in host memory already
    if setup.disk and setup.transport == "stream" and not setup.offload:
        raise ValueError("states on a disk are stepped in host memory: use offload=True with disk")
    if setup.in_backward and setup.accumulation > 1:
        raise ValueError("steps in backward cannot accumulate gradients: use accumulation=1")
    if setup.in_backward and setup.replicas > 1:
        raise ValueError("gradients of replicas are summed at the end: no steps in backward")
    for name in ("storage", "compute", "reduce"):
        if getattr(setup, name) is not None:
            setup = replace(setup, **{name: dtype_of(getattr(setup, name))})
    return setup


_COUNTS = (
    "world",
    "micro_batch",
    "sequence",
    "accumulation",
    "ranks_per_host",
    "tensor",
    "pipeline",
)
CHOICES = {
    "transport": ("stream", "shared", "wire"),
    "sync": ("every", "last"),
    "attention": ("flash", "eager"),
    "loss": ("unfused", "fused"),
    "compress": ("", "int8", "bf16"),
}

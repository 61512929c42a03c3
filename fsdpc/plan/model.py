"""What a plan is made from: units, their parameters, and how live memory moves.

Nothing here needs torch. Bytes are per rank, elements are of whole parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fsdpc._companions.saved import Away

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def dtype_of(text: str) -> str:
    """The full name of a dtype (``bf16`` or ``bfloat16``). ``ValueError``: no known dtype."""
    name = SHORT.get(text, text)
    if name not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {text!r}: use one of {', '.join(SHORT)}")
    return name


@dataclass(frozen=True)
class Param:
    """A parameter of a unit, each counted once however many modules use it. ``dtype`` None: the
    plan's storage dtype; ``uint8``: it is carried as bytes, not cast and not trained.
    ``row``: elements of one row if the unit is cut between rows (``fully_shard``), else 0.
    ``sides``: rows and columns of the matrix, or of each matrix of a stack; (0, 0): a vector.
    ``looked_up``: an embedding or output layer. ``codecs``: the code of gathered values, the code
    of gradients on their way, and whether what the code loses of gradients is kept.
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
        """``sides`` if optimizers of matrices take this parameter; (0, 0): AdamW steps it."""
        return (0, 0) if self.looked_up else self.sides


@dataclass(frozen=True)
class Unit:
    """One FSDP unit. Equal units share one ``params`` tuple, so that each layout is computed once.

    ``depth``: nesting depth among units, 0 for the root. ``group``: units of different groups of
    ranks have slots of their own. ``keeps``: a released unit's values stay until backward, in a
    slot of its own. ``inside``: the unit steps in backward. ``foreign``: gathered values are made
    in Python, in memory that is not the engine's. Options that are None follow the
    plan's.
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
    """Part of a step, relative to what is live when the part begins.

    ``rise``: the most live bytes above the begin, ``delta``: live bytes at the end minus those at
    the begin. ``grads``: of the live bytes at the highest point, those of the unit's whole
    gradients. ``recomputed``: of the rise, what activation checkpointing computes again.
    ``logits``: of the live bytes at the highest point, those of logits and loss.
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
    """Units in module order, the root's first, and the moments of one forward and backward.

    ``tokens``: those of the micro-batch whose moments these are. ``flops``: of one forward and
    backward of that micro-batch. ``notes``: assumptions made on the way. ``traced``: the moments
    are from a trace, with the setup's micro-batch if ``sized``, else with a program's own inputs.
    ``guessed``: the shapes are not those of a model that exists. ``missing``: why there are no
    moments. ``doubt``: the part by which activations of real models may be more than the moments'.
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
    away: Away | None = None  # activations in host memory
    forward: float = 0.0  # FLOPs of a forward; 0: a third of flops
    packed: int = 0  # values of frozen codes, less their bytes, which numel counts
    packing: int = 0  # bytes read and written to pack saved activations; unpacking: as many

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def values(self) -> int:
        """Parameters as a user counts them."""
        return self.numel + self.packed

    @property
    def width(self) -> float:
        """The width of activations between blocks; for a traced model, by its FLOPs."""
        if "width" in self.extra:
            return self.extra["width"]
        blocks = self.blocks or sum(unit.depth > 0 for unit in self.units) or 1
        return ((3 * self.forward or self.flops) / (6 * 12 * max(self.tokens, 1) * blocks)) ** 0.5


@dataclass(frozen=True)
class Setup:
    """Everything about a run that is not the model.

    ``world`` ranks; ``shard`` of them share one copy of the values (0: all, as FULL_SHARD does).
    ``transport``: ``stream`` (GPUs), ``shared`` (CPU ranks of one host) or ``wire``, over which
    each rank gets gradients from ``senders`` others (0: from all; one on each other host) and
    sends them to ``receivers`` (None: to all).
    ``swaps``: replicas of CPU ranks swap their sums in backward (None: over a ``wire``, and
    where ``shared`` ranks are more than ``ranks_per_host``).
    ``sync``: gradients are reduced after ``every`` micro-batch or the ``last`` (``no_sync``).
    ``disk``: bytes of buffers for states on a disk (``fsdpc.optim.Disk``); 0: states in memory.
    ``host``: part of the states of parameters on GPUs that is in host memory;
    ``host_buffers``: bytes of each GPU that these states pass through (``fsdpc.optim.Host``).
    ``in_backward``: the optimizer steps each unit in backward (``fsdpc.optim.in_backward``).
    ``offload_activations``: saved activations in host memory, from GPUs
    (``fsdpc.activations.offload``).
    ``compress``: dtype of saved activations (``fsdpc.activations.compress``); empty: as computed.
    ``recomputed``: part of the forward's FLOPs that backward repeats; None: ``checkpointing``.
    ``tensor``, ``pipeline``: GPUs among which tensor and pipeline parallelism divide each rank's
    model: given factors of sizes and times, for models by formula.
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
        """Whether shards of GPUs are in host memory."""
        return self.offload and self.transport == "stream"

    @property
    def shards(self) -> int:
        """Ranks among which one copy of the values is divided."""
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
    """The setup, completed. ``ValueError`` names the option that is out of range."""
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
        setup = replace(setup, offload_activations=False)  # they are there already
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

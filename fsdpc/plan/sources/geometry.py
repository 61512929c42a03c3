"""Parameters and activations of transformers, computed from plain numbers.

The formula counts the tensors that autograd saves in a pre-norm block with grouped-query attention
and a gated MLP. Each term has its source beside it. ``trace.py`` is exact for any model, and a test
compares the formula with a trace.
"""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fsdpc._companions.saved import Away, away, bytes_per_element
from fsdpc.plan.model import ITEM_BYTES, Model, Moment, Param, Setup, Unit


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder-only transformer. ``experts``: 0 for a dense MLP. ``expert_tensors``: the
    saved tensors of width ``ffn`` per token and expert. ``dense_experts``: whether every expert
    gets every token. ``gated``: whether the MLP has three matrices instead of two. ``inside``: the
    elements of further parameters of each block, by name. ``around``: the same for parameters
    outside of blocks. ``guessed``: whether no model of these sizes is known to exist.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    expert_tensors: int = 5
    dense_experts: bool = False
    gated: bool = True
    inside: tuple[tuple[str, int], ...] = ()
    around: tuple[tuple[str, int], ...] = ()
    guessed: bool = False
    notes: tuple[str, ...] = ()

    def block(self) -> tuple[Param, ...]:
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        count = max(1, self.experts)

        def matrix(name: str, rows: int, columns: int, of: int = 1) -> Param:
            return Param(name, of * rows * columns, sides=(rows, columns))

        attention = [matrix(n, w, h) for n, w in (("q", q), ("k", kv), ("v", kv))]
        found = [Param("norm1", h), *attention, matrix("o", h, q), Param("norm2", h)]
        if self.experts:
            found.append(matrix("router", self.experts, h))
        found += [matrix(n, self.ffn, h, count) for n in ("gate", "up")[not self.gated :]]
        found.append(matrix("down", h, self.ffn, count))
        return (*found, *(Param(name, numel) for name, numel in self.inside))

    def outside(self) -> tuple[Param, ...]:
        def table(name: str) -> Param:
            sides = self.vocab, self.hidden
            return Param(name, self.vocab * self.hidden, sides=sides, looked_up=True)

        head = () if self.tied else (table("head"),)
        return (
            table("embed"),
            Param("norm", self.hidden),
            *(Param(name, numel) for name, numel in self.around),
            *head,
        )

    @property
    def numel(self) -> int:
        block = sum(p.numel for p in self.block())
        return self.layers * block + sum(p.numel for p in self.outside())

    @property
    def active(self) -> int:
        """Parameters that one token uses."""
        if not self.experts or self.dense_experts:
            return self.numel
        idle = self.experts - self.top_k
        return self.numel - self.layers * idle * (2 + self.gated) * self.hidden * self.ffn


def _preset(name: str, *sizes: int, **more: Any) -> Geometry:
    layers, hidden, heads, kv, dim, ffn, vocab = sizes
    return Geometry(name, layers, hidden, heads, kv, dim, ffn, vocab, **more)


def _gpt2(hidden: int, ffn: int, positions: int) -> dict[str, Any]:
    """Return the options for GPT-2: it has biases, learned positions, two matrices in the MLP."""
    biases = (
        ("norms.bias", 2 * hidden),
        ("attention.bias", 4 * hidden),
        ("mlp.bias", ffn + hidden),
    )
    around = (("positions", positions * hidden), ("norm.bias", hidden))
    return {"gated": False, "inside": biases, "around": around}


# Sizes are from the models' published configurations, and give the published numbers of parameters.
# gpt-oss-8e has 8 experts instead of the 32 of gpt-oss-20b, and no biases.
PRESETS = {
    g.name: g
    for g in (
        _preset("gpt2", 12, 768, 12, 12, 64, 3072, 50257, tied=True, **_gpt2(768, 3072, 1024)),
        _preset("llama-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        _preset("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000),
        _preset("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        _preset("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
        _preset("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        _preset("llama-3-405b", 126, 16384, 128, 8, 128, 53248, 128256),
        _preset("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, experts=8, top_k=2),
        _preset(
            "gpt-oss-8e",
            24,
            2880,
            64,
            8,
            64,
            2880,
            201088,
            experts=8,
            top_k=4,
            expert_tensors=9,
            guessed=True,
        ),  # fmt: skip
    )
}


def from_numbers(
    params: float | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int | None = None,
    experts: int = 0,
    top_k: int = 2,
) -> Geometry:
    """Return a geometry from the given numbers. Other sizes are those of the preset that is nearest
    in size, and the width of the MLP is chosen so that the model has ``params`` parameters.
    ``ValueError``: too few numbers, or numbers that contradict each other.
    """
    if params is None and (layers is None or hidden is None):
        raise ValueError("give a model (see --help), or --params, or --layers and --hidden")
    if params is None:
        assert layers is not None and hidden is not None
        near = min(PRESETS.values(), key=lambda g: abs(math.log(g.hidden / hidden)))
    else:
        near = min(
            (g for g in PRESETS.values() if not g.experts),
            key=lambda g: abs(math.log(g.numel / params)),
        )
    layers, hidden = layers or near.layers, hidden or near.hidden
    dim = near.head_dim if hidden % near.head_dim == 0 else hidden // (heads or 1)
    heads = heads or max(1, hidden // dim)
    dim = hidden // heads
    kv = kv_heads or (near.kv_heads if heads % near.kv_heads == 0 else heads)
    made = Geometry(
        "numbers",
        layers,
        hidden,
        heads,
        kv,
        dim,
        ffn or 0,
        vocab or near.vocab,
        experts=experts,
        top_k=top_k,
        guessed=True,
    )
    notes = [f"sizes that were not given follow {near.name}"]
    if ffn is None and params is not None:
        left = params - made.numel
        width = round(left / (layers * 3 * hidden * max(1, experts)))
        if width < 1:
            raise ValueError(
                f"{params:.4g} parameters are fewer than attention and embeddings need "
                f"({made.numel:.4g}): check --layers, --hidden and --vocab"
            )
        made = replace(made, ffn=width)
        notes.append(f"MLP width {width} makes up {params:.4g} parameters")
    elif ffn is None:
        made = replace(made, ffn=round(hidden * near.ffn / near.hidden))
    return replace(made, notes=tuple(notes), name=f"{made.numel / 1e9:.3g}B")


def count_of(text: str) -> float:
    """Return the number in a text such as ``7b`` or ``1e9``. ``ArgumentTypeError``: no number."""
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    try:
        return float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number such as 7b, 350m or 1e9") from None


# --- units ------------------------------------------------------------------------------------


def units_for(geometry: Geometry, wrap: str) -> tuple[Unit, ...]:
    """Return the units of a model. ``wrap`` is ``blocks`` (each block is a unit, all other
    parameters are in the root), ``embeddings`` (embedding and head are also separate units), or
    ``whole`` (one unit).
    """
    block, outside = geometry.block(), geometry.outside()
    if wrap == "whole":
        inner = tuple(
            replace(p, name=f"blocks.{i}.{p.name}") for i in range(geometry.layers) for p in block
        )
        return (Unit("", 0, outside + inner),)
    if wrap == "blocks":
        return (Unit("", 0, outside), *_blocks(geometry, block))
    if wrap != "embeddings":
        raise ValueError(f"wrap must be blocks, embeddings or whole, got {wrap!r}")
    own = [p for p in outside if p.name != "norm"] if not geometry.tied else []
    rest = tuple(p for p in outside if p not in own)
    before = [Unit(p.name, 1, (p,)) for p in own if p.name == "embed"]
    after = [Unit(p.name, 1, (p,)) for p in own if p.name == "head"]
    return (Unit("", 0, rest), *before, *_blocks(geometry, block), *after)


def _blocks(geometry: Geometry, block: tuple[Param, ...]) -> Iterator[Unit]:
    return (Unit(f"blocks.{i}", 1, block) for i in range(geometry.layers))


# --- activations --------------------------------------------------------------------------------


def item_of(setup: Setup) -> int:
    """Bytes of an element in the compute dtype."""
    return ITEM_BYTES[setup.compute or setup.storage]


def saved_item_of(setup: Setup) -> float:
    """Return the bytes of an element of a saved activation, which ``compress`` reduces."""
    if not setup.compress:
        return item_of(setup)
    return bytes_per_element(setup.compress, item_of(setup))


class Saved(NamedTuple):
    """A tensor that autograd saves: elements per token, and bytes of an element. ``packed``:
    whether ``compress`` keeps the tensor in fewer bits.
    """

    elements: int
    item: int
    packed: bool = True


def attention_tensors(g: Geometry, setup: Setup) -> list[Saved]:
    """Return the saved tensors of attention: rotated q and k, v, a tensor of the attention itself,
    and the output (which the output projection also saves, as its input). The tensor of the
    attention is a log-sum-exp per head in fp32 for flash attention, and the probabilities for eager
    attention. ``compress`` does not compress what attention and softmax save, but compresses what
    other operations save. One tensor is therefore kept in both forms: the output of flash
    attention, or the probabilities of eager attention.
    """
    c, flash = item_of(setup), setup.attention == "flash"
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    inside = g.heads * setup.sequence
    middle, again = (Saved(g.heads, 4, False), q) if flash else (Saved(inside, c, False), inside)
    first = [Saved(numel, c, not flash) for numel in (q, kv, kv)]
    twice = [Saved(again, c)] if setup.compress else []
    return [*first, middle, Saved(q, c, not flash), *twice]


def mlp_tensors(g: Geometry, setup: Setup) -> list[Saved]:
    """Return the saved tensors of the MLP, which have its width: gate, up, silu(gate) and the
    product of up and silu(gate). An MLP without a gate saves up and its activation. A model with
    experts saves the router's weights, and ``expert_tensors`` tensors for each expert of a token.
    """
    wide = Saved(g.ffn, item_of(setup))
    if not g.experts:
        return [wide] * (4 if g.gated else 2)
    slots = g.experts if g.dense_experts else g.top_k
    return [Saved(g.experts, 4, False), *([wide] * (slots * g.expert_tensors))]


def block_tensors(g: Geometry, setup: Setup) -> list[Saved]:
    """Return the tensors that a block saves for backward, in the order: norm, attention, norm, MLP.
    A norm saves its input, 1/rms in fp32 and its result.
    """
    hidden = Saved(g.hidden, item_of(setup))
    norm = [hidden, Saved(1, 4, False), hidden]
    return [*norm, *attention_tensors(g, setup), *norm, *mlp_tensors(g, setup)]


def saved_bytes(tensors: Iterable[Saved], setup: Setup) -> float:
    """Bytes of these tensors per token."""
    low = saved_item_of(setup)
    return sum(t.elements * (low if t.packed else t.item) for t in tensors)


def block_saved(g: Geometry, setup: Setup) -> int:
    return round(saved_bytes(block_tensors(g, setup), setup))


def packing_bytes(g: Geometry, setup: Setup) -> int:
    """Return the bytes that a micro-batch reads and writes to pack saved activations: the plain and
    the packed bytes of each tensor. Unpacking reads and writes as many. Tensors of checkpointed
    blocks are not packed.
    """
    whole, packed = item_of(setup), saved_item_of(setup)
    if not setup.compress or packed >= whole:
        return 0
    again = sum(is_checkpointed(i, g.layers, setup.checkpointing) for i in range(g.layers))
    elements = (g.layers - again) * sum(t.elements for t in block_tensors(g, setup) if t.packed)
    return round(setup.micro_batch * setup.sequence * elements * (whole + packed))


def offloaded(g: Geometry, setup: Setup) -> tuple[Away, list[int]]:
    """Return the memory of saved activations after the forward of all blocks, if they are offloaded
    (``activations.offload``). Also return, for each block, the bytes that are not copied to the
    host.
    """
    tokens = setup.micro_batch * setup.sequence
    plain = block_tensors(g, replace(setup, compress=""))
    whole = [tokens * tensor.elements * tensor.item for tensor in plain]
    again = [tokens * g.hidden * item_of(setup)]
    blocks = [
        again if is_checkpointed(i, g.layers, setup.checkpointing) else whole
        for i in range(g.layers)
    ]
    return away([size for sizes in blocks for size in sizes]), [away(s).stay for s in blocks]


def logit_bytes(setup: Setup) -> int:
    """Return the bytes per logit at the loss: logits, their fp32 copy, log-softmax and gradient. A
    chunked or fused loss never has these for all tokens at once.
    """
    c = item_of(setup)
    return 12 if c == 4 else c + 12


FUSED_CHUNK = 1024  # a fused loss holds the logits of this many tokens at a time


def build(g: Geometry, setup: Setup, wrap: str = "blocks") -> Model:
    """Return the planner's model of a geometry, whose blocks are all equal. Nothing is traced."""
    g = part_of(g, setup)
    c, tokens = item_of(setup), setup.micro_batch * setup.sequence
    units, mlp = units_for(g, wrap), "gated" if g.gated else "plain"
    return Model(
        name=g.name,
        units=units,
        moments=_in_flight(tuple(_moments(g, setup, tokens, c, wrap)), setup),
        input_bytes=2 * 8 * tokens,
        tokens=tokens,
        flops=flops(g, setup, tokens),
        notes=g.notes
        + (f"activations by formula (pre-norm blocks, {mlp} MLP){_doubted(g, setup)}",),
        doubt=doubt(g, setup),
        blocks=g.layers,
        guessed=g.guessed,
        extra={"active": float(g.active), "width": float(g.hidden)},
        away=offloaded(g, setup)[0] if setup.offload_activations else None,
        packing=packing_bytes(g, setup),
    )


def _in_flight(moments: tuple[Moment, ...], setup: Setup) -> tuple[Moment, ...]:
    """Return ``moments``, with a moment for activations of earlier micro-batches. The first stage
    of a pipeline (1F1B) has saved these activations.
    """
    earlier = min(setup.pipeline, setup.accumulation) - 1
    saved = sum(m.delta for m in moments if m.phase == "forward" and m.unit.startswith("blocks"))
    if not earlier:
        return moments
    name, size = "earlier micro-batches", earlier * saved
    first, last = Moment("forward", name, size, size), Moment("backward", name, 0, -size)
    return (first, *moments, last)


def part_of(g: Geometry, setup: Setup) -> Geometry:
    """Return the part of the model on one GPU of a tensor- and pipeline-parallel group. The part
    has the embedding and the head, too. ``ValueError`` names a size that cannot be divided.
    """
    t, stages = setup.tensor, setup.pipeline
    if t == stages == 1:
        return g
    divided = (("blocks", g.layers, stages), ("heads", g.heads, t), ("MLP's width", g.ffn, t))
    for what, count, by in divided:
        if count % by:
            raise ValueError(f"{g.name}: its {what}, {count:,}, cannot be divided by {by}")
    note = (
        f"each of {t} x {stages} GPUs has 1/{t} of heads, MLP and vocabulary and 1/{stages} of the "
        "blocks; activations are those of as many micro-batches as there are stages"
    )
    return replace(
        g,
        layers=g.layers // stages,
        heads=g.heads // t,
        kv_heads=max(g.kv_heads // t, 1),
        ffn=g.ffn // t,
        vocab=-(-g.vocab // t),
        notes=(*g.notes, note),
    )


def doubt(g: Geometry, setup: Setup) -> float:
    """Return the largest fraction by which blocks of the transformers library save more than the
    formula says, for Llama, Mistral, Qwen2, Mixtral and, without a gate, GPT-2. The formula assumes
    that norms, rotary embeddings, dropout and GELU are fused, and that an eager softmax is not in
    fp32.
    """
    if not g.gated:
        return 2.0
    return 1.0 if setup.attention == "eager" and item_of(setup) < 4 else 0.12


def _doubted(g: Geometry, setup: Setup) -> str:
    return (
        f": transformers' blocks save up to {doubt(g, setup):.0%} more, as the upper bound has it"
    )


def flops(g: Geometry, setup: Setup, tokens: int) -> float:
    """Return the FLOPs of forward and backward: 6 per active parameter and token, and those of
    causal attention. The embedding has none, because it only reads rows.
    """
    dense = 6.0 * (g.active - (0 if g.tied else g.vocab * g.hidden)) * tokens
    return dense + 6.0 * g.layers * g.heads * g.head_dim * setup.sequence * tokens


def is_checkpointed(i: int, layers: int, ratio: float) -> bool:
    """Return whether block ``i`` is recomputed. ``round(ratio * layers)`` blocks, evenly spread,
    are recomputed.
    """
    count = round(ratio * layers)
    return (i + 1) * count // layers > i * count // layers


def _moments(g: Geometry, setup: Setup, tokens: int, c: int, wrap: str) -> Iterator[Moment]:
    hidden, saved = tokens * g.hidden * c, tokens * block_saved(g, setup)
    recomputed = tokens * block_saved(g, replace(setup, compress=""))  # one block, not compressed
    inside = tokens * c * (3 * g.ffn * (g.top_k or 1) + 2 * g.hidden)
    grads = sum(p.numel for p in g.block()) * c
    chosen = [is_checkpointed(i, g.layers, setup.checkpointing) for i in range(g.layers)]
    kept = [hidden if chosen[i] else saved for i in range(g.layers)]
    first, last = [max(each, inside) for each in kept], [0] * g.layers
    if setup.offload_activations:
        gone, kept = offloaded(g, setup)
        # After the first block, the GPU always has the tensors that were saved last.
        others = max(gone.moving - gone.resident, 0)
        first = [each + max(others, inside) for each in kept]
        first[0] += min(gone.moving, gone.resident)
        last = [gone.moving] * (g.layers - 1) + [others]
        kept[0] += gone.resident
    rows = tokens if setup.loss == "unfused" else min(tokens, FUSED_CHUNK)
    logits, tail = rows * g.vocab * logit_bytes(setup), 3 * hidden
    outside = sum(p.numel for p in g.outside()) * c
    held = 0 if wrap == "embeddings" else outside  # gradients that live until backward ends
    for i in range(g.layers):
        yield Moment("forward", f"blocks.{i}", first[i] + hidden, kept[i])
    yield Moment("forward", "head and loss", logits + tail, logits + tail, logits=logits)
    yield Moment(
        "backward",
        "head and loss",
        hidden + held,
        held + hidden - logits - tail,
        held,
        logits=logits,
    )
    left = list(kept)
    if setup.offload_activations:
        left[0], left[-1] = left[0] - gone.resident, left[-1] + gone.resident
    for i in reversed(range(g.layers)):
        again = recomputed if chosen[i] else 0
        whole = grads if wrap != "whole" else 0
        yield Moment(
            "backward",
            f"blocks.{i}",
            again + inside + last[i] + grads + held,
            grads - whole - left[i],
            grads + held,
            again,
        )
    yield Moment("backward", "embedding", 0, -held - hidden, held)


# Model types whose blocks have the parameters of ``Geometry.block`` and those that ``geometry_of``
# adds.
_KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gpt2")


def geometry_of(config: dict[str, Any], name: str) -> Geometry:
    """Return the geometry of a transformers configuration. ``ValueError`` names the model type that
    is not known here, or the missing key.
    """
    kind = config.get("model_type")
    if kind not in _KNOWN:
        raise ValueError(
            f"{name} has model_type {kind!r}, which needs transformers installed; known without "
            "it: " + ", ".join(_KNOWN)
        )

    def need(key: str) -> int:
        if config.get(key) is None:
            raise ValueError(f"{name} has no {key}")
        return int(config[key])

    if kind == "gpt2":
        hidden, heads = need("n_embd"), need("n_head")
        ffn = int(config.get("n_inner") or 4 * hidden)
        sizes = (need("n_layer"), hidden, heads, heads, hidden // heads, ffn, need("vocab_size"))
        more = _gpt2(hidden, ffn, need("n_positions"))
        return _preset(kind, *sizes, tied=bool(config.get("tie_word_embeddings", True)), **more)
    hidden, heads, ffn = need("hidden_size"), need("num_attention_heads"), need("intermediate_size")
    kv = (
        heads
        if kind == "llama" and not config.get("num_key_value_heads")
        else need("num_key_value_heads")
    )
    dim = int(config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads))
    inside = []
    if kind == "qwen2" or (kind in ("llama", "qwen3") and config.get("attention_bias")):
        out = hidden if kind != "qwen2" else 0
        inside.append(("attention.bias", (heads + 2 * kv) * dim + out))
    if kind == "llama" and config.get("mlp_bias"):
        inside.append(("mlp.bias", 2 * ffn + hidden))
    if kind == "qwen3":
        inside.append(("attention.norms", 2 * dim))
    experts = need("num_local_experts") if kind == "mixtral" else 0
    return _preset(
        kind,
        *(need("num_hidden_layers"), hidden, heads, kv, dim, ffn, need("vocab_size")),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        top_k=need("num_experts_per_tok") if experts else 0,
        inside=tuple(inside),
    )

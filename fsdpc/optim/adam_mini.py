"""Adam-mini, which has one second moment for each block of a parameter."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsdpc import _C
from fsdpc._companions.spans import touched
from fsdpc.optim._chunks import MASTER, Ends
from fsdpc.optim._disk import Disk
from fsdpc.optim._host import Host
from fsdpc.optim._places import ParamSpan, SharedBlocks
from fsdpc.optim._scaling import Members, Scaling
from fsdpc.optim._spanned import BlockOptimizer, Stretch, part

# Parts of parameters' names, by which the published code (Adam-mini v1.1.1) chooses a rule. The
# order is that of the code: the first part that the lower-cased name contains decides.
BIASES = ("bias",)
HEADS = ("k_proj", "q_proj", "wq", "wk", "query", "key")
ROWS = ("embed", "embd", "wte", "lm_head", "output", "final_layer", "v_proj", "wv", "value")
ROWS += ("o_proj", "wo", "attn.proj", "feed_forward", "linear", "mlp")
WIDE = 1 << 22  # elements that are converted to float64 at one time


class Source(NamedTuple):
    """The span of a stretch, with the parameter and its states. A step of offloaded states works
    on slices. If the stretch is such a slice, ``param`` and ``span`` are those from which the
    slice was cut.
    """

    param: Tensor
    span: ParamSpan
    step: Tensor
    means: Tensor


class AdamMini(BlockOptimizer):
    """Adam-mini (Zhang et al., arXiv 2406.16793). The states take 4 bytes per element of a
    float32 parameter, and 4 bytes per block.

    The rule is that of AdamW, but with ``v = beta2 * v + (1 - beta2) * mean(g^2 over the block)``.
    ``block`` is called with a parameter's name and shape, and returns the number of consecutive
    elements that share a ``v``. It returns 1 if each element has a ``v``, or None for the rules of
    the published code. By these rules, each element of a bias is a block. A block of query and key
    weights is a head of ``head_dim`` rows; the argument ``head_dim`` is then needed. A block of
    embeddings and of output, value, projection and MLP weights is a row. Each other parameter is
    one block. The first parameter of two or more dimensions that no rule covers causes a warning,
    because the optimizer is worse with such large blocks. Names come from
    ``model.named_parameters()`` or from FSDP's units. A parameter without a name raises
    ``ValueError`` unless ``block`` decides. Every parameter has the weight decay of its group.

    Blocks are aligned to the whole parameter. Ranks that share blocks add up their sums of squares
    in one collective per step and group of ranks; ``step`` is then collective. Sums are float64.
    Results on different numbers of ranks may differ in the last bit, and so may results of a GPU
    and of a CPU, because the orders of addition differ. Two equal runs are equal to the bit. Steps
    of parameters on one GPU need no host sync. While sums are computed, at most 4 million
    elements at a time take 8 more bytes each. The sums take 8 bytes for each block until the
    block's parameter has stepped.
    ``load_state_dict`` takes ``exp_avg_sq`` in the parameter's shape (as ``state_dict`` returns it)
    and averages it over blocks. ``offload``: a ``Disk`` or a ``Host`` for first moments and
    masters; second moments are not offloaded.
    """

    _state_names = ("exp_avg",)
    _known_lengths: dict[int, int] | None = None
    _warned = False
    _head_dim: int | None = None
    _block: Callable[[str, tuple[int, ...]], int | None] | None = None
    _sources: dict[int, Source] | None = None  # the source of each slice, by the id of its span

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        head_dim: int | None = None,
        block: Callable[[str, tuple[int, ...]], int | None] | None = None,
        maximize: bool = False,
        offload: Disk | Host | None = None,
    ) -> None:
        self._head_dim, self._block = head_dim, block
        self._open(locals())

    # --- blocks ----------------------------------------------------------------------------------

    def block_length(self, param: Tensor, span: ParamSpan) -> int:
        """Return the number of elements of a whole parameter that share a second moment."""
        if self._known_lengths is None:
            self._known_lengths = {}
        if id(span) not in self._known_lengths:  # _known keeps the span alive, so its id is unique
            self._known_lengths[id(span)] = self._find_length(param, span)
        return self._known_lengths[id(span)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._known_lengths = None

    def _find_length(self, param: Tensor, span: ParamSpan) -> int:
        name = span.name if span.name is not None else self._name(param)
        if self._block is not None:
            chosen = self._block(name or "", span.shape)
            if chosen is not None:
                if chosen < 1:
                    raise ValueError(f"block() returned {chosen} for {name!r}: at least 1 needed")
                return chosen
        if name is None:
            raise ValueError(
                f"AdamMini needs the name of a parameter of shape {span.shape}: pass "
                "model.named_parameters(), or block="
            )
        if not self._warned and len(span.shape) > 1 and _rule_of(name) is None:
            self._warned = True
            warnings.warn(
                f"AdamMini: no rule of the published code knows {name!r} of shape {span.shape}, so "
                "all of the parameter shares one second moment, as may others: block= gives "
                "parameters with names of their own theirs, for example by row: "
                "block=lambda name, shape: shape[-1] if len(shape) == 2 else None",
                stacklevel=2,
            )
        return default_block(name, span.shape, self._head_dim)

    def _name(self, param: Tensor) -> str | None:
        for group in self.param_groups:
            for i, each in enumerate(group["params"]):
                if each is param:
                    names = group.get("param_names")
                    return names[i] if names else None
        return None

    def _lengths(self, param: Tensor) -> dict[int, int]:
        """Return the block lengths of a parameter's spans, by the span's id."""
        return {id(s): self.block_length(param, s) for s in self._place(param).every}

    # --- states: state["means"] has one float32 tensor per span, one value per block ------------

    def _begin_group(self, group: dict[str, Any], found: Members) -> None:
        new = [param for param in found.params if not self.state[param]]
        super()._begin_group(group, found)
        for param in new:
            self.state[param]["means"] = self._fresh(param)

    def _beside(self, param: Tensor) -> dict[str, int]:
        lengths = self._lengths(param)
        count = sum(len(touched(span, lengths[id(span)])) for span in self._place(param).spans)
        return {**super()._beside(param), "means": 4 * count}

    def _fresh(self, param: Tensor) -> list[Tensor]:
        lengths = self._lengths(param)
        spans = self._place(param).spans
        device = param.device
        return [torch.zeros(len(touched(span, lengths[id(span)])), device=device) for span in spans]

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict in torch's form, in which ``exp_avg_sq`` has the parameter's shape
        and equal values within a block. ``exp_avg_sq`` takes 4 bytes per element until the
        caller drops the state dict. Local.
        """
        return super().state_dict()

    def _expanded(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        value = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.contiguous_format)
        lengths = self._lengths(param)
        for span, means in zip(self._place(param).spans, state["means"], strict=True):
            counts = torch.tensor(_counts(span, lengths[id(span)]), device=means.device)
            part(value, span).view(-1).copy_(torch.repeat_interleave(means, counts))
        kept = {name: entry for name, entry in state.items() if name != "means"}
        return {**kept, "exp_avg_sq": value.requires_grad_(False)}

    def span_forms(self, param: Tensor) -> list[dict[str, tuple[torch.dtype, int]]]:
        """See ``BlockOptimizer``. Local."""
        return [
            {
                **{name: (self._state_dtype(param), 1) for name in self._of_elements(param)},
                "exp_avg_sq.means": (torch.float32, self.block_length(param, span)),
            }
            for span in self._place(param).every
        ]

    def _of_elements(self, param: Tensor) -> tuple[str, ...]:
        """Return the names of the states with one value per element."""
        return ("exp_avg", MASTER) if self._has_master(param) else ("exp_avg",)

    def _span_values(self, param: Tensor, state: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        for span, means in zip(self._place(param).spans, state["means"], strict=True):
            held = {"exp_avg_sq.means": means}
            for name in self._of_elements(param):
                bare = name == MASTER and name not in state  # a loaded state dict had no master
                value = part(param if bare else state[name], span)
                held[name] = value.detach().reshape(-1).to(self._state_dtype(param))
            yield held

    def take_span_states(self, param: Tensor, states: list[dict[str, Any]]) -> None:
        """See ``BlockOptimizer``. Local."""
        if self._store is not None:
            self._place_states({id(param)})
        held = [given for given in states if given]
        means = [given["exp_avg_sq.means"].to(param.device) for given in held]
        self.state[param] = {"step": held[0]["step"], "means": means}
        for name in self._of_elements(param):
            value = self.state[param][name] = self._zeros(param, name)
            for span, given in zip(self._place(param).spans, held, strict=True):
                part(value, span).view(-1).copy_(given[name])

    def _loaded(self, param: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        state = super()._loaded(param, saved)
        if "exp_avg_sq" in saved:
            square = saved["exp_avg_sq"].detach()
            if self._store is None or not self._store.takes(param):
                square = square.to(param.device)
            state["exp_avg_sq"] = square.to(torch.float32).contiguous()
        return state

    def _after_load(self) -> None:
        """Average the loaded ``exp_avg_sq`` over blocks. Collective if ranks share blocks."""
        sums = self._sums(self._loaded_squares())
        for param, span, total, length in sums:
            state = self.state[param]
            spans = self._place(param).spans
            state.setdefault("means", [None] * len(spans))
            number = next(i for i, each in enumerate(spans) if each is span)
            state["means"][number] = torch.from_numpy(total / _whole(span, length)).to(
                param.device, torch.float32
            )
        for state in self.state.values():
            state.pop("exp_avg_sq", None)
            state.setdefault("means", [])

    def _loaded_squares(self) -> Iterator[tuple[Tensor, ParamSpan, np.ndarray, int]]:
        for group in self.param_groups:
            for param in group["params"]:
                value = self.state.get(param, {}).get("exp_avg_sq")
                if value is None:
                    continue
                lengths = self._lengths(param)
                for span in self._place(param).spans:
                    length = lengths[id(span)]
                    # Sums of up to 2^29 equal float32 values are exact in float64.
                    flat = part(value, span).reshape(-1).double()
                    counts = np.cumsum([0, *_counts(span, length)[:-1]])
                    yield param, span, np.add.reduceat(flat.cpu().numpy(), counts), length

    # --- a step ----------------------------------------------------------------------------------

    def _communicates(self) -> bool:
        params = (p for group in self.param_groups for p in group["params"])
        return any(self._place(p).group.world > 1 for p in params)

    def _before_step(self, members: list[Members], scaling: Scaling) -> None:
        """Compute the mean square of each block's gradients over all ranks, in float64."""
        self._denominators: dict[int, Tensor] = {}
        self._on_gpu = self._is_on_gpu()
        if self._on_gpu:
            self._totals = self._means_on_gpu(members, scaling)
            return
        factor = (scaling.clip / scaling.scale) ** 2
        self._totals = {
            id(span): torch.from_numpy(total / _whole(span, length) * factor)
            for _, span, total, length in self._sums(self._block_sums(members))
        }

    def _means_on_gpu(self, members: list[Members], scaling: Scaling) -> dict[int, Tensor]:
        """Compute mean squares on a GPU, without a host sync. Collective if ranks share blocks."""
        factor = _factor_on_gpu(scaling)
        found: dict[int, tuple[ParamSpan, int, Tensor]] = {}
        for each in members:
            for stretch in self._stretches(each.params, each.values, each.grads):
                length = self.block_length(stretch.param, stretch.span)
                sums = block_squares(stretch.grad, stretch.span.begin, length)
                found[id(stretch.span)] = (stretch.span, length, sums)
        self._share_on_gpu(found)
        means = {}
        for number, (span, length, sums) in found.items():
            mean = sums.div_(_whole_on(sums.device, span, length))
            means[number] = mean if factor is None else mean.mul_(factor)
        return means

    def _share_on_gpu(self, found: dict[int, tuple[ParamSpan, int, Tensor]]) -> None:
        """Add other ranks' sums to the sums of shared blocks. Collective if blocks are shared."""
        blocks = self._shared()
        for identity, (group, count) in blocks.groups.items():
            device = next(p.device for g in self.param_groups for p in g["params"])
            zero = torch.zeros(1, dtype=torch.float64, device=device)
            own, shared = [zero] * count, []
            for span, _, sums in found.values():
                of, slots = blocks.slots_of(span)
                for slot, value in dict(zip(slots, (sums[:1], sums[-1:]), strict=True)).items():
                    if of == identity and slot is not None:
                        own[slot] = value
                        shared.append((value, slot))
            total = group.sum_on_gpu(torch.cat(own), "AdamMini's shared blocks")
            for one, slot in shared:
                one.copy_(total[slot : slot + 1])

    def _block_sums(
        self, members: list[Members]
    ) -> Iterator[tuple[Tensor, ParamSpan, np.ndarray, int]]:
        for found in members:
            for stretch in self._stretches(found.params, found.values, found.grads):
                length = self.block_length(stretch.param, stretch.span)
                blocks = len(touched(stretch.span, length))
                sums = torch.zeros(blocks, dtype=torch.float64, device="cpu")
                if stretch.grad.is_cpu:
                    threads = torch.get_num_threads()
                    _C.optim_block_squares(stretch.grad, stretch.span.begin, length, sums, threads)
                else:
                    sums = block_squares(stretch.grad, stretch.span.begin, length).cpu()
                yield stretch.param, stretch.span, sums.numpy(), length

    def _sums(
        self, own: Iterator[tuple[Tensor, ParamSpan, np.ndarray, int]]
    ) -> list[tuple[Tensor, ParamSpan, np.ndarray, int]]:
        """Add other ranks' sums to the sums of shared blocks. Collective if blocks are shared."""
        found = list(own)
        ends = np.array([(sums[0], sums[-1]) for _, _, sums, _ in found]).reshape(-1, 2, 1)
        spans = [span for _, span, _, _ in found]
        self._shared().combine("sum", "AdamMini's shared blocks", spans, ends)
        for (_, _, sums, _), pair in zip(found, ends[..., 0], strict=True):
            sums[0], sums[-1] = pair
        return found

    def _shared(self) -> SharedBlocks:
        """Return the blocks that ranks share. Local."""
        params = [param for group in self.param_groups for param in group["params"]]
        return SharedBlocks(
            1,
            (
                (self._place(param).group, span, self.block_length(param, span))
                for param in params
                for span in self._place(param).every
            ),
        )

    def _step_group(self, group: dict[str, Any], found: Members, scaling: Scaling) -> None:
        beta1, beta2 = group["betas"]
        rule = scaling.rule(group, beta1, beta2, group["eps"], maximize=group["maximize"])
        stretches = list(self._stretches(found.params, found.values, found.grads))
        sources = [self._source(stretch) for stretch in stretches]
        lengths = [self.block_length(source.param, source.span) for source in sources]
        self._step_means(sources, beta2, group["eps"], scaling)
        denominators = [
            self._denominators_of(p.span, source.span, length)
            for p, source, length in zip(stretches, sources, lengths, strict=True)
        ]
        states = *self._states_of(stretches, ["exp_avg"]), denominators
        self._run_over("mini", rule, scaling, stretches, states, lengths)

    def _source(self, stretch: Stretch) -> Source:
        found = (self._sources or {}).get(id(stretch.span))
        return found or self._source_of(stretch.param, stretch.span)

    def _source_of(self, param: Tensor, span: ParamSpan) -> Source:
        state, spans = self.state[param], self._place(param).spans
        number = next(i for i, each in enumerate(spans) if each is span)
        return Source(param, span, state["step"], state["means"][number])

    def _lend(
        self, worker: Any, part: Tensor, param: Tensor, ends: Ends, held: dict[str, Any]
    ) -> None:
        super()._lend(worker, part, param, ends, held)
        if worker._sources is None:
            worker._sources = {}
        spans = {span.key: span for span in self._place(param).spans}
        for own in worker._place(part).spans:
            worker._sources[id(own)] = self._source_of(param, spans[own.key])

    def _step_means(
        self, sources: list[Source], beta2: float, eps: float, scaling: Scaling
    ) -> None:
        """Update the second moments of the spans that this step has not updated yet."""
        found, root = scaling.control.found_inf, _root_on_gpu if self._on_gpu else _root
        roots: dict[int, Any] = {}
        for _, span, step, means in sources:
            if id(span) not in self._totals:
                continue
            new = self._totals.pop(id(span)).float().to(means.device)
            updated = means.mul(beta2).add_(new, alpha=1 - beta2)
            means.copy_(updated if found is None else torch.where(found == 0, updated, means))
            if id(step) not in roots:
                roots[id(step)] = root(step, beta2)
            self._denominators[id(span)] = means.sqrt().div_(roots[id(step)]).add_(eps)

    def _denominators_of(self, own: ParamSpan, whole: ParamSpan, length: int) -> Tensor:
        """Return the denominators of the blocks that ``own`` touches. ``own`` is the span
        ``whole``, or a chunk's slice of it.
        """
        found = self._denominators[id(whole)]
        if own.begin + own.count == whole.begin + whole.count:  # the last slice
            del self._denominators[id(whole)]
        first = own.begin // length - whole.begin // length
        return found[first : first + len(touched(own, length))]


def _root(step: Tensor, beta2: float) -> float:
    return (1 - beta2 ** (float(step) + 1)) ** 0.5


def _root_on_gpu(step: Tensor, beta2: float) -> Tensor:
    return (1 - torch.pow(beta2, step.double() + 1)).sqrt()


def _factor_on_gpu(scaling: Scaling) -> Tensor | None:
    """Return the float64 factor of the gradients' squares, or None if the factor is 1."""
    control = scaling.control
    factor = control.clip
    if control.grad_scale is not None:
        scale = control.grad_scale.double()
        factor = scale.reciprocal() if factor is None else factor / scale
    return None if factor is None else factor.square()


def block_squares(values: Tensor, first: int, length: int) -> Tensor:
    """Return the sum of squares of each block that ``values`` touch, in float64. Two equal calls
    give equal bits, because torch's order of additions depends only on the shape. ``values`` must
    be contiguous; they are the whole parameter's elements from index ``first`` on.
    """
    flat = values.reshape(-1)
    head = min(-first % length, flat.numel())
    rows = (flat.numel() - head) // length
    parts = [flat[:head].view(1, -1)] if head else []
    if rows:
        parts.append(flat[head : head + rows * length].view(rows, length))
    if head + rows * length < flat.numel():
        parts.append(flat[head + rows * length :].view(1, -1))
    return torch.cat([sums for part in parts for sums in _row_squares(part)])


def _row_squares(rows: Tensor) -> Iterator[Tensor]:
    """Yield the sums of squares of the rows, several rows at a time. Long rows are read part by
    part.
    """
    for some in rows.split(max(WIDE // rows.shape[1], 1)):
        sums = [
            part.to(torch.float64, copy=True).square_().sum(1) for part in some.split(WIDE, dim=1)
        ]
        yield sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _rule_of(name: str) -> tuple[str, ...] | None:
    """Return the texts of the published code's rule for a name, or None if there is no rule."""
    low = name.lower()
    rules: tuple[tuple[str, ...], ...] = (BIASES, HEADS, ROWS)
    return next((texts for texts in rules if any(text in low for text in texts)), None)


def default_block(name: str, shape: tuple[int, ...], head_dim: int | None) -> int:
    """Return the published code's block length. ``ValueError``: ``head_dim`` is needed for this
    parameter.
    """
    rule, whole = _rule_of(name), int(np.prod(shape)) if shape else 1
    if rule is BIASES:
        return 1
    row = whole // shape[0] if len(shape) > 1 and shape[0] else whole
    if rule is HEADS:
        if head_dim is None or len(shape) < 2 or shape[0] % head_dim:
            raise ValueError(
                f"AdamMini: {name!r} of shape {shape} has one second moment per head: pass "
                f"head_dim=, a divisor of {shape[0] if shape else 1}, or block="
            )
        return row * head_dim
    return row if rule is ROWS and len(shape) > 1 else max(whole, 1)


def _counts(span: ParamSpan, length: int) -> list[int]:
    """Return how many elements of the span are in each block that the span touches."""
    end = span.begin + span.count
    starts = [number * length for number in touched(span, length)]
    return [min(start + length, end) - max(start, span.begin) for start in starts]


def _whole(span: ParamSpan, length: int) -> np.ndarray:
    """Return how many elements of the whole parameter are in each block that the span touches."""
    starts = np.array(touched(span, length)) * length
    return np.minimum(starts + length, span.numel) - starts


def _whole_on(device: torch.device, span: ParamSpan, length: int) -> Tensor:
    """Return ``_whole`` as a float64 tensor. The tensor is made on the GPU, because the host would
    have to wait for a copy to the GPU.
    """
    blocks = touched(span, length)
    counts = torch.full((len(blocks),), float(length), dtype=torch.float64, device=device)
    last = span.numel - blocks[-1] * length
    if last < length:
        counts[-1:].fill_(last)
    return counts

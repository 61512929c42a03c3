"""AdamW with states of 8 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdpc import _C
from fsdpc._companions.spans import touched
from fsdpc._companions.state_layout import BLOCK, MIN_8BIT, Extent, extent_of_8bit
from fsdpc.optim._base import check_number, step_counter
from fsdpc.optim._chunks import Ends, worker_of
from fsdpc.optim._disk import Disk
from fsdpc.optim._host import Host
from fsdpc.optim._places import ParamSpan, SharedBlocks
from fsdpc.optim._scaling import Members, Scaling
from fsdpc.optim._spanned import BlockOptimizer, Stretch, members_of, part
from fsdpc.optim.adam import AdamW

MOMENTS = ("exp_avg", "exp_avg_sq")
FORMS = {"codes": (torch.uint8, 1), "scales": (torch.float32, BLOCK), "values": (torch.float32, 1)}


class AdamW8bit(BlockOptimizer, AdamW):
    """AdamW with block-wise quantised states (Dettmers et al., arXiv 2110.02861). The states take
    2.03 bytes per element: each moment has one 8-bit code per element and one float32 scale per
    block of 256 elements.

    Blocks are aligned to the whole parameter, and ranks that share a block exchange the block's
    extremes, so results are equal to the bit on any number of ranks. Whole parameters of fewer than
    ``min_8bit_size`` elements keep float32 states on every rank. The update is computed from the
    moments in float32 before they are quantised again. Quantisation never rounds an ``exp_avg_sq``
    above zero to zero. On a CPU this optimizer saves memory, but not time.

    ``step`` and ``load_state_dict`` are collective if ranks share a block: all ranks that
    share parameters must call them with the same parameters.

    ``state_dict`` holds float32 ``exp_avg`` and ``exp_avg_sq`` of the parameters' shapes, like the
    state dict of torch's AdamW. Loading quantises both moments; moments that this class saved get
    the codes that they had. ``offload``: a ``Disk`` or a ``Host`` to keep the states on.
    Raises ``NotImplementedError`` for DTensors that are not cut by rows.
    """

    _kind = None
    # The extremes of the first and last block of each span of this step that has a block in common
    # with other ranks. The key is the id of the span. The extremes of a block are its largest
    # ``exp_avg``, ``-exp_avg`` and ``exp_avg_sq``.
    _edges: dict[int, np.ndarray] | None = None
    _cut: tuple[list[int], SharedBlocks] | None = None  # (min_8bit_size of groups, shared blocks)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        min_8bit_size: int = MIN_8BIT,
        offload: Disk | Host | None = None,
    ) -> None:
        if getattr(offload, "masters", False):
            raise ValueError("AdamW8bit has no float32 masters: use AdamW with masters=True")
        check_number(min_8bit_size, "min_8bit_size")
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, offload=offload)
        self._add_defaults(min_8bit_size=min_8bit_size)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self._store is not None:
            self._check_sizes(state["param_groups"])
        super().__setstate__(state)

    def _check_sizes(self, loaded: list[dict[str, Any]]) -> None:
        """Raise ``ValueError`` if ``loaded`` changes the size of states already offloaded."""
        assert self._store is not None
        for number, (group, given) in enumerate(zip(self.param_groups, loaded, strict=True)):
            new = {"min_8bit_size": self.defaults["min_8bit_size"], **given}
            for param in group["params"]:
                if self._store.knows(param) and any(
                    _is_8bit(group, span) != _is_8bit(new, span)
                    for span in self._place(param).every
                ):
                    raise ValueError(
                        f"AdamW8bit: parameter group {number} has min_8bit_size="
                        f"{group['min_8bit_size']}, but {new['min_8bit_size']} in the state dict, "
                        f"and a parameter of shape {tuple(param.shape)} has offloaded states of "
                        "the former size: load into a new AdamW8bit(..., offload=...), or set "
                        f"min_8bit_size={group['min_8bit_size']} in the state dict's group"
                    )

    # --- states ----------------------------------------------------------------------------------
    # state["spans"] has one dict for each span of the parameter that has elements on this rank. The
    # dict has "codes" and "scales" if the span's states are 8-bit, else "values".

    def _begin_group(self, group: dict[str, Any], found: Members) -> None:
        for param in found.params:
            if not self.state[param]:
                made = self._fresh(group, param)
                self.state[param].update(step=step_counter(param), spans=made)
                if self._store is not None:
                    self._adopt(param)

    def _fresh(self, group: dict[str, Any], param: Tensor) -> list[dict[str, Any]]:
        device = self._made_on(param)
        spans = self._place(param).spans
        return [_fresh(span, _is_8bit(group, span), device) for span in spans]

    def _extents(self, group: dict[str, Any], param: Tensor) -> list[Extent]:
        """Return an ``Extent`` for each span that has elements on this rank."""
        types = (torch.uint8, torch.float32)
        return [
            extent_of_8bit(s.at, s.count, s.begin, _is_8bit(group, s), types)
            for s in self._place(param).spans
        ]

    def _adopt(self, param: Tensor) -> None:
        assert self._store is not None
        store, spans = self._store, self.state[param].get("spans")
        # While a state dict is loaded, there are float32 moments and no spans yet.
        if spans is None or param not in store.held:
            return
        places = store.held[param]
        wanted = [{name.split(".")[0] for name in own} for own in places]
        if (found := [set(held) for held in spans]) != wanted:
            raise ValueError(
                f"AdamW8bit: the state of a parameter of shape {tuple(param.shape)} has for its "
                f"spans {_shown(found)} in state['spans'], which must be {_shown(wanted)}: load "
                "states by load_state_dict() or fsdpc.checkpoint"
            )
        for held, own in zip(spans, places, strict=True):
            for name, place in own.items():
                kind, which = name.split(".")
                if store.take_in(place, held[kind][int(which)]):
                    held[kind][int(which)] = place

    def _show_states(self, param: Tensor) -> None:
        """Do nothing, because ``_begin_group`` has made the states before the step."""

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with float32 moments, which take 8 bytes per element until the
        caller drops the dict. Local.
        """
        return super().state_dict()

    def _expanded(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        expanded = {name: value for name, value in state.items() if name != "spans"}
        for which, name in enumerate(MOMENTS):
            value = torch.zeros_like(
                param, dtype=torch.float32, memory_format=torch.contiguous_format
            )
            for span, held in zip(self._place(param).spans, state["spans"], strict=True):
                to = part(value, span)
                if "values" in held:
                    to.view(-1).copy_(held["values"][which])
                else:
                    codes, scales = held["codes"][which].cpu(), held["scales"][which].cpu()
                    values = to if to.is_cpu else torch.empty_like(to, device="cpu")
                    _C.optim_dequantise(which, values, span.begin, codes, scales)
                    if values is not to:
                        to.copy_(values)
            expanded[name] = value.requires_grad_(False)
        return expanded

    def span_forms(self, param: Tensor) -> list[dict[str, tuple[torch.dtype, int]]]:
        """See ``BlockOptimizer``. Local."""
        group = next(g for g in self.param_groups if any(p is param for p in g["params"]))
        return [
            {
                _name(which, kind): FORMS[kind]
                for which in (0, 1)
                for kind in (("codes", "scales") if _is_8bit(group, span) else ("values",))
            }
            for span in self._place(param).every
        ]

    def _span_values(self, param: Tensor, state: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        for held in state["spans"]:
            yield {_name(which, kind): held[kind][which] for kind in held for which in (0, 1)}

    def take_span_states(self, param: Tensor, states: list[dict[str, Any]]) -> None:
        """See ``BlockOptimizer``. Local."""
        given = [each for each in states if each]
        spans = [
            {
                kind: [each[_name(which, kind)] for which in (0, 1)]
                for kind in FORMS
                if _name(0, kind) in each
            }
            for each in given
        ]
        self.state[param] = {"step": given[0]["step"], "spans": spans}
        if self._store is not None:
            self._place_states({id(param)})

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32

    def _after_load(self) -> None:
        """Quantise the float32 moments that were loaded. Collective if ranks share blocks."""
        for which, name in enumerate(MOMENTS):
            loaded: list[tuple[ParamSpan, dict[str, Any], Tensor, np.ndarray]] = []
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state.get(param, {})
                    if name not in state:
                        continue
                    value = state.pop(name)
                    spans = self._place(param).spans
                    if "spans" not in state:
                        state["spans"] = self._fresh(group, param)
                    for span, held in zip(spans, state["spans"], strict=True):
                        own = part(value.detach(), span).reshape(-1).float()
                        if "values" in held:
                            held["values"][which].copy_(own)
                            continue
                        own = own.cpu()
                        edges = np.zeros((2, 3), dtype=np.float32)
                        _C.optim_edges_of(which, own, span.begin, edges)
                        loaded.append((span, held, own, edges))
            edges = np.stack([e for *_, e in loaded]) if loaded else np.zeros((0, 2, 3), np.float32)
            self._share_edges([span for span, *_ in loaded], edges)
            for (span, held, own, _), edge in zip(loaded, edges, strict=True):
                codes, scales = held["codes"][which].cpu(), held["scales"][which].cpu()
                _C.optim_quantise(which, own, span.begin, codes, scales, np.ascontiguousarray(edge))
                held["codes"][which].copy_(codes)
                held["scales"][which].copy_(scales)
        if self._store is not None:
            self._place_states({id(param) for param in self.state})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._cut = None

    def _cut_blocks(self) -> SharedBlocks:
        sizes = [group["min_8bit_size"] for group in self.param_groups]
        if self._cut is None or self._cut[0] != sizes:
            self._cut = sizes, self._find_cut_blocks()
        return self._cut[1]

    def _find_cut_blocks(self) -> SharedBlocks:
        return SharedBlocks(
            3,
            (
                (self._place(param).group, span, BLOCK)
                for group in self.param_groups
                for param in group["params"]
                for span in self._place(param).every
                if _is_8bit(group, span)
            ),
        )

    def _share_edges(self, spans: list[ParamSpan], edges: np.ndarray) -> None:
        """Change ``edges``, the extremes of each span's first and last block. Extremes of shared
        blocks become the maximum over the ranks, all others become -1. Collective.
        """
        blocks = self._cut_blocks()
        blocks.combine("max", "states of 8 bits of shared blocks", spans, edges)
        for span, edge in zip(spans, edges, strict=True):
            edge[[slot is None for slot in blocks.slots_of(span)[1]]] = -1

    # --- a step ----------------------------------------------------------------------------------

    def _communicates(self) -> bool:
        return bool(self._cut_blocks().groups)

    def _before_step(self, members: list[Members], scaling: Scaling) -> None:
        """Exchange the extremes of the blocks that ranks share."""
        cut = self._cut_blocks()
        self._edges = {}
        if not cut.groups:
            return
        spans: list[ParamSpan] = []
        parts: list[np.ndarray] = []
        for group, found in zip(self.param_groups, members, strict=True):
            stretches = [
                p
                for p in self._split(group, found)[0]
                if any(slot is not None for slot in cut.slots_of(p.span)[1])
            ]
            spans += [stretch.span for stretch in stretches]
            parts.append(self._own_edges(group, stretches, scaling))
        edges = np.concatenate(parts)
        self._share_edges(spans, edges)
        self._edges = {id(span): edge for span, edge in zip(spans, edges, strict=True)}

    def _own_edges(
        self, group: dict[str, Any], stretches: list[Stretch], scaling: Scaling
    ) -> np.ndarray:
        """Return, for each stretch's first and last block, the extremes of the moments after this
        step. Only this rank's elements of the block are considered.
        """
        edges = np.zeros((len(stretches), 2, 3), dtype=np.float32)
        store = self._store
        away = [store is not None and store.takes(stretch.param) for stretch in stretches]
        here = [i for i, offloaded in enumerate(away) if not offloaded]
        found = np.zeros((len(here), 2, 3), dtype=np.float32)
        self._call("edges8", group, [stretches[i] for i in here], scaling, found)
        edges[here] = found
        there = [i for i, offloaded in enumerate(away) if offloaded]
        if there:
            edges[there] = self._edges_away(group, [stretches[i] for i in there], scaling)
        return edges

    def _edges_away(
        self, group: dict[str, Any], stretches: list[Stretch], scaling: Scaling
    ) -> np.ndarray:
        """Return ``_own_edges`` of stretches whose states are offloaded. The states of each
        stretch's first and last block are copied to the parameter's device and used there.
        """
        store = self._store
        assert store is not None
        store.finish()
        worker = worker_of(self)
        ends: list[Stretch] = []
        for stretch in stretches:
            span, states = stretch.span, self._held(stretch)
            for low, high in _end_blocks(span):
                value, grad = (t.view(-1)[low:high] for t in (stretch.value, stretch.grad))
                first = (span.begin + low) // BLOCK - span.begin // BLOCK
                held = {
                    f"{kind}.{which}": _copy(tensor[a:b], value.device)
                    for kind, a, b in (("codes", low, high), ("scales", first, first + 1))
                    for which, tensor in enumerate(states[kind])
                }
                own = Ends(span.at + low, span.at + high, False)
                self._lend(worker, value, stretch.param, own, held)
                ends.append(Stretch(value, worker._place(value).spans[0], stretch.key, value, grad))
        found = np.zeros((len(ends), 2, 3), dtype=np.float32)
        worker._call("edges8", group, ends, scaling, found)
        return found.reshape(len(stretches), 2, 2, 3)[:, :, 0]

    def _lend(
        self, worker: Any, part: Tensor, param: Tensor, ends: Ends, held: dict[str, Any]
    ) -> None:
        super()._lend(worker, part, param, ends, held)
        states = {
            kind: [held[f"{kind}.{which}"] for which in (0, 1)]
            for kind in FORMS
            if f"{kind}.0" in held
        }
        worker.state[part]["spans"] = [states]
        spans = self._place(param).spans
        whole = next(s for s in spans if s.at <= ends.begin < s.at + s.count)
        shared = self._edges or {}
        if worker._edges is self._edges:
            worker._edges = {}
        if id(whole) in shared:
            (own,) = worker._place(part).spans
            worker._edges[id(own)] = _edges_of_slice(whole, own, shared[id(whole)])

    def _step_group(self, group: dict[str, Any], found: Members, scaling: Scaling) -> None:
        wide, small = self._split(group, found)
        if small:
            self._step_small(group, small, scaling, {id(stretch.param) for stretch in wide})
        if wide:
            own = np.full((2, 3), -1, dtype=np.float32)
            shared = self._edges or {}
            edges = np.stack([shared.get(id(stretch.span), own) for stretch in wide])
            self._call("adam8", group, wide, scaling, edges if shared else None)

    def _split(self, group: dict[str, Any], found: Members) -> tuple[list[Stretch], list[Stretch]]:
        """Return the stretches with 8-bit states, and those with float32 states."""
        stretches = list(self._stretches(found.params, found.values, found.grads))
        wide = [stretch for stretch in stretches if _is_8bit(group, stretch.span)]
        return wide, [stretch for stretch in stretches if not _is_8bit(group, stretch.span)]

    def _held(self, stretch: Stretch) -> dict[str, Any]:
        spans = self._place(stretch.param).spans
        number = next(i for i, span in enumerate(spans) if span is stretch.span)
        return self.state[stretch.param]["spans"][number]

    def _step_small(
        self, group: dict[str, Any], stretches: list[Stretch], scaling: Scaling, wide: set[int]
    ) -> None:
        """Step stretches with float32 states. ``wide``: the ids of parameters that also have 8-bit
        states. The call for 8-bit states advances their step counters, so this call must not.
        """
        held = [self._held(stretch)["values"] for stretch in stretches]
        steps = [self.state[stretch.param]["step"] for stretch in stretches]
        steps = [
            step.clone() if id(stretch.param) in wide else step
            for step, stretch in zip(steps, stretches, strict=True)
        ]
        states = [values[0] for values in held], [values[1] for values in held]
        rule = self._rule(group, scaling)
        self._run("adam", rule, scaling, members_of(stretches), states, steps)

    def _call(
        self,
        kind: Any,
        group: dict[str, Any],
        stretches: list[Stretch],
        scaling: Scaling,
        edges: np.ndarray | None,
    ) -> None:
        held = [self._held(stretch) for stretch in stretches]
        if not stretches:
            return
        pairs = [("codes", 0), ("codes", 1), ("scales", 0), ("scales", 1)]
        states = tuple([each[name][which] for each in held] for name, which in pairs)
        ones = [1] * len(stretches)
        self._run_over(kind, self._rule(group, scaling), scaling, stretches, states, ones, edges)


def _end_blocks(span: ParamSpan) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (begin, end) of the elements in a span's first block, and of those in the last block.
    Both count from the span's start.
    """
    first = min(BLOCK - span.begin % BLOCK, span.count)
    last = max(span.count - ((span.begin + span.count - 1) % BLOCK + 1), 0)
    return (0, first), (last, span.count)


def _edges_of_slice(whole: ParamSpan, own: ParamSpan, edges: np.ndarray) -> np.ndarray:
    """Return the extremes of the first and the last block of the slice ``own``. If a block is also
    the first or last block of ``whole``, its extremes come from ``edges``; else they are -1.
    """
    found = np.full((2, 3), -1, dtype=np.float32)
    blocks = [touched(span, BLOCK) for span in (own, whole)]
    for end in (0, -1):
        for other in (0, -1):
            if blocks[0][end] == blocks[1][other]:
                found[end] = edges[other]
    return found


def _shown(spans: list[set[str]]) -> list[list[str]]:
    return [sorted(kinds) for kinds in spans]


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


def _is_8bit(group: dict[str, Any], span: ParamSpan) -> bool:
    return span.numel >= group["min_8bit_size"]


def _name(which: int, kind: str) -> str:
    """The name of a state in checkpoints."""
    return MOMENTS[which] if kind == "values" else f"{MOMENTS[which]}.{kind}"


def _fresh(span: ParamSpan, eight_bits: bool, device: torch.device) -> dict[str, Any]:
    if not eight_bits:
        return {"values": [torch.zeros(span.count, device=device) for _ in MOMENTS]}
    blocks = len(touched(span, BLOCK))
    return {
        "codes": [
            torch.full((span.count,), zero, dtype=torch.uint8, device=device) for zero in (127, 0)
        ],
        "scales": [torch.zeros(blocks, device=device) for _ in MOMENTS],
    }

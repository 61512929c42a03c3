"""Muon: momentum, orthogonalised matrix by matrix; AdamW for what is no matrix."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpc._companions.matrices import ADAPTED, Matrix, is_matrix
from fsdpc._engine.writeback import owner_of
from fsdpc.optim._base import Members, Rule, Scaling, check_number, step_counter
from fsdpc.optim._owned import Member, Piece, Route
from fsdpc.optim._places import Group, ParamSpan, local_of, names_of, spans_of_ranks
from fsdpc.optim._spanned import BlockOptimizer, Stretch, part

MOMENTUM = "momentum_buffer"
MOMENTS = ("exp_avg", "exp_avg_sq")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUSTMENTS = (None, "original", "match_rms_adamw")
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")

Split = int | Sequence[int] | tuple[int, int | Sequence[int]]
SplitRule = Mapping[str, Split] | Callable[[str, tuple[int, ...]], Split | None]


class Muon(BlockOptimizer):
    """Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/), with the arguments,
    defaults and results of ``torch.optim.Muon``: 4 bytes of states per element of a float32 matrix.

    Parameters that are no matrices, embeddings and output layers are stepped by AdamW, as
    ``fsdpc.optim.AdamW``, in the same groups: with ``adamw_lr`` (None: ``lr``; a scheduler that
    changes ``lr`` changes both by the same factor), ``adamw_betas``, ``adamw_eps`` and
    ``adamw_weight_decay`` (None: ``weight_decay``). The first of these rules that knows a
    parameter decides:

    1. ``use_muon`` of its group: True takes all its parameters of 2 and 3 dimensions, False none.
       In a group with False, ``lr``, ``betas``, ``eps`` and ``weight_decay`` are AdamW's.
    2. ``matrices(name, shape)``, called for parameters of 2 and more dimensions: True or False, or
       None for the next rules.
    3. Names, as of ``model.named_parameters()`` or of FSDP's units: embeddings (the module's or the
       parameter's own name contains ``embed`` or ``embd``, or is ``wte``, ``wpe`` and the like)
       and output layers (the module is called ``lm_head``, ``head``, ``output``, ``classifier``,
       ``score``, ``decoder``...) go to AdamW, and so do biases, as those of stacked experts.
    4. Two dimensions are a matrix. Three are a matrix for each index of the first one, if a part
       of the name is ``expert`` or ends in ``experts``. Everything else goes to AdamW, with a
       warning for three and more dimensions, which may be matrices under another view.

    Parameters without names are all matrices if all have two dimensions (as in torch); otherwise
    names are needed: ``ValueError``.

    ``split``: parameters that hold several matrices, by the last parts of the name, or by a
    function of name and shape. ``3`` cuts the rows into three equal matrices, ``[d, k, k]`` into
    matrices of so many rows, ``(1, 3)`` and ``(1, [d, k, k])`` the columns; of parameters of three
    dimensions each matrix is cut. ``ns_dtype``: of the iteration, ``torch.bfloat16`` as in torch,
    or ``torch.float32``.

    A step is collective over the ranks that share matrices, and every rank must call ``step`` as
    often as the others. Each matrix is whole at one rank, its owner, for the iteration; elements
    travel once there and once back, in the dtype of the iteration. Owners are dealt by the
    iteration's cost, alike on all ranks. So results of float32 parameters do not depend on the
    number of ranks, and are ``torch.optim.Muon``'s to the bit on processors with equal numbers of
    threads; for narrow ones torch rounds the learning rate on processors, and this class does not.
    A step takes the matrices round by round, so that it needs memory for a few of the largest size,
    or 256 MiB for smaller ones (512 MiB in float32).

    ``NotImplementedError``: ``offload=``, and DTensors that are not cut by rows.
    """

    _state_names = (MOMENTUM, *MOMENTS)
    _routes: list[Route] | None = None
    _local: dict[Tensor, list[Piece]] | None = None  # of parameters that this rank has alone
    _kinds: dict[int, tuple[Matrix, ...]] | None = None  # by the span's id; none: AdamW
    _trained: list[tuple[int, bool]] | None = None
    _warned = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        matrices: Callable[[str, tuple[int, ...]], bool | None] | None = None,
        split: SplitRule | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        offload: Any = None,
    ) -> None:
        if offload is not None:
            raise NotImplementedError(
                "Muon keeps its states beside the parameters: offload= is not supported. AdamW, "
                "AdamW8bit and AdamMini offload theirs"
            )
        if ns_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"ns_dtype must be torch.bfloat16 or torch.float32, got {ns_dtype}")
        self._matrices, self._split, self._dtype = matrices, split, ns_dtype
        self._open(
            params,
            None,
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=tuple(ns_coefficients),
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            use_muon=None,
            adamw_lr=adamw_lr,
            adamw_betas=tuple(adamw_betas),
            adamw_eps=adamw_eps,
            adamw_weight_decay=adamw_weight_decay,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, local. With ``use_muon=False`` the group's ``lr``, ``betas``, ``eps`` and
        ``weight_decay`` are AdamW's. ``ValueError``: options that are out of range.
        """
        group = dict(param_group)
        if group.get("use_muon") is False:
            for name in ("betas", "eps"):
                if name in group:
                    group[f"adamw_{name}"] = group.pop(name)
            group["adamw_lr"] = None if "lr" in group else group.get("adamw_lr")
            if "weight_decay" in group:
                group["adamw_weight_decay"] = None
        full = {**self.defaults, **group}
        _check(full)
        # Kept as a factor, so that schedulers, which write lr, change both.
        factor = 1.0
        if full["adamw_lr"] is not None:
            if float(full["lr"]) == 0:
                raise ValueError("adamw_lr needs an lr that is not 0, or a group of its own")
            factor = full["adamw_lr"] / float(full["lr"])
        group.setdefault("adamw_factor", factor)
        super().add_param_group(group)
        self._routes = self._kinds = self._local = None

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_matrices", "_split", "_dtype")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # of torch's Muon
            group.setdefault("adamw_factor", 1.0)
        self._routes = self._kinds = self._local = None  # they know the groups from before

    # --- which parameters are matrices -----------------------------------------------------------

    def _matrices_of(self, param: Tensor, span: ParamSpan) -> tuple[Matrix, ...]:
        """The matrices of a whole parameter; none: AdamW steps the parameter."""
        if self._kinds is None:
            self._kinds = self._classify()
        return self._kinds[id(span)]

    def _classify(self) -> dict[int, tuple[Matrix, ...]]:
        found: dict[int, tuple[Matrix, ...]] = {}
        skipped: list[str] = []
        for group in self.param_groups:
            given = group.get("param_names")
            every = []
            for number, param in enumerate(group["params"]):
                names = names_of(param, given[number] if given else None)
                if None in names and owner_of(param) is not None:
                    self._need_names(group)
                every += list(zip(self._place(param).every, map(_clean, names), strict=True))
            for span, name in every:
                if self._is_matrix(group, name, span.shape, [s.shape for s, _ in every], skipped):
                    found[id(span)] = self._cut(name, span.shape)
                else:
                    found[id(span)] = ()
        if skipped and not self._warned:
            self._warned = True
            warnings.warn(
                f"Muon: AdamW steps {', '.join(skipped[:3])}"
                + (f" and {len(skipped) - 3} more" if len(skipped) > 3 else "")
                + ", of three or more dimensions: matrices= says which parameters are stacks of "
                "matrices, for example matrices=lambda name, shape: True if 'experts' in name "
                "else None, and False for those that AdamW shall step without this warning",
                stacklevel=2,
            )
        return found

    def _need_names(self, group: dict[str, Any]) -> None:
        if group["use_muon"] is None:
            raise ValueError(
                "Muon: the names of these sharded parameters are known after the first forward: "
                "pass model.named_parameters(), or groups with use_muon=True and use_muon=False"
            )

    def _is_matrix(
        self,
        group: dict[str, Any],
        name: str | None,
        shape: tuple[int, ...],
        beside: Sequence[tuple[int, ...]],
        skipped: list[str],
    ) -> bool:
        if group["use_muon"] is not None or len(shape) < 2:
            return bool(group["use_muon"]) and len(shape) in (2, 3)
        chosen = self._matrices(name or "", shape) if self._matrices is not None else None
        if chosen is not None:
            if chosen and len(shape) not in (2, 3):
                raise ValueError(
                    f"Muon: matrices() takes {name!r} of shape {shape}, which has neither 2 nor 3 "
                    "dimensions: give AdamW that parameter, or the module a parameter of 2"
                )
            return chosen
        if name is None:
            if any(len(other) != 2 for other in beside):
                raise ValueError(
                    f"Muon: a parameter of shape {shape} has no name, which would tell embeddings "
                    "and output layers from other matrices: pass model.named_parameters(), groups "
                    "with use_muon=True and use_muon=False, or matrices="
                )
            return True
        found = is_matrix(name, shape)
        if found is None:
            skipped.append(f"{name} {shape}")
        return bool(found)

    def _cut(self, name: str | None, shape: tuple[int, ...]) -> tuple[Matrix, ...]:
        """The matrices of a parameter, in the order of their elements."""
        stack = shape[0] if len(shape) == 3 else 1
        rows, columns = shape[-2:]
        split = _split_of(self._split, name or "", shape)
        dim, sizes = split if isinstance(split, tuple) and len(split) == 2 else (0, split)
        if dim not in (0, 1):
            raise ValueError(f"Muon: split of {name!r} along dimension {dim} of matrices: 0 or 1")
        widths = _sizes(name, sizes, (rows, columns)[dim])
        heights, widths = (widths, (columns,)) if dim == 0 else ((rows,), widths)
        found, begin = [], 0
        for _ in range(stack):
            for height in heights:
                found.append(Matrix(begin, height, columns, widths))
                begin += height * columns
        return tuple(m for m in found if m.numel)

    def matrix_shapes(self) -> dict[str, list[tuple[int, int]]]:
        """Shapes of the matrices that are orthogonalised, by the parameter's name (a number where
        it has none): what is not here AdamW steps. Local.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for group in self.param_groups:
            given = group.get("param_names")
            for number, param in enumerate(group["params"]):
                spans = self._place(param).every
                names = map(_clean, names_of(param, given[number] if given else None))
                for span, name in zip(spans, names, strict=True):
                    shapes = [(m.rows, w) for m in self._matrices_of(param, span) for w in m.widths]
                    if shapes:
                        found[name or str(len(found))] = shapes
        return found

    # --- states ----------------------------------------------------------------------------------

    def _names_of(self, param: Tensor) -> tuple[str, ...]:
        """The states of a parameter; one that covers matrices and others has all."""
        every = self._place(param).every
        are = {bool(self._matrices_of(param, span)) for span in every}
        return (MOMENTUM,) * (True in are) + MOMENTS * (False in are)

    def _begin_group(self, group: dict[str, Any], found: Members) -> None:
        for param in found.params:
            if param.is_complex():
                raise RuntimeError("Muon does not support complex parameters")
            state, names = self.state[param], self._names_of(param)
            if MOMENTS[0] in names and "step" not in state:
                state["step"] = step_counter(param)
            for name in names:
                if name not in state:
                    state[name] = self._zeros(param, name)

    def _loaded(self, param: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        state, names = super()._loaded(param, saved), self._names_of(param)
        gone = {*self._state_names, "step"} - {*names, *(("step",) if MOMENTS[0] in names else ())}
        return {name: value for name, value in state.items() if name not in gone}

    def span_forms(self, param: Tensor) -> list[dict[str, tuple[torch.dtype, int]]]:
        """See ``BlockOptimizer``. Local."""
        dtype = self._state_dtype(param)
        return [
            {name: (dtype, 1) for name in self._of_span(param, span)}
            for span in self._place(param).every
        ]

    def _of_span(self, param: Tensor, span: ParamSpan) -> tuple[str, ...]:
        return (MOMENTUM,) if self._matrices_of(param, span) else MOMENTS

    def spans_counted(self, param: Tensor) -> list[bool]:
        """See ``BlockOptimizer``. Local."""
        return [not self._matrices_of(param, span) for span in self._place(param).every]

    def _span_values(self, param: Tensor, state: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        for span in self._place(param).spans:
            names = self._of_span(param, span)
            yield {name: part(state[name], span).detach().reshape(-1) for name in names}

    def take_span_states(self, param: Tensor, states: list[dict[str, Any]]) -> None:
        """See ``BlockOptimizer``. Local."""
        steps = [given["step"] for given in states if "step" in given]
        new: dict[str, Any] = {"step": steps[0]} if steps else {}
        new |= {name: self._zeros(param, name) for name in self._names_of(param)}
        for span, given in zip(self._place(param).every, states, strict=True):
            for name in self._of_span(param, span) if given else ():
                part(new[name], span).view(-1).copy_(given[name])
        self.state[param] = new

    # --- a step ----------------------------------------------------------------------------------

    def _communicates(self) -> bool:
        params = (p for group in self.param_groups for p in group["params"])
        return any(
            self._place(p).group.world > 1 and any(self._matrices_of(p, s) for s in s_of)
            for p in params
            for s_of in [self._place(p).every]
        )

    def _plan(self) -> None:
        """Deal the matrices of trained parameters, once."""
        groups = self.param_groups
        trained = [(id(group), p.requires_grad) for group in groups for p in group["params"]]
        if self._routes is not None and trained == self._trained:
            return
        self._trained, self._local = trained, {}
        shared: dict[int, tuple[Group, list[Member]]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                place, ranks = self._place(param), spans_of_ranks(param)
                for span, its in zip(place.every, ranks, strict=True):
                    for matrix in self._matrices_of(param, span):
                        member = Member(param, span, matrix, its, group)
                        if place.group.world == 1:
                            piece = Piece(member, 0, matrix.begin, matrix.numel, 0)
                            self._local.setdefault(param, []).append(piece)
                        elif param.requires_grad:
                            _, members = shared.setdefault(place.group.identity, (place.group, []))
                            members.append(member)
        self._routes = [Route(group, members) for group, members in shared.values()]

    def _before_step(self, members: list[Members], scaling: Scaling) -> None:
        """The step of matrices. Collective over the ranks that share some."""
        self._plan()
        assert self._routes is not None and self._local is not None
        stretches: dict[int, Stretch] = {}
        for found in members:
            for each in self._stretches(found.params, found.values, found.grads):
                if self._matrices_of(each.param, each.span):
                    self._check_trained(each)
                    stretches[id(each.span)] = each

        def fill(piece: Piece, memory: Tensor) -> None:
            stretch = stretches.get(id(piece.member.span))
            if stretch is None:  # without a gradient: the owner's work is for nothing
                memory.zero_()
            else:
                self._momentum(stretch, piece, scaling, memory)

        def move(piece: Piece, update: Tensor) -> None:
            stretch = stretches.get(id(piece.member.span))
            if stretch is not None:
                _move(_piece(stretch.value, piece), update, piece, scaling.control.found_inf)

        for found in members:
            for param in found.params:
                for piece in self._local.get(param, ()):
                    matrix = piece.member.matrix
                    shape = matrix.rows, matrix.columns
                    memory = torch.empty(shape, dtype=self._dtype, device=param.device)
                    fill(piece, memory.view(-1))
                    move(piece, orthogonalised(piece.member, memory).reshape(-1))
        for route in self._routes:
            for piece, update in route.run(self._dtype, fill, orthogonalised):
                move(piece, update)

    def _check_trained(self, stretch: Stretch) -> None:
        if not stretch.param.requires_grad and self._place(stretch.param).group.world > 1:
            raise RuntimeError(
                f"Muon: a parameter of shape {stretch.span.shape} is frozen and has a gradient: "
                "set .grad to None, or requires_grad to True on all ranks"
            )

    def _momentum(self, stretch: Stretch, piece: Piece, scaling: Scaling, memory: Tensor) -> None:
        """Step the momentum of a piece, and write into ``memory`` what is orthogonalised."""
        options = piece.member.options
        grad = _piece(stretch.grad, piece)
        buffer = _piece(part(self.state[stretch.param][MOMENTUM], stretch.span), piece)
        factor, found = options["momentum"], scaling.control.found_inf
        grad = _scaled(grad, scaling).to(buffer.dtype)
        if found is None:
            buffer.lerp_(grad, 1 - factor)
        else:
            buffer.copy_(torch.where(found == 0, buffer.lerp(grad, 1 - factor), buffer))
        memory.copy_(grad.lerp(buffer, factor) if options["nesterov"] else buffer)

    def _step_group(self, group: dict[str, Any], found: Members, scaling: Scaling) -> None:
        rest = [
            each
            for each in self._stretches(found.params, found.values, found.grads)
            if not self._matrices_of(each.param, each.span)
        ]
        if rest:
            self._step_rest(group, rest, scaling)
        stepped = {id(stretch.param) for stretch in rest}
        for param in found.params:  # a flat one, of whose other parameters nothing is here
            if "step" in self.state[param] and id(param) not in stepped:
                gone = scaling.control.found_inf
                self.state[param]["step"].add_(1 if gone is None else (gone == 0).float())

    def _step_rest(self, group: dict[str, Any], rest: list[Stretch], scaling: Scaling) -> None:
        """AdamW."""
        beta1, beta2 = group["adamw_betas"]
        decay = group["adamw_weight_decay"]
        rule = Rule(
            float(group["lr"]) * group["adamw_factor"],
            beta1,
            beta2,
            group["adamw_eps"],
            float(group["weight_decay"] if decay is None else decay),
            scaling.scale,
            scaling.clip,
            True,
            False,
            keeps_grads=scaling.keeps_grads,
        )
        self._run(
            "adam",
            rule,
            scaling.control,
            [stretch.param for stretch in rest],
            [stretch.value for stretch in rest],
            [stretch.grad for stretch in rest],
            tuple([part(self.state[s.param][name], s.span) for s in rest] for name in MOMENTS),
            [self.state[stretch.param]["step"] for stretch in rest],
        )


# --- the rule ------------------------------------------------------------------------------------


def orthogonalised(member: Member, matrix: Tensor) -> Tensor:
    """The matrices that stand side by side in one, each by Newton-Schulz. Overwrites ``matrix``."""
    options, widths = member.options, member.matrix.widths
    if len(widths) == 1:
        return newton_schulz(matrix, **_iteration(options))
    parts = [
        newton_schulz(one.contiguous(), **_iteration(options)) for one in matrix.split(widths, 1)
    ]
    return torch.cat(parts, 1)


def _iteration(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "coefficients": options["ns_coefficients"],
        "steps": options["ns_steps"],
        "eps": options["eps"],
    }


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """``steps`` times ``x = a x + (b (x x^T) + c (x x^T)^2) x``, from ``matrix`` over its norm, or
    over ``eps``: about the orthogonal factor of the polar decomposition. By torch's operators, in
    the order and with the strides of ``torch.optim.Muon``. Overwrites ``matrix``.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjustment(kind: str | None, rows: int, columns: int) -> float:
    """What multiplies the learning rate of a matrix, as in ``torch.optim.Muon``."""
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


def _move(values: Tensor, update: Tensor, piece: Piece, found_inf: Tensor | None) -> None:
    """Decay a piece of a parameter, and add the update. Bits do not depend on where the piece is:
    torch's kernels round sums of narrow types in another way at the end of a tensor.
    """
    group, matrix = piece.member.options, piece.member.matrix
    lr = group["lr"]  # the products of a tensor are float32, as in torch
    new = values if found_inf is None and values.dtype == torch.float32 else values.clone()
    new.mul_(float(1 - lr * group["weight_decay"]))
    wide = new if new.dtype in (torch.float32, torch.float64) else new.float()
    kind = group["adjust_lr_fn"]
    factors = [float(lr * adjustment(kind, matrix.rows, width)) for width in matrix.widths]
    if len(set(factors)) == 1:
        wide.add_(update, alpha=-factors[0])
    else:
        first = piece.begin % matrix.columns
        rows = -(-(first + piece.count) // matrix.columns)
        of_columns = [
            wide.new_full((rows, w), -f) for w, f in zip(matrix.widths, factors, strict=True)
        ]
        alpha = torch.cat(of_columns, 1).view(-1)[first : first + piece.count]
        wide.addcmul_(update.to(wide.dtype), alpha)
    if found_inf is not None:
        wide = torch.where(found_inf == 0, wide.to(values.dtype), values)
    if wide is not values:
        values.copy_(wide)


def _scaled(grad: Tensor, scaling: Scaling) -> Tensor:
    """A gradient divided by the loss scale, and multiplied by the clipping factor."""
    control = scaling.control
    scale = control.grad_scale if control.grad_scale is not None else scaling.scale
    if control.grad_scale is not None or scale != 1.0:
        grad = grad.div_(scale) if scaling.writes_grads else grad / scale
    if control.clip is not None:
        return (grad * control.clip).to(grad.dtype)
    return grad if scaling.clip == 1.0 else grad * scaling.clip


def _piece(value: Tensor, piece: Piece) -> Tensor:
    """A piece of the contiguous memory of a span."""
    return local_of(value).view(-1)[piece.at : piece.at + piece.count]


# --- names and options ---------------------------------------------------------------------------


def _clean(name: str | None) -> str | None:
    """A parameter's name without wrappers' parts."""
    if name is None:
        return None
    return ".".join(each for each in name.split(".") if each not in WRAPPERS)


def _check(options: Mapping[str, Any]) -> None:
    """``ValueError``: an option is out of range."""
    check_number(options["momentum"], "momentum value")
    check_number(options["adamw_eps"], "adamw_eps")
    for number, beta in enumerate(options["adamw_betas"]):
        check_number(beta, f"adamw_betas at index {number}", below=1.0)
    if options["adjust_lr_fn"] not in ADJUSTMENTS:
        raise ValueError(
            f"Adjust learning rate function {options['adjust_lr_fn']} is not supported"
        )
    check_number(options["ns_steps"], "ns_steps", below=100)
    if len(options["ns_coefficients"]) != 3:
        raise ValueError("ns_coefficients must be a tuple of exactly 3 values")


def _split_of(rule: SplitRule | None, name: str, shape: tuple[int, ...]) -> Split:
    """A parameter's split; 1: it is one matrix."""
    if rule is None:
        return 1
    if callable(rule):
        found = rule(name, shape)
        return 1 if found is None else found
    parts = [each for each in name.split(".") if each not in ADAPTED]
    for key, split in rule.items():
        wanted = key.split(".")
        ends = (parts, parts[:-1])  # with or without the parameter's own name
        if any(end[-len(wanted) :] == wanted for end in ends):
            return split
    return 1


def _sizes(name: str | None, sizes: Any, size: int) -> tuple[int, ...]:
    """Sizes of the parts of a dimension. ``ValueError``: they do not fill it."""
    if isinstance(sizes, int):
        if sizes < 1 or size % sizes:
            raise ValueError(f"Muon: split of {name!r} into {sizes} equal parts of {size}")
        return (size // sizes,) * sizes
    found = tuple(int(each) for each in sizes)
    if sum(found) != size or min(found) < 1:
        raise ValueError(f"Muon: split of {name!r} into {found}, whose sum must be {size}")
    return found

"""The choice of the parameters that an optimizer steps as matrices, and the split of parameters
into matrices. AdamW steps all other parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdpc._companions.matrices import ADAPTED, Matrix, is_matrix
from fsdpc._engine.writeback import owner_of
from fsdpc.optim._base import check_number
from fsdpc.optim._owned import Piece
from fsdpc.optim._places import ParamSpan, clean, names_of
from fsdpc.optim._scaling import Members, Scaling
from fsdpc.optim._spanned import Stretch
from fsdpc.optim._whole import WholeOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")

Chooser = Callable[[str, tuple[int, ...]], bool | None]
Split = int | Sequence[int] | tuple[int, int | Sequence[int]]
SplitRule = Mapping[str, Split] | Callable[[str, tuple[int, ...]], Split | None]


class MatrixOptimizer(WholeOptimizer):
    """The base class of optimizers with an update rule for matrices. All other parameters, and
    embeddings and output layers, are stepped by AdamW's rule, and may be in the same groups.

    The first of these tests that gives an answer decides whether a parameter is a matrix:

    1. The group's option ``use_muon`` (``use_soap``, ``use_shampoo``): if True, all parameters of
       the group with 2 or 3 dimensions are matrices; if False, none are.
    2. ``matrices(name, shape)``.
    3. ``fsdpc._companions.matrices.is_matrix``, which looks at the parameter's name.
    """

    _flag = ""  # the name of the option that says whether a group's parameters are matrices
    _of_matrix: tuple[str, ...] = ()  # names of a matrix's states with one value per element
    # The matrices of each span, by the span's id. The tuple is empty if AdamW steps the span.
    _kinds: dict[int, tuple[Matrix, ...]] | None = None
    _warned = False
    _matrices: Chooser | None = None
    _split: SplitRule | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's method does. With ``use_...=False`` the group's ``lr``, ``betas``,
        ``eps`` and ``weight_decay`` are those of AdamW. ``ValueError``: an option is out of range.
        Local.
        """
        group = dict(param_group)
        if group.get(self._flag) is False:
            for name in ("betas", "eps"):
                if name in group:
                    group[f"adamw_{name}"] = group.pop(name)
            group["adamw_lr"] = None if "lr" in group else group.get("adamw_lr")
            if "weight_decay" in group:
                group["adamw_weight_decay"] = None
        full = {**self.defaults, **group}
        self._check_options(full)
        # AdamW's rate is stored as a factor of lr, so that schedulers, which set lr, change both.
        factor = 1.0
        if full["adamw_lr"] is not None:
            if float(full["lr"]) == 0:
                raise ValueError("adamw_lr needs an lr that is not 0, or a group of its own")
            factor = full["adamw_lr"] / float(full["lr"])
        group.setdefault("adamw_factor", factor)
        super().add_param_group(group)
        if group.get(self._flag) and not self.param_groups[-1]["params"]:
            warnings.warn(
                f"{type(self).__name__}: a group with {self._flag}=True has no parameters. Shards "
                "of FullyShardedDataParallel have one dimension: choose matrices by name, or "
                f"pass model.named_parameters() without {self._flag}",
                stacklevel=2,
            )

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if an option is out of range."""
        if options["adamw_eps"] is not None:
            check_number(options["adamw_eps"], "adamw_eps")
        for number, beta in enumerate(options["adamw_betas"] or ()):
            check_number(beta, f"adamw_betas at index {number}", below=1.0)

    def _forget(self) -> None:
        super()._forget()
        self._kinds = None

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_matrices", "_split")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state dict of torch's class lacks this option
            group.setdefault("adamw_factor", 1.0)

    # --- which parameters are matrices -----------------------------------------------------------

    def _matrices_of(self, param: Tensor, span: ParamSpan) -> tuple[Matrix, ...]:
        """Return the matrices of a whole parameter. The tuple is empty if AdamW steps the
        parameter.
        """
        if self._kinds is None or id(span) not in self._kinds:
            self._kinds = self._classify()  # a framework may have replaced parameters and spans
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
                every += list(zip(self._place(param).every, map(clean, names), strict=True))
            for span, name in every:
                if self._is_matrix(group, name, span.shape, [s.shape for s, _ in every], skipped):
                    found[id(span)] = cut(self._split, name, span.shape)
                else:
                    found[id(span)] = ()
        if skipped and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: AdamW steps {', '.join(skipped[:3])}"
                + (f" and {len(skipped) - 3} more" if len(skipped) > 3 else "")
                + ", of three or more dimensions: matrices= says which parameters are stacks of "
                "matrices, for example matrices=lambda name, shape: True if 'experts' in name "
                "else None, and False for those that AdamW shall step without this warning",
                stacklevel=2,
            )
        return found

    def _need_names(self, group: dict[str, Any]) -> None:
        if group[self._flag] is None:
            raise ValueError(
                f"{type(self).__name__}: the names of these sharded parameters are known after "
                "the first forward: pass model.named_parameters(), or groups with "
                f"{self._flag}=True and {self._flag}=False"
            )

    def _is_matrix(
        self,
        group: dict[str, Any],
        name: str | None,
        shape: tuple[int, ...],
        beside: Sequence[tuple[int, ...]],
        skipped: list[str],
    ) -> bool:
        if group[self._flag] is not None or len(shape) < 2:
            return bool(group[self._flag]) and len(shape) in (2, 3)
        chosen = self._matrices(name or "", shape) if self._matrices is not None else None
        if chosen is not None:
            if chosen and len(shape) not in (2, 3):
                raise ValueError(
                    f"{type(self).__name__}: matrices() takes {name!r} of shape {shape}, which has "
                    "neither 2 nor 3 dimensions: give AdamW that parameter, or the module a "
                    "parameter of 2"
                )
            return chosen
        if name is None:
            if any(len(other) != 2 for other in beside):
                raise ValueError(
                    f"{type(self).__name__}: a parameter of shape {shape} has no name, which would "
                    "tell embeddings and output layers from other matrices: pass "
                    f"model.named_parameters(), groups with {self._flag}=True and "
                    f"{self._flag}=False, or matrices="
                )
            return True
        found = is_matrix(name, shape)
        if found is None:
            skipped.append(f"{name} {shape}")
        return bool(found)

    def matrix_shapes(self) -> dict[str, list[tuple[int, int]]]:
        """Return the shapes of the parameters' matrices, by the parameter's name, or by a
        number for a parameter without a name. AdamW steps the parameters that are not in the dict.
        Local.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for group in self.param_groups:
            given = group.get("param_names")
            for number, param in enumerate(group["params"]):
                spans = self._place(param).every
                names = map(clean, names_of(param, given[number] if given else None))
                for span, name in zip(spans, names, strict=True):
                    shapes = [(m.rows, w) for m in self._matrices_of(param, span) for w in m.widths]
                    if shapes:
                        found[name or str(len(found))] = shapes
        return found

    # --- states ----------------------------------------------------------------------------------

    def _lend(self, worker: Any, part: Tensor, *rest: Any) -> None:
        """Let ``worker`` step a slice. AdamW steps all parameters that are cut into slices, so no
        span of the slice has matrices.
        """
        super()._lend(worker, part, *rest)
        if worker._kinds is self._kinds:
            worker._kinds = {}
        worker._kinds.update((id(span), ()) for span in worker._place(part).spans)

    def _of_span(self, param: Tensor, span: ParamSpan) -> tuple[str, ...]:
        return self._of_matrix if self._matrices_of(param, span) else MOMENTS

    def spans_counted(self, param: Tensor) -> list[bool]:
        """See ``BlockOptimizer``. Local."""
        every = self._place(param).every
        return [self.keeps_whole_states or not self._matrices_of(param, span) for span in every]

    # --- a step ----------------------------------------------------------------------------------

    def _step_group(self, group: dict[str, Any], found: Members, scaling: Scaling) -> None:
        rest = [
            each
            for each in self._stretches(found.params, found.values, found.grads)
            if not self._matrices_of(each.param, each.span)
        ]
        if rest:
            self._step_rest(group, rest, scaling)
        self._count(found, {id(stretch.param) for stretch in rest}, scaling)

    def _step_rest(self, group: dict[str, Any], rest: list[Stretch], scaling: Scaling) -> None:
        """Step ``rest``, the spans that are not of matrices, by AdamW's rule."""
        given = {name: group[f"adamw_{name}"] for name in ("betas", "eps", "weight_decay")}
        own = {name: group[name] if of is None else of for name, of in given.items()}
        own["lr"] = float(group["lr"]) * group["adamw_factor"]
        rule = scaling.rule(own, *own["betas"][:2], own["eps"])
        self._run_over("adam", rule, scaling, rest, self._states_of(rest, MOMENTS))


def move(
    values: Tensor, update: Tensor, piece: Piece, factors: Sequence[float], found_inf: Tensor | None
) -> None:
    """Apply weight decay to a piece of a parameter, and add the update times ``-factors``.
    ``factors`` has one factor for each part of the matrix's columns (``Matrix.widths``). Sums are
    computed in at least float32: torch's kernels round 16-bit sums differently at the end of a
    tensor, but the results must not depend on where the piece begins and ends.
    """
    group, matrix = piece.member.options, piece.member.matrix
    lr = group["lr"]  # if lr is a tensor, products are float32, as in torch
    new = values if found_inf is None and values.dtype == torch.float32 else values.clone()
    new.mul_(float(1 - lr * group["weight_decay"]))
    wide = new if new.dtype in (torch.float32, torch.float64) else new.float()
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


def cut(rule: SplitRule | None, name: str | None, shape: tuple[int, ...]) -> tuple[Matrix, ...]:
    """Return the matrices of a parameter, in the order of their elements."""
    stack = shape[0] if len(shape) == 3 else 1
    rows, columns = shape[-2:]
    split = split_of(rule, name or "", shape)
    dim, sizes = split if isinstance(split, tuple) and len(split) == 2 else (0, split)
    if dim not in (0, 1):
        raise ValueError(f"split of {name!r} along dimension {dim} of matrices: 0 or 1")
    widths = sizes_of(name, sizes, (rows, columns)[dim])
    heights, widths = (widths, (columns,)) if dim == 0 else ((rows,), widths)
    found, begin = [], 0
    for _ in range(stack):
        for height in heights:
            found.append(Matrix(begin, height, columns, widths))
            begin += height * columns
    return tuple(m for m in found if m.numel)


def split_of(rule: SplitRule | None, name: str, shape: tuple[int, ...]) -> Split:
    """Return the split of a parameter; 1 stands for a parameter that is one matrix."""
    if rule is None:
        return 1
    if callable(rule):
        found = rule(name, shape)
        return 1 if found is None else found
    parts = [each for each in name.split(".") if each not in ADAPTED]
    for key, split in rule.items():
        wanted = key.split(".")
        ends = (parts, parts[:-1])  # the name with and without its last component
        if any(end[-len(wanted) :] == wanted for end in ends):
            return split
    return 1


def sizes_of(name: str | None, sizes: Any, size: int) -> tuple[int, ...]:
    """Return the sizes of a dimension's parts. ``ValueError``: they do not fill the dimension."""
    if isinstance(sizes, int):
        if sizes < 1 or size % sizes:
            raise ValueError(f"split of {name!r} into {sizes} equal parts of {size}")
        return (size // sizes,) * sizes
    found = tuple(int(each) for each in sizes)
    if sum(found) != size or min(found) < 1:
        raise ValueError(f"split of {name!r} into {found}, whose sum must be {size}")
    return found

"""Optimizers whose rule needs all elements of a parameter, or of a matrix in a parameter.

During a step, one rank has all elements of a matrix; this rank is the owner of the matrix. A
subclass defines the matrices of a parameter (``_matrices_of``), the values that ranks send to the
owner (``_give``), the rule (``_rule``), and what ranks do with the owner's result (``_take``).
States that belong to a matrix as a whole stay at the owner, see ``_held_forms``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fsdpc._companions.state_layout import Extent
from fsdpc.optim._base import step_counter
from fsdpc.optim._chunks import GuardedState, whole_extent
from fsdpc.optim._mapped import MappedOptimizer
from fsdpc.optim._owned import Member, Owned, Piece, Round, Route
from fsdpc.optim._places import Group, ParamSpan, clean, local_of, names_of, spans_of_ranks
from fsdpc.optim._scaling import Members, Scaling
from fsdpc.optim._spanned import Held, Stretch, part

Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class WholeOptimizer(MappedOptimizer):
    """The base class of optimizers whose rule needs whole matrices, see the module's docstring. A
    step is collective over the ranks that share matrices, and every rank must call ``step`` the
    same number of times. All ranks compute the same owners, from the cost of the rule.

    ``state_dict()`` returns the states of all owners on every rank, in the shapes that they have in
    one process, and is collective. ``load_state_dict`` is also collective, and keeps each state
    only at its owner.
    """

    _lanes = 1  # the number of values per element that are sent to the owner
    keeps_whole_states = True  # whether the states of whole matrices stay at owners
    # Whether an owner must have elements of its matrix. If so, ranks send less, but the work of the
    # ranks may differ more.
    _owners_hold = True
    _routes: list[Route] | None = None
    # The rank that keeps the states of each matrix. The key is (parameter, ``Member.number``).
    _owners: dict[tuple[Tensor, int], int] | None = None
    _local: dict[Tensor, list[Piece]] | None = None  # matrices that only this rank has
    _here: dict[Tensor, list[Member]] | None = None  # the matrices that this rank owns
    _trained: list[tuple[int, int, bool]] | None = None
    _counts: dict[Tensor, int] | None = None  # steps of each parameter, read without a GPU sync
    _group_of: dict[Tensor, dict[str, Any]] | None = None

    # --- what a rule says ------------------------------------------------------------------------

    def _work(self, member: Member) -> int:
        """Return the cost of a step of a matrix, up to a constant factor."""
        return member.matrix.work

    def _wire(self, param: Tensor) -> torch.dtype:
        """Return the dtype of the values that ranks and owners send each other."""
        return torch.float64 if param.dtype == torch.float64 else torch.float32

    def _give(self, stretch: Stretch, piece: Piece, scaling: Scaling, lanes: Tensor) -> None:
        """Write to ``lanes`` the values that the owner needs for a piece. ``lanes`` has ``_lanes``
        rows, each with one value per element. By default, the only row is the gradient.
        """
        lanes[0].copy_(scaled(piece_of(stretch.grad, piece), scaling))

    def _rule(
        self, options: Mapping[str, Any], step: int, held: dict[str, Tensor], *lanes: Tensor
    ) -> Tensor:
        """Step a matrix at its owner. Return a tensor of the matrix's shape, whose pieces are
        passed to ``_take``. ``held``: the states of ``_held_forms``, which this method changes or
        replaces; empty in the first step.
        """
        raise NotImplementedError

    def _take(self, stretch: Stretch, piece: Piece, new: Tensor, scaling: Scaling) -> None:
        """Update a piece of a parameter with the owner's result."""
        raise NotImplementedError

    def _held_forms(
        self, options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Forms:
        """Return the dtype and shape of each state that stays at a matrix's owner. ``dtype``: the
        dtype of the parameter.
        """
        return {}

    def _of_span(self, param: Tensor, span: ParamSpan) -> tuple[str, ...]:
        """Return the names of the states with one value per element, which are sharded as the
        parameter is.
        """
        return ()

    # --- states on a disk ------------------------------------------------------------------------

    def _extents(self, group: dict[str, Any], param: Tensor) -> list[Extent]:
        states = [(name, self._state_dtype(param)) for name in self._names_of(param)]
        return [whole_extent(param, states)]

    def _settle(self, param: Tensor) -> None:
        """Copy states that were loaded, or set by the user, into the file."""
        state = self.state.get(param, {})
        names = {*self._names_of(param)}
        for member in self._owned(param):
            for number in range(len(member.matrix.widths)):
                names |= self._forms_of(member, number).keys()
        for name in names & state.keys():
            state[name] = self._in_file(param, name, state[name])

    def _advise(self, pieces: Sequence[Piece], owned: Sequence[Owned], soon: bool) -> None:
        """Advise the operating system to read the states of matrices before a step uses them
        (``soon=True``), or to write these states after the step has used them.
        """
        if self._store is None:
            return
        for member, at, count in ((p.member, p.member.span.at + p.at, p.count) for p in pieces):
            for name in self._of_span(member.param, member.span):
                self._store.advise(member.param, name, soon, at, count)
        for member, _ in owned if self.keeps_whole_states else ():
            for number in range(len(member.matrix.widths)):
                for key in self._forms_of(member, number):
                    self._store.advise(member.param, key, soon)

    # --- matrices and their owners ---------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()  # drop the plans for the old groups
        self._owners = None

    def _forget(self) -> None:
        self._routes = self._local = self._here = self._counts = self._group_of = None

    def _named_spans(self, group: dict[str, Any]) -> Iterator[tuple[Tensor, ParamSpan, str | None]]:
        """Yield, for each whole parameter of a group, the optimizer's parameter that covers it, its
        span, and its name (None if the name is not known).
        """
        given = group.get("param_names")
        for number, param in enumerate(group["params"]):
            names = names_of(param, given[number] if given else None)
            for span, name in zip(self._place(param).every, names, strict=True):
                yield param, span, clean(name)

    def _members_of(self, group: dict[str, Any], param: Tensor) -> list[Member]:
        found: list[Member] = []
        number = 0
        every = self._place(param).every
        for span, ranks in zip(every, spans_of_ranks(param), strict=True):
            for matrix in self._matrices_of(param, span):
                found.append(Member(param, span, matrix, ranks, group, number))
                number += len(matrix.widths)
        return [member._replace(several=number > 1 or len(every) > 1) for member in found]

    def _plan(self) -> None:
        """Assign the matrices to owners, if groups or frozen parameters have changed since the last
        call. Frozen matrices are not exchanged. Freezing does not change the owners of states.
        """
        groups = self.param_groups
        trained = [(id(g), id(p), p.requires_grad) for g in groups for p in g["params"]]
        if self._routes is not None and trained == self._trained:
            return
        self._trained, self._local, self._here = trained, {}, {}
        owners = self._owners = {} if self._owners is None else self._owners
        shared: dict[Any, tuple[Group, list[Member]]] = {}
        for group in groups:
            for param in group["params"]:
                of = self._place(param).group
                for member in self._members_of(group, param):
                    if of.world == 1:
                        piece = Piece(member, 0, member.matrix.begin, member.matrix.numel, 0)
                        self._local.setdefault(param, []).append(piece)
                        self._here.setdefault(param, []).append(member)
                    elif param.requires_grad or self.keeps_whole_states:
                        key = of.identity, self._wire(param), param.device
                        _, members = shared.setdefault(key, (of, []))
                        members.append(member)
        self._routes = [
            Route(
                of,
                members,
                [self._work(m) for m in members],
                self._lanes,
                self._owners_hold,
                kept=[owners.get((m.param, m.number)) for m in members],
            )
            for of, members in shared.values()
        ]
        for route in self._routes:
            for member, owner in zip(route.members, route.owners, strict=True):
                if self.keeps_whole_states:  # later plans must keep the owners of states
                    owners[member.param, member.number] = owner
                if owner == route.group.rank:
                    self._here.setdefault(member.param, []).append(member)

    def _owned(self, param: Tensor) -> list[Member]:
        """Return the matrices of a parameter whose states this rank keeps."""
        self._plan()
        assert self._here is not None
        return self._here.get(param, []) if self.keeps_whole_states else []

    def _communicates(self) -> bool:
        return any(
            self._place(param).group.world > 1 and bool(self._members_of(group, param))
            for group in self.param_groups
            for param in group["params"]
        )

    # --- a step ----------------------------------------------------------------------------------

    def _begin_group(self, group: dict[str, Any], found: Members) -> None:
        for param in found.params:
            if param.is_complex():
                name = type(self).__name__
                raise RuntimeError(f"{name} does not support complex parameters")
            state = self.state[param]
            if any(self.spans_counted(param)) and "step" not in state:
                state["step"] = step_counter(param)
            for name in self._names_of(param):
                if name not in state:
                    state[name] = self._zeros(param, name)
            if self._store is not None:
                self._settle(param)

    def _names_of(self, param: Tensor) -> tuple[str, ...]:
        """Return the names of ``_of_span`` for all whole parameters that this parameter covers."""
        names = (name for span in self._place(param).every for name in self._of_span(param, span))
        return tuple(dict.fromkeys(names))

    def _before_step(self, members: list[Members], scaling: Scaling) -> None:
        """Step the matrices. Collective over the ranks that share matrices."""
        self._plan()
        found_inf = scaling.control.found_inf
        if self.keeps_whole_states and found_inf is not None and bool(found_inf != 0):
            return  # the step is skipped: owners' states must not change
        stretches: dict[int, Stretch] = {}
        for found in members:
            for each in self._stretches(found.params, found.values, found.grads):
                if self._matrices_of(each.param, each.span):
                    self._check_trained(each)
                    stretches[id(each.span)] = each
        due = self._due(members) if self.keeps_whole_states else {}
        try:
            self._step_matrices(members, stretches, due, scaling)
        except BaseException as error:
            if isinstance(self.state, GuardedState):
                self.state.end_in_the_middle(error)
            raise
        if self._counts is not None:
            for found in members:
                for param in found.params:
                    self._counts[param] = self._counts.get(param, 0) + 1

    def _step_matrices(
        self,
        members: list[Members],
        stretches: Mapping[int, Stretch],
        due: Mapping[int, int],
        scaling: Scaling,
    ) -> None:
        assert self._routes is not None and self._local is not None
        measured = self._measured

        def give(piece: Piece, lanes: Tensor) -> None:
            stretch = stretches.get(id(piece.member.span))
            if stretch is None:  # this rank has no gradient, and will ignore the result
                lanes.zero_()
            else:
                self._give(stretch, piece, scaling, lanes)

        def apply(member: Member, lanes: Tensor) -> Tensor:
            step = due.get(id(member.span), 0)
            if self.keeps_whole_states and not step:
                return lanes[0]
            return self._apply(member, lanes, step)

        def take(piece: Piece, new: Tensor) -> None:
            stretch = stretches.get(id(piece.member.span))
            if stretch is not None and measured is None:
                self._take(stretch, piece, new, scaling)
            elif stretch is not None:
                old = piece_of(stretch.value, piece).clone()
                self._take(stretch, piece, new, scaling)
                grad = piece_of(stretch.grad, piece)
                grad = grad * scaling.scale if scaling.writes_grads else grad
                measured.add_matrix(stretch.param, grad, piece_of(stretch.value, piece), old)

        for param in (param for found in members for param in found.params):
            for piece in self._local.get(param, ()):
                matrix, states = piece.member.matrix, ([piece], [Owned(piece.member, [])])
                self._advise(*states, soon=True)
                shape = self._lanes, matrix.rows, matrix.columns
                lanes = torch.empty(shape, dtype=self._wire(param), device=param.device)
                give(piece, lanes.view(self._lanes, -1))
                take(piece, apply(piece.member, lanes).reshape(-1))
                self._advise(*states, soon=False)

        def advise(of: Round, soon: bool) -> None:
            self._advise(of.pieces, of.owned, soon)

        for route in self._routes:
            for piece, new in route.run(self._wire(route.members[0].param), give, apply, advise):
                take(piece, new)

    def _due(self, members: list[Members]) -> dict[int, int]:
        """Return a dict with an entry for each span whose parameter has a gradient: from the id of
        the span to the number of this step (1 in the first step). Collective if an owner has no
        elements of its matrix.
        """
        due = {
            id(span): self._steps_before(param) + 1
            for found in members
            for param in found.params
            for span in self._place(param).every
        }
        for route in self._routes or ():
            due |= route.learn(due, f"gradients in a step of {type(self).__name__}")
        return due

    def _apply(self, member: Member, lanes: Tensor, step: int) -> Tensor:
        """Apply the rule to each of the matrices that are side by side in a member, and return the
        results side by side.
        """
        widths = member.matrix.widths
        if len(widths) == 1:
            shape = self._shape(member, 0)
            return self._step_one(member, 0, step, [lane.view(shape) for lane in lanes])
        columns = zip(*(lane.split(widths, 1) for lane in lanes), strict=True)
        return torch.cat(
            [
                self._step_one(member, number, step, [lane.contiguous() for lane in one])
                for number, one in enumerate(columns)
            ],
            1,
        )

    def _step_one(self, member: Member, number: int, step: int, lanes: list[Tensor]) -> Tensor:
        state = self.state[member.param]
        forms = self._forms_of(member, number)
        held = {name: state[key] for key, (name, *_) in forms.items() if key in state}
        if len(held) < len(forms) and step > 1:
            raise RuntimeError(
                f"{type(self).__name__}: the states of a matrix of shape {tuple(lanes[0].shape)} "
                "are at another rank: a state dict was not loaded on all ranks"
            )
        new = self._rule(member.options, step, held, *lanes)
        for key, (name, *_) in forms.items():
            state[key] = self._in_file(member.param, key, held[name])
        return new

    def _shape(self, member: Member, number: int) -> tuple[int, ...]:
        matrix = member.matrix
        if matrix.numel == member.span.numel and len(matrix.widths) == 1:
            return member.span.shape
        return matrix.rows, matrix.widths[number]

    def _forms_of(
        self, member: Member, number: int
    ) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return a dict of the states of a matrix that its owner keeps: from the key in the
        parameter's state to (name, dtype, shape).
        """
        shape = self._shape(member, number)
        forms = self._held_forms(member.options, shape, member.param.dtype)
        last = f".{member.number + number}" if member.several else ""
        return {f"{name}{last}": (name, *form) for name, form in forms.items()}

    def _steps_before(self, param: Tensor) -> int:
        if self._counts is None:
            self._counts = {}
        if param not in self._counts:
            step = self.state[param].get("step")
            self._counts[param] = 0 if step is None else int(step)
        return self._counts[param]

    def _check_trained(self, stretch: Stretch) -> None:
        if not stretch.param.requires_grad and self._place(stretch.param).group.world > 1:
            raise RuntimeError(
                f"{type(self).__name__}: a parameter of shape {stretch.span.shape} is frozen and "
                "has a gradient: set .grad to None, or requires_grad to True on all ranks"
            )

    def _step_group(self, group: dict[str, Any], found: Members, scaling: Scaling) -> None:
        self._count(found, set(), scaling)

    def _count(self, found: Members, counted: set[int], scaling: Scaling) -> None:
        """Increase the step counters of the parameters whose ids are not in ``counted``."""
        for param in found.params:
            if "step" in self.state[param] and id(param) not in counted:
                gone = scaling.control.found_inf
                self.state[param]["step"].add_(1 if gone is None else (gone == 0).float())

    # --- state dicts -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with the states of all owners on every rank. Collective over
        the ranks that share matrices, if owners keep states.
        """
        self._shown = self._gather_held() if self.keeps_whole_states else {}
        for param in self._shown:
            self.state.setdefault(param, {})
        try:
            return super().state_dict()
        finally:
            del self._shown

    def _expanded(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, **self._shown.get(param, {})}

    def _gather_held(self) -> dict[Tensor, dict[str, Tensor]]:
        """Return the states of all owners, by parameter. Collective over the ranks that share
        matrices.
        """
        params = (param for group in self.param_groups for param in group["params"])
        if all(self._place(param).group.world == 1 for param in params):
            return {}
        self._plan()
        found: dict[Tensor, dict[str, Tensor]] = {}
        what = f"states of {type(self).__name__} from their owners"
        for route in self._routes or ():
            here = np.array(
                [
                    owner == route.group.rank and bool(self._first_held(member))
                    for member, owner in zip(route.members, route.owners, strict=True)
                ],
                dtype=np.float64,
            )
            route.group.all_reduce(here, "max", what)
            for member, owner, any_held in zip(route.members, route.owners, here, strict=True):
                for number in range(len(member.matrix.widths)) if any_held else ():
                    for key, (_, dtype, shape) in self._forms_of(member, number).items():
                        value = self.state.get(member.param, {}).get(key)
                        if owner != route.group.rank or value is None:
                            value = torch.empty(shape, dtype=dtype, device=member.param.device)
                        value = value.contiguous()
                        route.group.broadcast(value, owner, what)
                        found.setdefault(member.param, {})[key] = value
        return found

    def _first_held(self, member: Member) -> bool:
        state = self.state.get(member.param, {})
        return any(key in state for key in self._forms_of(member, 0))

    def _loaded(self, param: Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        state = super()._loaded(param, saved)
        kept = {*self._names_of(param)}
        kept |= {"step"} if any(self.spans_counted(param)) else set()
        own = {name: value for name, value in state.items() if name in kept or self._is_other(name)}
        for member in self._all_of(param):
            for number in range(len(member.matrix.widths)):
                for key, (_, dtype, _) in self._forms_of(member, number).items():
                    if isinstance(saved.get(key), Tensor):
                        value = local_of(saved[key].detach())
                        own[key] = value.to(param.device, dtype, copy=True).contiguous()
        return own

    def _is_other(self, name: str) -> bool:
        """Return whether ``name`` is a state that this class's rule does not make."""
        return name not in (*self._state_names, "step")

    def _all_of(self, param: Tensor) -> list[Member]:
        """Return all matrices of a parameter if owners keep states, else an empty list."""
        if not self.keeps_whole_states:
            return []
        if self._group_of is None or param not in self._group_of:
            self._group_of = {p: group for group in self.param_groups for p in group["params"]}
        return self._members_of(self._group_of[param], param)

    def _after_load(self) -> None:
        """Keep the states of each matrix only at its owner. If each rank has loaded only its piece
        of a state, the owner gets all pieces. (This is possible for states of the parameter's
        shape.) Collective over the ranks that share matrices.
        """
        self._counts = None
        if self.keeps_whole_states:
            self._leave_at_owners()
        for param in self.state if self._store is not None else ():
            self._settle(param)

    def _leave_at_owners(self) -> None:
        self._plan()
        for route in self._routes or ():
            self._gather_pieces(route)
            for member, owner in zip(route.members, route.owners, strict=True):
                for number in range(len(member.matrix.widths)):
                    for key in self._forms_of(member, number):
                        if owner != route.group.rank:
                            self.state.get(member.param, {}).pop(key, None)

    def _gather_pieces(self, route: Route) -> None:
        whole: dict[str, list[Member]] = {}
        for member in route.members:
            for key, (_, _, shape) in self._forms_of(member, 0).items():
                if shape == member.span.shape and not member.several:
                    whole.setdefault(key, []).append(member)
        for key, members in sorted(whole.items()):
            dtype = self._forms_of(members[0], 0)[key][1]
            owner_of = dict(zip(map(id, route.members), route.owners, strict=True))
            owners = [owner_of[id(member)] for member in members]
            its = Route(route.group, members, [1] * len(members), 1, owners=owners)

            def give(piece: Piece, lanes: Tensor, key: str = key) -> None:
                value = self.state.get(piece.member.param, {}).get(key)
                lanes.zero_()
                if value is not None:
                    first = piece.begin if value.numel() == piece.member.span.numel else piece.at
                    lanes[0].copy_(value.view(-1)[first : first + piece.count])

            def keep(member: Member, lanes: Tensor, key: str = key) -> Tensor:
                state = self.state.get(member.param, {})
                if key in state:
                    state[key] = lanes[0].reshape(member.span.shape).clone()
                return lanes[0]

            for _ in its.run(dtype, give, keep):
                pass

    # --- checkpoints -----------------------------------------------------------------------------

    def span_forms(self, param: Tensor) -> list[dict[str, Any]]:
        """See ``BlockOptimizer``. The form of a state that an owner keeps is ``(dtype, shape)``.
        Local.
        """
        dtype = self._state_dtype(param)
        held: dict[int, Any] = {}
        for member in self._all_of(param):
            its = held.setdefault(id(member.span), {})
            its.update({key: form for key, _, form in self._span_keys(member)})
        return [
            {name: (dtype, 1) for name in self._of_span(param, span)} | held.get(id(span), {})
            for span in self._place(param).every
        ]

    def _span_keys(self, member: Member) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        """Yield (key in a checkpoint, key in the parameter's state, (dtype, shape)) for each state
        of a matrix that its owner keeps. If the whole parameter has several matrices, the key in a
        checkpoint contains the matrix's number.
        """
        beside = self._matrices_of(member.param, member.span)
        before = sum(len(m.widths) for m in beside if m.begin < member.matrix.begin)
        several = sum(len(m.widths) for m in beside) > 1
        for number in range(len(member.matrix.widths)):
            for key, (name, *form) in self._forms_of(member, number).items():
                yield f"{name}.{before + number}" if several else name, key, tuple(form)

    def span_owned(self, param: Tensor) -> list[set[str]]:
        """See ``BlockOptimizer``. Local."""
        found: dict[int, set[str]] = {}
        for member in self._owned(param):
            found.setdefault(id(member.span), set()).update(k for k, *_ in self._span_keys(member))
        return [found.get(id(span), set()) for span in self._place(param).every]

    def span_states(self, param: Tensor) -> list[dict[str, Any]]:
        """See ``BlockOptimizer``. Local."""
        found = super().span_states(param)
        every = {id(s): i for i, s in enumerate(self._place(param).every)}
        state = self.state.get(param, {})
        here = {member.number for member in self._owned(param)}
        for member in self._all_of(param) if state else ():
            if not member.span.count and member.number not in here:
                continue
            for key, own, (dtype, shape) in self._span_keys(member):
                value = state.get(own) if member.number in here else None
                found[every[id(member.span)]][key] = Held(value, dtype, shape)
        return found

    def _span_values(self, param: Tensor, state: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
        for span in self._place(param).spans:
            names = self._of_span(param, span)
            yield {name: part(state[name], span).detach().reshape(-1) for name in names}

    def take_span_states(self, param: Tensor, states: list[dict[str, Any]]) -> None:
        """See ``BlockOptimizer``. Local."""
        steps = [given["step"] for given in states if "step" in given]
        new: dict[str, Any] = {"step": steps[0]} if steps else {}
        new |= {name: self._zeros(param, name) for name in self._names_of(param)}
        given_of = {}
        for span, given in zip(self._place(param).every, states, strict=True):
            given_of[id(span)] = given
            for name in self._of_span(param, span) if given and span.count else ():
                part(new[name], span).view(-1).copy_(given[name])
        for member in self._owned(param):
            for key, own, (_, shape) in self._span_keys(member):
                if key in given_of[id(member.span)]:
                    value = given_of[id(member.span)][key].view(shape)
                    new[own] = self._in_file(param, own, value)
        self.state[param] = new
        self._counts = None


def scaled(grad: Tensor, scaling: Scaling) -> Tensor:
    """Return a gradient divided by the loss scale and multiplied by the clipping factor."""
    control = scaling.control
    scale = control.grad_scale if control.grad_scale is not None else scaling.scale
    if control.grad_scale is not None or scale != 1.0:
        grad = grad.div_(scale) if scaling.writes_grads else grad / scale
    if control.clip is not None:
        return (grad * control.clip).to(grad.dtype)
    return grad if scaling.clip == 1.0 else grad * scaling.clip


def piece_of(value: Tensor, piece: Piece) -> Tensor:
    """Return the elements of ``piece``. ``value``: the contiguous memory of the piece's span."""
    return local_of(value).view(-1)[piece.at : piece.at + piece.count]

"""The exchange between ranks and owners of matrices in a step. An owner is the rank that gets all
elements of a matrix.

A step exchanges the matrices in rounds. In a round, a rank's pieces of the round's matrices lie in
one buffer, ordered by owner. The matrices that a rank owns lie in a second buffer, as pieces
ordered by the rank that sends them. One exchange fills the second buffers from the first buffers of
all ranks, and another exchange returns the results. A step thus sends each element once to its
owner and once back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fsdpc._companions.matrices import ROUND, Matrix, deal, rounds_of
from fsdpc._spans.span import Span
from fsdpc.optim._places import Group, ParamSpan, local_of


class Member(NamedTuple):
    """A matrix of an optimizer's parameter, and the places of its elements on all ranks."""

    param: Tensor
    span: ParamSpan  # this rank's span of the whole parameter that contains the matrix
    matrix: Matrix
    ranks: Sequence[Span]  # every rank's span of that whole parameter
    options: dict[str, Any]  # the options of the parameter's group
    number: int = 0  # the number of ``Matrix.widths`` of earlier matrices of ``param``
    several: bool = False  # whether ``param`` has several widths or several whole parameters

    def piece(self, rank: int) -> tuple[int, int]:
        """Return the index in the matrix at which a rank's piece begins, and the piece's size."""
        begin, _, count = self.ranks[rank]
        first = max(begin, self.matrix.begin)
        last = min(begin + count, self.matrix.begin + self.matrix.numel)
        return first - self.matrix.begin, max(last - first, 0)


class Piece(NamedTuple):
    """This rank's part of a matrix. It has the elements [at, at + count) of the rank's span, and
    begins at index ``begin`` of the matrix.
    """

    member: Member
    begin: int
    at: int
    count: int
    place: int  # where the piece begins in the buffer of pieces


class Owned(NamedTuple):
    """A matrix that this rank owns. ``parts`` has, for every rank that has a piece of the matrix,
    the piece's position in the buffer of owned matrices, its first index in the matrix, and its
    number of elements.
    """

    member: Member
    parts: list[tuple[int, int, int]]


class Round(NamedTuple):
    """One round of the exchange. ``sent``, ``received``: for each rank, the number of elements that
    this rank sends to it and receives from it.
    """

    pieces: list[Piece]
    owned: list[Owned]
    sent: list[int]
    received: list[int]


class Route:
    """The exchange among the ranks of one group. In each round, an owner gets about ``ROUND``
    elements, and all owners have about equal work. ``work``: the work of each member; ``lanes``:
    how many values per element are sent to the owner (one value comes back); ``holders``: whether
    only ranks that have elements of a matrix may own the matrix; ``owners``: the owner of each
    member, by default chosen here; ``kept``: for each member, the owner that must not change, or
    None. Frozen parameters have owners, but are exchanged only if ``owners`` is given.
    """

    def __init__(
        self,
        group: Group,
        members: Sequence[Member],
        work: Sequence[int],
        lanes: int = 1,
        holders: bool = False,
        owners: Sequence[int] | None = None,
        kept: Sequence[int | None] | None = None,
    ) -> None:
        self.group, self.members, self.lanes = group, members, lanes
        self.device = local_of(members[0].param).device
        world = group.world
        given = owners is not None
        if owners is None:
            owners = owners_of(members, work, world, holders, kept)
        self.owners = owners
        # Matrices of which the owner has no elements. Such an owner has no gradient of the whole
        # parameter, even if other ranks have a gradient.
        self.away = [
            member
            for member, owner in zip(members, owners, strict=True)
            if group.comm is not None and not member.piece(owner)[1]
        ]
        rounds = rounds_of(work, [m.matrix.numel for m in members], owners, world, ROUND)
        self.rounds: list[Round] = []
        for number in range(max(rounds, default=-1) + 1):
            of: list[list[Member]] = [[] for _ in range(world)]
            for member, owner, its in zip(members, owners, rounds, strict=True):
                if its == number and (given or member.param.requires_grad):
                    of[owner].append(member)
            self.rounds.append(_round(of, group.rank))

    def learn(self, steps: Mapping[int, int], what: str) -> dict[int, int]:
        """Return, for the matrices in ``away``, the maximum of ``steps`` over the ranks. The keys
        are the ids of spans. Maxima of 0 are left out. Collective if ``away`` is not empty.
        """
        numbers = np.array([steps.get(id(m.span), 0) for m in self.away], dtype=np.float64)
        self.group.all_reduce(numbers, "max", what)
        return {id(m.span): int(n) for m, n in zip(self.away, numbers, strict=True) if n}

    def run(
        self,
        dtype: torch.dtype,
        fill: Callable[[Piece, Tensor], None],
        apply: Callable[[Member, Tensor], Tensor],
        advise: Callable[[Round, bool], None] = lambda *_: None,
    ) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each of this rank's pieces, with that part of the result of ``apply`` that belongs
        to the piece. The memory of this part may be overwritten when the next piece is requested.
        ``fill(piece, lanes)`` writes a piece, one row for each lane. ``apply(member, lanes)`` gets
        a matrix for each lane and returns one matrix. ``advise(round, soon)`` is called before a
        round's states are used (``soon=True``), and afterwards (``soon=False``). Collective.
        """
        if not self.rounds:
            return
        advise(self.rounds[0], True)
        begun = self._begin(0, dtype, fill)
        for number, (pieces, owned, sent, received) in enumerate(self.rounds):
            out, whole, end = begun
            end()
            if number + 1 < len(self.rounds):  # send the next round while this round is computed
                advise(self.rounds[number + 1], True)
                begun = self._begin(number + 1, dtype, fill)
            given = whole if self.lanes == 1 else whole.new_empty(sum(received))
            for member, parts in owned:
                shape = self.lanes, member.matrix.rows, member.matrix.columns
                matrix = torch.empty(shape, dtype=dtype, device=self.device)
                rows = matrix.view(self.lanes, -1)
                for place, begin, count in parts:
                    rows[:, begin : begin + count].copy_(self._lanes_at(whole, place, count))
                new = apply(member, matrix).reshape(-1)
                for place, begin, count in parts:
                    given[place : place + count].copy_(new[begin : begin + count])
            back = out[: sum(sent)]  # overwrites pieces that have been sent
            self.group.exchange(back, given, sent, received, "matrices from their owners")()
            for piece in pieces:
                yield piece, back[piece.place : piece.place + piece.count]
            advise(self.rounds[number], False)

    def _lanes_at(self, memory: Tensor, place: int, count: int) -> Tensor:
        """Return the part of a buffer that has ``count`` elements from element ``place`` on, as a
        tensor with one row for each lane.
        """
        at = place * self.lanes
        return memory[at : at + count * self.lanes].view(self.lanes, count)

    def _begin(
        self, number: int, dtype: torch.dtype, fill: Callable[[Piece, Tensor], None]
    ) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Start to send a round's pieces to their owners. Return the buffer of pieces, the buffer
        of owned matrices, and a function that waits until the exchange has ended.
        """
        pieces, _, sent, received = self.rounds[number]
        lanes = self.lanes
        out = torch.empty(lanes * sum(sent), dtype=dtype, device=self.device)
        whole = torch.empty(lanes * sum(received), dtype=dtype, device=self.device)
        for piece in pieces:
            fill(piece, self._lanes_at(out, piece.place, piece.count))
        counts = [lanes * count for count in received], [lanes * count for count in sent]
        return out, whole, self.group.exchange(whole, out, *counts, "matrices to their owners")


def owners_of(
    members: Sequence[Member],
    work: Sequence[int],
    world: int,
    holders: bool,
    kept: Sequence[int | None] | None = None,
) -> list[int]:
    """Return the owner of each matrix; see ``deal``. Matrices of the same whole parameter share one
    list of spans, which is converted to an array only once.
    """
    ranks = {id(member.ranks): member.ranks for member in members}
    spans = {key: np.array(its) for key, its in ranks.items()}

    def held(i: int) -> np.ndarray:
        matrix, of = members[i].matrix, spans[id(members[i].ranks)]
        first = np.maximum(of[:, 0], matrix.begin)
        last = np.minimum(of[:, 0] + of[:, 2], matrix.begin + matrix.numel)
        return np.maximum(last - first, 0)

    return deal(work, held, world, holders, kept)


def _round(of: Sequence[Sequence[Member]], rank: int) -> Round:
    """Return what ``rank`` sends and owns in a round. ``of`` has the round's matrices by owner."""
    world = len(of)
    found = Round([], [Owned(member, []) for member in of[rank]], [0] * world, [0] * world)
    place = 0
    for owner, members in enumerate(of):
        for member in members:
            begin, count = member.piece(rank)
            if count:
                at = member.matrix.begin + begin - member.span.begin
                found.pieces.append(Piece(member, begin, at, count, place))
                found.sent[owner] += count
                place += count
    place = 0
    for other in range(world):
        for member, parts in found.owned:
            begin, count = member.piece(other)
            if count:
                parts.append((place, begin, count))
                found.received[other] += count
                place += count
    return found

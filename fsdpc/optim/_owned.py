"""Matrices that are whole at their owners: what ranks send each other in a step.

A rank's pieces of a round's matrices lie in one buffer, by owner; an owner's matrices lie in
another, by the rank that has the piece. One exchange fills the second from the first, and one the
first from the second, so a step sends each element once to its owner and once back.
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
    """A matrix of an optimizer's parameter, and where all ranks have it."""

    param: Tensor
    span: ParamSpan  # this rank's, of the whole parameter with the matrix
    matrix: Matrix
    ranks: Sequence[Span]  # every rank's span of that whole parameter
    options: dict[str, Any]  # of the parameter's group
    number: int = 0  # of its first width, among all widths of ``param``
    several: bool = False  # whether ``param`` has more matrices than this

    def piece(self, rank: int) -> tuple[int, int]:
        """Where a rank's part begins in the matrix, and how many elements it has."""
        begin, _, count = self.ranks[rank]
        first = max(begin, self.matrix.begin)
        last = min(begin + count, self.matrix.begin + self.matrix.numel)
        return first - self.matrix.begin, max(last - first, 0)


class Piece(NamedTuple):
    """This rank's part of a matrix: elements ``at`` to ``at + count`` of the rank's span, from
    ``begin`` on in the matrix.
    """

    member: Member
    begin: int
    at: int
    count: int
    place: int  # where it begins in the buffer of pieces


class Owned(NamedTuple):
    """A matrix that this rank owns. ``parts``: (place in the buffer, index in the matrix, count) of
    every rank that has a part.
    """

    member: Member
    parts: list[tuple[int, int, int]]


class Round(NamedTuple):
    """What ranks exchange at one time. ``sent``, ``received``: numbers of elements, by rank."""

    pieces: list[Piece]
    owned: list[Owned]
    sent: list[int]
    received: list[int]


class Route:
    """The exchange among the ranks of one group, in rounds of about ``ROUND`` elements of each
    owner, and of about as much work at each. ``work``: each member's; ``lanes``: values per element
    on the way to the owner (one comes back); ``holders``: only ranks that have elements of a matrix
    may own the matrix; ``kept``: each member's owner, if this must stay. Frozen parameters have
    owners, and are exchanged only where ``owners`` are given.
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
        # A rank without elements of an original parameter has no gradient of it, even if others do.
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
        """The ranks' largest values of ``steps``, by the span's id, for matrices of which the owner
        has no elements. Collective if there are such matrices.
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
        """Each of this rank's pieces with what ``apply`` made of it, in memory that a later piece
        may take. ``fill(piece, lanes)`` writes a piece, one row for each lane; ``apply(member,
        lanes)`` returns a matrix from one for each lane; ``advise(round, soon)`` is called before a
        round's states are used (``soon``), and afterwards. Collective.
        """
        if not self.rounds:
            return
        advise(self.rounds[0], True)
        begun = self._begin(0, dtype, fill)
        for number, (pieces, owned, sent, received) in enumerate(self.rounds):
            out, whole, end = begun
            end()
            if number + 1 < len(self.rounds):  # goes while this round is computed
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
            back = out[: sum(sent)]  # over elements that have arrived
            self.group.exchange(back, given, sent, received, "matrices from their owners")()
            for piece in pieces:
                yield piece, back[piece.place : piece.place + piece.count]
            advise(self.rounds[number], False)

    def _lanes_at(self, memory: Tensor, place: int, count: int) -> Tensor:
        """The lanes of ``count`` elements, one lane after the other."""
        at = place * self.lanes
        return memory[at : at + count * self.lanes].view(self.lanes, count)

    def _begin(
        self, number: int, dtype: torch.dtype, fill: Callable[[Piece, Tensor], None]
    ) -> tuple[Tensor, Tensor, Callable[[], None]]:
        """Send a round's pieces to owners; returns pieces, owned memory, what ends the exchange."""
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
    """The owner of each matrix, see ``deal``. Matrices of one stack share the same spans."""
    ranks = {id(member.ranks): member.ranks for member in members}
    spans = {key: np.array(its) for key, its in ranks.items()}

    def held(i: int) -> np.ndarray:
        matrix, of = members[i].matrix, spans[id(members[i].ranks)]
        first = np.maximum(of[:, 0], matrix.begin)
        last = np.minimum(of[:, 0] + of[:, 2], matrix.begin + matrix.numel)
        return np.maximum(last - first, 0)

    return deal(work, held, world, holders, kept)


def _round(of: Sequence[Sequence[Member]], rank: int) -> Round:
    """What ``rank`` does in a round of these matrices, by owner."""
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

"""The rules by which a rank detects that no other rank can end its wait ([Note: stuck] in
csrc/shm/shm_stuck.c), run through all orders of the ranks' steps in a small model.

Each rank waits for the flag of one other rank, then sets its own and ends; a rank that is stuck
uses its fallback, which sets its flag here as well. Each read and each write of a shared word is
one step, and a sleep may also end for no reason.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

NONE, LEAVE, OLDER, PRIVATE = range(4)
READ_BELL, READ_COUNT, EXAMINE, CHECK, PUBLISH, CHECK_AGAIN, SLEEP = range(7)
CHANGE, COUNT_CHANGE, RING, WITHDRAW, DEPART, END = range(10, 16)


class Rank(NamedTuple):
    at: int = READ_BELL
    bell: int = 0
    count: int = 0
    read: int = 0  # words of others read so far in a check
    better: bool = False  # one of them had a better way out
    rung: int = -1
    concluded: int = -1  # the count of changes at which it found itself stuck


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    words: tuple[tuple[int, int] | None, ...]  # (count, way) of ranks that wait
    flags: tuple[bool, ...]
    count: int = 0
    bell: int = 0


@dataclass(frozen=True)
class Model:
    needs: tuple[int, ...]
    ways: tuple[int, ...]
    fault: str = ""  # a rule that is left out

    def start(self) -> State:
        n = len(self.needs)
        return State((Rank(),) * n, (None,) * n, (False,) * n)

    def ready(self, state: State, i: int) -> bool:
        return self.needs[i] == i or state.flags[self.needs[i]]

    def step(self, state: State, i: int) -> State | None:
        me = state.ranks[i]
        if me.at == READ_BELL:
            return self.put(state, i, at=READ_COUNT, bell=state.bell)
        if me.at == READ_COUNT:
            return self.put(state, i, at=EXAMINE, count=state.count)
        if me.at == EXAMINE:
            found = self.ready(state, i)
            return self.put(state, i, at=CHANGE if found else CHECK, read=0, better=False)
        if me.at in (CHECK, CHECK_AGAIN):
            return self.check(state, i)
        if me.at == PUBLISH:
            words = list(state.words)
            words[i] = (me.count, self.ways[i])
            return self.put(state, i, words=words, at=CHECK_AGAIN, read=0, better=False)
        if me.at == SLEEP:
            return self.put(state, i, at=READ_BELL)
        if me.at == CHANGE:
            flags = list(state.flags)
            flags[i] = True
            return self.put(state, i, flags=flags, at=COUNT_CHANGE)
        if me.at == COUNT_CHANGE:
            moved = state.count + (self.fault != "count stays")
            return self.put(state._replace(count=moved), i, at=RING)
        if me.at == RING:
            return self.put(state._replace(bell=state.bell + 1), i, at=WITHDRAW)
        if me.at == WITHDRAW:
            words = list(state.words)
            words[i] = None
            return self.put(state, i, words=words, at=DEPART)
        if me.at == DEPART:  # wakes all, as fsdpc_shm_leave
            return self.put(state._replace(bell=state.bell + 1), i, at=END)
        return None

    def check(self, state: State, i: int) -> State:
        """Reads one more word; after the last one, the count."""
        me = state.ranks[i]
        others = [r for r in range(len(self.needs)) if r != i]
        refused = PUBLISH if me.at == CHECK else SLEEP
        if me.read < len(others):
            other = others[me.read]
            word = state.words[other]
            stands = word is not None and (word[0] == me.count or self.fault == "any count")
            if state.ranks[other].at >= DEPART:
                stands, word = True, (me.count, NONE)
            if not stands:
                return self.put(state, i, at=refused)
            better = me.better or (word[1] > self.ways[i] and self.fault != "no order")
            return self.put(state, i, read=me.read + 1, better=better)
        acts = not me.better and self.ways[i] != NONE
        if state.count != me.count and self.fault != "any count":
            return self.put(state, i, at=refused)
        if me.at == CHECK:
            if not acts:
                return self.put(state, i, at=PUBLISH)
            self.judge(state, i)
            return self.put(state, i, at=CHANGE, concluded=me.count)
        if acts:
            return self.put(state, i, at=READ_BELL)
        if me.rung == me.count or self.fault == "no bell":
            return self.put(state, i, at=SLEEP)
        return self.put(state._replace(bell=state.bell + 1), i, at=SLEEP, rung=me.count)

    def put(self, state: State, i: int, *, words=None, flags=None, **changes) -> State:
        ranks = state.ranks
        return State(
            (*ranks[:i], ranks[i]._replace(**changes), *ranks[i + 1 :]),
            tuple(words) if words else state.words,
            tuple(flags) if flags else state.flags,
            state.count,
            state.bell,
        )

    def judge(self, state: State, i: int) -> None:
        """Rank i has found itself stuck: is it?"""
        count = state.ranks[i].count
        alike = [r for r, rank in enumerate(state.ranks) if r != i and rank.concluded == count]
        for r in alike:
            assert self.ways[r] == self.ways[i], "two ways out at one count"
        for r, rank in enumerate(state.ranks):
            if r != i and rank.at < DEPART and not alike:
                assert rank.at < CHANGE, "another rank is changing something"
                assert not self.ready(state, r), "another rank can go on"

    def run(self) -> int:
        """All states that can be reached; raises where one is wrong."""
        first = self.start()
        seen, todo = {first}, deque([first])
        while todo:
            state = todo.popleft()
            self.check_sleepers(state)
            for i in range(len(self.needs)):
                after = self.step(state, i)
                if after is not None and after not in seen:
                    seen.add(after)
                    todo.append(after)
        return len(seen)

    def check_sleepers(self, state: State) -> None:
        """When all sleep, no rank can go on."""
        for rank in state.ranks:
            if rank.at != END and (rank.at != SLEEP or rank.bell != state.bell):
                return
        live = [i for i, rank in enumerate(state.ranks) if rank.at != END]
        if live:
            assert not any(self.ready(state, i) for i in live), "a change has woken no rank"
            assert all(self.ways[i] == NONE for i in live), "a rank with a way out sleeps"


def every_pair():
    for needs in itertools.product(range(2), repeat=2):
        for ways in itertools.product(range(4), repeat=2):
            yield Model(needs, ways)


def test_two_ranks() -> None:
    for model in every_pair():
        assert model.run() > 10


THREE = [
    ((1, 2, 2), (LEAVE, NONE, PRIVATE)),
    ((1, 2, 1), (OLDER, LEAVE, NONE)),
]


@pytest.mark.long
@pytest.mark.parametrize(("needs", "ways"), THREE)
def test_three_ranks(needs: tuple[int, ...], ways: tuple[int, ...]) -> None:
    assert Model(needs, ways).run() > 1000


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("any count", "another rank"),
        ("count stays", "another rank"),
        ("no order", "two ways out"),
        ("no bell", "sleeps"),
    ],
)
def test_each_rule_is_needed(fault: str, message: str) -> None:
    found = ""
    for model in [*every_pair(), Model(*THREE[0])]:
        try:
            replace(model, fault=fault).run()
        except AssertionError as error:
            found += str(error)
    assert message in found


# --- the flag of sleepers (ring and fsdpc_shm_stand) ---------------------------------------------


class Bell(NamedTuple):
    """A bell, its flag, ringers and sleepers: (step, number read)."""

    bell: int
    asleep: bool
    ringers: tuple[int, ...]  # rings left, times 4, minus the steps done of the present one
    sleepers: tuple[tuple[str, int], ...]


def ring_on(state: Bell, i: int, fault: str) -> Bell:
    """One step of a ringer: increment, take the flag, increment again, wake."""
    left = state.ringers[i]
    ringers = (*state.ringers[:i], left - 1, *state.ringers[i + 1 :])
    step = -left % 4
    if step == 0:
        return state._replace(bell=state.bell + 1, ringers=ringers)
    if step == 1 and not state.asleep:
        ringers = (*state.ringers[:i], left - 3, *state.ringers[i + 1 :])
        return state._replace(ringers=ringers)
    if step == 1:
        return state._replace(asleep=False, ringers=ringers)
    if step == 2:
        return state._replace(bell=state.bell + (fault != "one increment"), ringers=ringers)
    woken = tuple(("read", b) if at == "queued" else (at, b) for at, b in state.sleepers)
    return state._replace(sleepers=woken, ringers=ringers)


def sleep_on(state: Bell, i: int) -> Bell:
    """One step of a sleeper: read the bell, set the flag, sleep if the bell has not rung."""
    at, bell = state.sleepers[i]
    after, asleep = {
        "read": (("flag", state.bell), state.asleep),
        "flag": (("wait", bell), True),
        "wait": (("queued" if bell == state.bell else "read", bell), state.asleep),
    }[at]
    return state._replace(
        asleep=asleep, sleepers=(*state.sleepers[:i], after, *state.sleepers[i + 1 :])
    )


def lost_wakes(rings: tuple[int, ...], sleepers: int, fault: str = "") -> int:
    """States in which nobody rings any more and a rank sleeps through a ring, of all orders."""
    first = Bell(0, False, tuple(4 * n for n in rings), (("read", 0),) * sleepers)
    seen, todo, lost = {first}, deque([first]), 0
    while todo:
        state = todo.popleft()
        if not any(state.ringers):
            lost += any(at == "queued" and b != state.bell for at, b in state.sleepers)
        steps = [ring_on(state, i, fault) for i, left in enumerate(state.ringers) if left]
        steps += [sleep_on(state, i) for i, s in enumerate(state.sleepers) if s[0] != "queued"]
        for after in steps:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return lost


@pytest.mark.parametrize("rings", [(1,), (3,), (1, 1), (2, 1)])
@pytest.mark.parametrize("sleepers", [1, 2])
def test_no_rank_sleeps_through_a_ring(rings: tuple[int, ...], sleepers: int) -> None:
    assert lost_wakes(rings, sleepers) == 0


def test_the_second_increment_is_needed() -> None:
    assert lost_wakes((2,), 1, "one increment") > 0

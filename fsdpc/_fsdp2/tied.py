"""Weights that are tied after ``fully_shard``. Before the first forward, a loader that ties weights
last may put one Parameter into modules of several units. The outermost unit then takes all
registration sites of the Parameter.
"""

from __future__ import annotations

from typing import Any

from fsdpc._engine import writeback as _writeback


def join(states: list[Any]) -> None:
    """Give each Parameter that is in the modules of several units to the unit whose modules contain
    all of these modules. Collective over the mesh if there are such Parameters. Other Parameters do
    not change.
    """
    found = _first(states)
    while found is not None:
        _leave_to(*found)  # indices in units change, so search again
        found = _first(states)


def _first(states: list[Any]) -> tuple[Any, list[tuple[Any, int]]] | None:
    for places in _shown(states).values():
        units = dict.fromkeys(state for state, _ in places)
        outer = (state for state in units if len(units) > 1 and _contains(state, places))
        for state in outer:
            return state, places
    return None


def _shown(states: list[Any]) -> dict[int, list[tuple[Any, int]]]:
    """Return a dict from the id of each Parameter in the modules to the Parameter's pairs (state,
    index in the state's unit).
    """
    found: dict[int, list[tuple[Any, int]]] = {}
    for state in states:
        for number, info in enumerate(state._unit.infos if state._unit is not None else ()):
            shown = info.sites[0][0]._parameters.get(info.sites[0][1])
            if shown is not None:
                found.setdefault(id(shown), []).append((state, number))
    return found


def _contains(state: Any, places: list[tuple[Any, int]]) -> bool:
    below = {child for module in state.modules for child in module.modules()}
    sites = (site for other, number in places for site in other._unit.infos[number].sites)
    return all(module in below for module, _ in sites)


def _leave_to(outer: Any, places: list[tuple[Any, int]]) -> None:
    own = next(number for state, number in places if state is outer)
    module, name = outer._unit.infos[own].sites[0]
    _writeback.disown(module._parameters[name])
    _writeback.adopt_objects(outer._unit)
    sites = list(outer._unit.infos[own].sites)
    for state, number in places:
        if state is not outer:
            sites += state._unit.infos[number].sites
            _writeback.adopt_objects(state._unit, but=number)
            state.remake(without=number)
    outer.remake(sites={own: sites})

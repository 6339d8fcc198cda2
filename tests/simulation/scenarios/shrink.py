"""From a failing scenario to the smallest one that still fails, and its transcript.

Deterministic: each candidate is the scenario with one thing less, in a fixed
order, and is kept if it still fails; until nothing can go. A candidate fails as
well if it fails in another way: the smaller one is looked at first.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace

from peers.rounds.protocol import Protocol
from tests.simulation.scenarios.faults import Faults
from tests.simulation.scenarios.schedule import (
    Change,
    Cut,
    Fault,
    Scenario,
    Stop,
    play_in,
    world_of,
)

MOST_TRIALS = 400


def failure(scenario: Scenario, machine: type[Protocol] = Protocol) -> str:
    """What goes wrong in a scenario, with the transcript's end; empty when nothing does."""
    world = world_of(scenario, machine, record=True)
    try:
        play_in(world, scenario)
    except AssertionError as error:
        return f"{world.text()}\n{world.now:9.3f} VIOLATION: {error}"
    return ""


def fails(scenario: Scenario, machine: type[Protocol] = Protocol) -> bool:
    """Whether anything goes wrong in a scenario."""
    try:
        play_in(world_of(scenario, machine), scenario)
    except AssertionError:
        return True
    return False


def shrunken(scenario: Scenario, machine: type[Protocol] = Protocol) -> Scenario:
    """The smallest scenario found that still fails."""
    trials = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(scenario):
            trials += 1
            if trials > MOST_TRIALS:
                return scenario
            if fails(candidate, machine):
                scenario, smaller = candidate, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Every scenario with one thing less, the largest steps first."""
    if scenario.sites - 2 >= 3 and _survives(scenario, scenario.sites - 2):
        yield _with_sites(scenario, scenario.sites - 2)
    if scenario.schedule:
        half = len(scenario.schedule) // 2
        if half:
            yield replace(scenario, schedule=scenario.schedule[half:])
            yield replace(scenario, schedule=scenario.schedule[:half])
        for position in range(len(scenario.schedule)):
            rest = scenario.schedule[:position] + scenario.schedule[position + 1 :]
            yield replace(scenario, schedule=rest)
    if scenario.rounds > 1:
        yield replace(scenario, rounds=scenario.rounds // 2)
        yield replace(scenario, rounds=scenario.rounds - 1)
    if scenario.down_for_good:
        yield replace(scenario, down_for_good=scenario.down_for_good[1:])
    if scenario.way != "ckks":
        yield replace(scenario, way="ckks")
    if scenario.liar and scenario.sites > 3:  # three sites are not live with one
        yield replace(scenario, liar="")
    if scenario.skewed:
        yield replace(scenario, skewed=False)
    quiet = Faults()
    for name in ("drop", "duplicate", "delay_s", "cut", "fail", "scarce"):
        if getattr(scenario.noise, name) != getattr(quiet, name):
            calmer = replace(scenario.noise, **{name: getattr(quiet, name)})
            yield replace(scenario, noise=calmer)
    if scenario.peace > 1.0:
        yield replace(scenario, peace=scenario.peace / 2)


def _survives(scenario: Scenario, sites: int) -> bool:
    """Whether the liar, if there is one, is among so many sites."""
    return not scenario.liar or (scenario.liar in string.ascii_lowercase[:sites] and sites > 3)


def _with_sites(scenario: Scenario, sites: int) -> Scenario:
    """The same with fewer sites; what happened to the others does not happen."""
    names = set(string.ascii_lowercase[:sites])
    schedule: list[Fault] = []
    for fault in scenario.schedule:
        if isinstance(fault, Cut):
            links = tuple(link for link in fault.links if names.issuperset(link))
            schedule += [replace(fault, links=links)] if links else []
        elif isinstance(fault, Stop):
            schedule += [fault] if names.issuperset((fault.site, fault.starter)) else []
        elif isinstance(fault, Change) or fault.site in names:
            schedule.append(fault)
    down = tuple(name for name in scenario.down_for_good if name in names)
    return replace(
        scenario,
        sites=sites,
        min_participants=min(scenario.min_participants, max(2, sites // 2)),
        schedule=tuple(schedule),
        way="ckks" if scenario.way == "norm" else scenario.way,
        down_for_good=down[: sites - max(sites // 2 + 1, 2)],
    )

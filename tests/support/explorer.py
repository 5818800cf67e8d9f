"""Runs all interleavings of a few processes over a world that can be saved and loaded.

A process is a generator that yields what it does next, as the name of a method of the world and its
arguments, and is sent what came of it. So what a process is about to do follows from what it was
sent before, and a state is that of the world and what each process was sent. States are visited
breadth first, each once: the first schedule that fails is a shortest one.
"""

from __future__ import annotations

import gc
import hashlib
import marshal
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Step = tuple[Any, ...]
Steps = Generator[Step, Any, None]
Program = Callable[[], Steps]

#: In place of what a process was sent: it has ended, or was killed.
OVER = ("over",)


class Disabled(Exception):
    """This step cannot be made now; another process has to do something first."""


class Again(Exception):
    """This step has done a part, and is made again when its process is next chosen."""


class Violation(Exception):
    """What must not happen."""


class World(Protocol):
    """What processes act on."""

    def save(self) -> Hashable:
        """Return all of its state, made of tuples, numbers, texts and bytes."""
        ...

    def load(self, state: Any) -> None:
        """Be as it was when this state was saved."""
        ...

    def check(self) -> None:
        """Look at what must hold in every state; may change the world, which is loaded again.

        :raises Violation: it does not hold
        """
        ...

    def check_end(self) -> None:
        """The same, where nothing can be done any more."""
        ...

    def act(self, process: str, step: Step) -> Any:
        """Make a step; what is returned is sent to the process.

        :raises Disabled: it cannot be made
        :raises Again: it has to be made once more
        :raises Violation: it shows what must not be
        """
        ...

    def dead(self, process: str) -> bool:
        """Whether the process was killed."""
        ...


@dataclass
class Explored:
    """What was explored.

    :param states: different ones
    :param steps: from one state to another or the same
    :param schedules: ways from the beginning to where nothing can be done any more
    :param depth: steps of the longest of them
    :param failure: what was violated, and ``schedule``, the steps that lead there, if anything
    """

    states: int = 0
    steps: int = 0
    schedules: int = 0
    depth: int = 0
    failure: str = ""
    schedule: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = f"{self.states} states, {self.steps} steps, {self.schedules} schedules"
        if not self.failure:
            return f"{found} of up to {self.depth} steps: nothing is wrong"
        lines = [f"{number:3} {line}" for number, line in enumerate(self.schedule, 1)]
        return "\n".join([f"{self.failure}, after {len(lines)} steps ({found}):", *lines])


class _Programs:
    """What each process does next."""

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._programs = programs
        self._known: dict[tuple[str, tuple[Any, ...]], Step | None] = {}

    def next(self, process: str, sent: tuple[Any, ...]) -> Step | None:
        """The next step of a process that was sent this; ``None`` at its end."""
        key = (process, sent)
        if key not in self._known:
            steps = self._programs[process]()
            try:
                step = next(steps)
                for value in sent:
                    step = steps.send(value)
                self._known[key] = step
            except StopIteration:
                self._known[key] = None
        return self._known[key]


def explore(world: World, programs: Mapping[str, Program], *, limit: int = 0) -> Explored:
    """Run all interleavings of the processes ``programs`` from the state the world is in.

    :param limit: states after which it is given up; 0: none
    :raises AssertionError: there were more
    """
    # There are hundreds of thousands of states and no cycles.
    gc.disable()
    try:
        return _explore(world, programs, limit)
    finally:
        gc.enable()


def _explore(world: World, programs: Mapping[str, Program], limit: int) -> Explored:
    next_step = _Programs(programs).next
    names = tuple(programs)
    found = Explored()
    first = (world.save(), ((),) * len(names))
    # How each state was reached first: the one before, and the step. The same state is always
    # reached by as many steps, since these are part of it.
    origins: dict[bytes, tuple[bytes, int, str]] = {_digest(first): (b"", 0, "")}
    level = {_digest(first): (first, 1)}

    def fail(violation: Violation, origin: bytes, line: str) -> Explored:
        lines = [line] if line else []
        while origins[origin][0]:
            origin, _, line = origins[origin]
            lines.append(line)
        found.failure, found.schedule = str(violation), tuple(reversed(lines))
        found.states = len(origins)
        return found

    while level:
        following: dict[bytes, tuple[tuple[Any, ...], int]] = {}
        for origin, ((state, sent), ways) in level.items():
            moved = False
            for index, name in enumerate(names):
                if sent[index] is OVER:
                    continue
                step = next_step(name, sent[index])
                if step is None:
                    continue
                world.load(state)
                line = f"{name}: {' '.join(map(str, step))}"
                try:
                    value = world.act(name, step)
                    line += f" -> {value}" if value is not None else ""
                    mine = (*sent[index], value)
                except Disabled:
                    continue
                except Again:
                    line += " (waits)"
                    mine = sent[index]
                except Violation as violation:
                    return fail(violation, origin, line)
                moved = True
                found.steps += 1
                histories = tuple(
                    _shown(world, next_step, x, mine if x == name else sent[place])
                    for place, x in enumerate(names)
                )
                reached = (world.save(), histories)
                digest = _digest((found.depth, reached))
                if digest in following:
                    known, count = following[digest]
                    following[digest] = (known, count + ways)
                    continue
                origins[digest] = (origin, index, line)
                following[digest] = (reached, ways)
                assert not limit or len(origins) <= limit, f"more than {limit} states"
                try:
                    world.check()
                except Violation as violation:
                    return fail(violation, digest, "")
            if not moved:
                found.schedules += ways
                world.load(state)
                try:
                    world.check_end()
                except Violation as violation:
                    return fail(violation, origin, "")
        level = following
        found.depth += bool(level)
    found.states = len(origins)
    return found


def _shown(
    world: World,
    next_step: Callable[[str, tuple[Any, ...]], Step | None],
    process: str,
    sent: tuple[Any, ...],
) -> tuple[Any, ...]:
    """What a process was sent, as far as it matters."""
    if sent is OVER or world.dead(process) or next_step(process, sent) is None:
        return OVER
    return sent


def _digest(state: object) -> bytes:
    # Version 2 writes equal states alike, whatever they share.
    return hashlib.blake2b(marshal.dumps(state, 2), digest_size=16).digest()

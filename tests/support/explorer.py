"""Runs all interleavings of a few processes over a world that can be saved and loaded.

A process is a generator that yields what it does next, as the name of a method of the world and its
arguments, and is sent what came of it. So what a process is about to do follows from what it was
sent before, and a state is that of the world and what each process was sent. States are visited
breadth first, each once: the first schedule that fails is a shortest one. What comes of a step
follows from the world as it was saved, and from the step.
"""

from __future__ import annotations

import gc
import hashlib
import marshal
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Step = tuple[Any, ...]
Steps = Generator[Step, Any, None]
Program = Callable[[], Steps]

# States of the world, of some kilobytes, beyond which what came of steps from them is forgotten.
_PLACES_KEPT = 50_000

#: In place of what a process was sent: it has ended, or was killed.
OVER = -1


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
    """What each process does next.

    What a process was sent goes by a number, so that states are compared fast.
    """

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self._programs = programs
        self._sent: list[tuple[Any, ...]] = [()]
        self._numbers: dict[tuple[int, Any], int] = {}
        self._known: dict[tuple[str, int], Step | None] = {}

    def send(self, sent: int, value: Any) -> int:
        """Return the number of what was sent, and then this value."""
        found = self._numbers.get((sent, value))
        if found is None:
            found = self._numbers[sent, value] = len(self._sent)
            self._sent.append((*self._sent[sent], value))
        return found

    def next(self, process: str, sent: int) -> Step | None:
        """The next step of a process that was sent this; ``None`` at its end."""
        key = (process, sent)
        if key not in self._known:
            steps = self._programs[process]()
            try:
                step = next(steps)
                for value in self._sent[sent]:
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


class _Place(NamedTuple):
    """A state of the world, and who is dead in it."""

    key: bytes
    state: Any
    dead: frozenset[str]


class _Move(NamedTuple):
    """What came of a step: what is sent to the process, unless it waits, and the world after it."""

    value: Any
    waits: bool
    place: _Place


class _Moves:
    """What comes of steps, and what is violated.

    Many states differ only in what processes were sent, which the world knows nothing of: a step
    is made once in each state of the world, and each that is reached is looked at once.
    """

    def __init__(self, world: World, names: tuple[str, ...]) -> None:
        self._world = world
        self._names = names
        self._known: dict[tuple[bytes, str, Step], _Move | Violation | None] = {}
        self._places: dict[bytes, _Place] = {}
        self._looked_at: dict[bytes, Violation | None] = {}
        self._ended: dict[bytes, Violation | None] = {}

    def forget(self) -> None:
        """Begin anew, if too much is known to be kept in memory."""
        if len(self._places) > _PLACES_KEPT:
            for known in (self._known, self._places, self._looked_at, self._ended):
                known.clear()

    def place(self) -> _Place:
        """Where the world is."""
        state = self._world.save()
        key = _digest(state)
        if key not in self._places:
            dead = frozenset(filter(self._world.dead, self._names))
            self._places[key] = _Place(key, state, dead)
        return self._places[key]

    def make(self, place: _Place, name: str, step: Step) -> _Move | Violation | None:
        """What comes of a step; ``None`` if it cannot be made."""
        which = (place.key, name, step)
        if which not in self._known:
            self._known[which] = self._make(place, name, step)
        return self._known[which]

    def _make(self, place: _Place, name: str, step: Step) -> _Move | Violation | None:
        self._world.load(place.state)
        try:
            value, waits = self._world.act(name, step), False
        except Disabled:
            return None
        except Again:
            value, waits = None, True
        except Violation as violation:
            return violation
        return _Move(value, waits, self.place())

    def look(self, place: _Place) -> Violation | None:
        """What is violated in a state."""
        return self._look(place, self._looked_at, self._world.check)

    def look_at_end(self, place: _Place) -> Violation | None:
        """The same, where nothing can be done any more."""
        return self._look(place, self._ended, self._world.check_end)

    def _look(
        self, place: _Place, known: dict[bytes, Violation | None], check: Callable[[], None]
    ) -> Violation | None:
        if place.key not in known:
            self._world.load(place.state)
            known[place.key] = None
            try:
                check()
            except Violation as violation:
                known[place.key] = violation
        return known[place.key]


class _Reached(NamedTuple):
    """How a state was reached first: from which one, and by what."""

    origin: int
    name: str
    step: Step
    value: Any = None
    waits: bool = False

    def __str__(self) -> str:
        line = f"{self.name}: {' '.join(map(str, self.step))}"
        if self.waits:
            return f"{line} (waits)"
        return line if self.value is None else f"{line} -> {self.value}"


class _State(NamedTuple):
    """A state: where the world is, what each process was sent, how it was reached, how often."""

    place: _Place
    sent: tuple[int, ...]
    number: int
    ways: int


def _explore(world: World, programs: Mapping[str, Program], limit: int) -> Explored:
    known = _Programs(programs)
    names = tuple(programs)
    found = Explored()
    moves = _Moves(world, names)
    # The same state is always reached by as many steps, since these are part of it.
    reached = [_Reached(-1, "", ())]
    level = [_State(moves.place(), (0,) * len(names), 0, 1)]

    def fail(violation: Violation, number: int, last: _Reached | None = None) -> Explored:
        lines = [] if last is None else [str(last)]
        while number:
            lines.append(str(reached[number]))
            number = reached[number].origin
        found.failure, found.schedule = str(violation), tuple(reversed(lines))
        found.states = len(reached)
        return found

    while level:
        moves.forget()
        following: dict[tuple[bytes, tuple[int, ...]], _State] = {}
        for place, sent, number, ways in level:
            moved = False
            for index, name in enumerate(names):
                if sent[index] == OVER:
                    continue
                step = known.next(name, sent[index])
                if step is None:
                    continue
                move = moves.make(place, name, step)
                if move is None:
                    continue
                if isinstance(move, Violation):
                    return fail(move, number, _Reached(number, name, step))
                moved = True
                found.steps += 1
                mine = sent[index]
                if not move.waits:
                    mine = known.send(mine, move.value)
                    if known.next(name, mine) is None:
                        mine = OVER
                after = (*sent[:index], mine, *sent[index + 1 :])
                if dead := move.place.dead:
                    after = tuple(
                        OVER if x in dead else y for x, y in zip(names, after, strict=True)
                    )
                key = (move.place.key, after)
                before = following.get(key)
                if before is not None:
                    following[key] = before._replace(ways=before.ways + ways)
                    continue
                following[key] = _State(move.place, after, len(reached), ways)
                reached.append(_Reached(number, name, step, move.value, move.waits))
                assert not limit or len(reached) <= limit, f"more than {limit} states"
                violation = moves.look(move.place)
                if violation is not None:
                    return fail(violation, len(reached) - 1)
            if not moved:
                found.schedules += ways
                violation = moves.look_at_end(place)
                if violation is not None:
                    return fail(violation, number)
        level = list(following.values())
        found.depth += bool(level)
    found.states = len(reached)
    return found


def _digest(state: object) -> bytes:
    # Version 2 writes equal states alike, whatever they share.
    return hashlib.blake2b(marshal.dumps(state, 2), digest_size=16).digest()

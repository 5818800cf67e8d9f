"""An experiment: what was published, how it is repeated here, and the result it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from keyfront.errors import ServerError

from .. import results
from ..lineups.keystone import Keystone
from ..servers.mariadb import MariaDB, mariadb
from . import findings, isolation
from .findings import CHANGES, COMPARISON, WORDS, Change, Finding

#: Versions that every result tells.
DISTRIBUTIONS = ("keystone", "oslo.messaging", "mod_wsgi", "uWSGI", "pyuwsgi", "ldappool")
PROGRAMS = ("nginx", "apache2", "mariadbd", "wrk", "ab", "siege")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run of experiments.

    :param quick: the form for tests: fewer and shorter points, fewer processes
    :param seconds: the seconds of each point; ``None`` for each experiment's own
    :param sqlite: Keystone's database is SQLite instead of MariaDB
    :param command: the words that were typed, for the result
    """

    quick: bool = False
    seconds: int | None = None
    sqlite: bool = False
    command: tuple[str, ...] = ()


class World:
    """The surroundings of one run: a folder, and a Keystone made when first asked for.

    :param folder: a folder of this user only; the caller deletes it
    :param say: takes a line of progress
    :ivar database: the server that the Keystone is on once it is made; ``None`` for SQLite
    """

    def __init__(self, folder: Path, options: Options, say: Callable[[str], None]) -> None:
        self.options = options
        self.say = say
        self._folder = folder
        self._count = 0
        self._stack = ExitStack()
        self.database: MariaDB | None = None

    @contextmanager
    def open(self) -> Iterator[World]:
        """End what is shared with the block."""
        with self._stack:
            yield self

    def folder(self) -> Path:
        """Return a new, empty folder; its path is short, for sockets are in it."""
        self._count += 1
        made = self._folder / str(self._count)
        # a server that has dropped root passes through
        made.mkdir(mode=0o711)
        return made

    def seconds(self, quick: int, full: int) -> int:
        """Return the seconds of a point, unless told otherwise."""
        return self.options.seconds or (quick if self.options.quick else full)

    @cached_property
    def keystone(self) -> Keystone:
        """The Keystone that is shared."""
        base = "SQLite" if self.options.sqlite else "MariaDB"
        self.say(f"a Keystone is made, on {base}")
        database = None
        if not self.options.sqlite:
            self.database = self._stack.enter_context(mariadb(self.folder()))
            database = self.database.fresh_database("keystone")
        # lists come from Keystone, as in what is repeated
        made = Keystone(self.folder() / "state", database=database, routes=())
        made.make()
        return made


class Conclusions(NamedTuple):
    """The conclusions from an experiment's samples.

    :param notes: the differences from what was published, a line each
    """

    findings: list[Finding]
    changes: list[Change]
    notes: list[str]


@dataclass(frozen=True)
class Experiment:
    """One of the five.

    :param source: the author of the publication, where and when it was made
    :param run: measures; adds samples, tables, timelines and conditions to the record
    """

    name: str
    title: str
    source: str
    run: Callable[[World, results.Record], Conclusions]

    def result(self, world: World) -> results.Result:
        """Run it."""
        options = world.options
        with results.Record(
            "experiment",
            self.name,
            title=self.title,
            command=options.command or None,
            conditions={"quick": options.quick, "own_namespace": isolation.inside()},
            distributions=DISTRIBUTIONS,
            programs=PROGRAMS,
        ) as record:
            found = self.run(world, record)
        if not record.samples:
            raise ServerError(f"{self.name}: nothing was measured")
        record.tables.insert(0, findings.comparison(found.findings, f"Published: {self.source}"))
        if found.changes:
            quiet = bool(record.result().others["quiet"])
            factor = findings.chance(quick=options.quick, quiet=quiet)
            told = [replace(one, chance=factor) for one in found.changes]
            record.tables[1:1] = [findings.changes(told, factor), findings.in_words(told)]
            record.conditions["chance"] = factor
        record.notes += found.notes
        if not isolation.inside():
            record.notes.append(
                "Namespaces are not permitted here: the kernel's settings are the machine's, and "
                "its counters of connections count those of others, too."
            )
        if options.quick:
            record.notes.append(
                "This is the quick form: its points are few and short, so its figures are rough."
            )
        return record.result()


def as_text(tables: Iterable[results.Table], notes: Iterable[str]) -> str:
    """Return tables and notes for a terminal."""
    lines: list[str] = []
    caption = ""
    for table in tables:
        if table.name == WORDS:
            lines += ["", "what keyfront changes:"]
            lines += [_item(str(row[-1])) for row in table.rows] + [results.folded(caption)]
        elif table.name == CHANGES:
            caption = table.caption
        elif table.name == COMPARISON:
            lines += ["published and measured:", results.folded(table.caption)]
            for what, published, measured, verdict in table.rows:
                lines.append(_item(f"{what}: {verdict}. Published: {published}. Here: {measured}."))
        else:
            lines += ["", f"{table.name}:", results.plain(table)]
    lines += ["", "What differs, and what to know:", *map(_item, notes)]
    return "\n".join(lines) + "\n"


def _item(text: str) -> str:
    return results.folded(f"- {text}")

"""The rows that a SELECT may depend on, named by the tags of ``rules.py``.

``SELECT … FROM user LEFT OUTER JOIN local_user ON user.id = local_user.user_id WHERE user.id = ?``
shows rows of one user only, whatever is written of others: its tag is ``user:ID``. A statement
that does not say whose rows it shows has the tag of the table's family, which every write to the
table changes.

``… WHERE local_user.name = ? AND local_user.domain_id = ?`` shows rows of one user as well, but
does not say whose. The database is asked that first, in a statement of its own: then the tags are
``user:ID``, if there is such a user, and ``name:NAME``, for a user who gets this name later. So it
is with the groups of a user, whose ids are in the rows of his memberships.

The statement is read as the database gets it, so that nothing of SQLAlchemy's inside is needed.
Only what is understood counts: names of columns that equal one another or a parameter, joined by
``AND``. Everything else in a condition can only leave rows out. A statement of another shape (a
union, a subquery within a condition) has the tags of the families of all tables whose names are in
it. ``tests/unit/tokens/test_sql_reads.py`` checks with a database that no write changes
the result of a statement without changing one of its tags.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import rules

#: The table of revocations: its rows are of no one owner.
REVOCATIONS = "revocation_event"


#: A function that returns the values of a column in the rows of a table in which other columns each
#: have one of some values: at most one more than :data:`~.rules.LIMIT`.
Find = Callable[[str, str, Mapping[str, Sequence[object]]], Sequence[object]]


class Reads(NamedTuple):
    """The reads of a statement, in tags."""

    #: The tags of the families of all its tables: a write to one of these tables changes one.
    families: frozenset[str]
    #: The tags of the rows: a write that changes the statement's result changes one.
    tags: frozenset[str]
    #: Names of what must be followed as well for changes to be noticed, see
    #: ``directory_leases.py``.
    followed: frozenset[str] = frozenset()


def reads(statement: str, parameters: object, find: Find | None = None) -> Reads:
    """Return the tags that an execution of a SELECT may depend on, besides ``all``.

    Tables of no family have no tag: every answer depends on their writes.

    :param statement: the statement's text as the driver gets it
    :param parameters: the parameters as the driver gets them: a sequence or a mapping
    :param find: a function that asks the same database, before the statement is executed; without
        it, rows whose owner is found by other rows have the tag of their family
    """
    found = _analyse(statement)
    tags = set(found.whole)
    owners: dict[_Search, Sequence[object]] = {}
    for family, kinds, search in found.reached:
        try:
            if search not in owners:
                names = search.names(parameters)
                owners[search] = search.owners(parameters, find)
                tags |= names
            tags.update(rules.tag(kind, one) for kind in kinds for one in owners[search])  # type: ignore[arg-type]
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            tags.add(family)
    for family, kinds, places in found.owned:
        try:
            values = [parameters[place] for place in places]  # type: ignore[index]
            tags.update(rules.tag(kind, value) for kind in kinds for value in values)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            # What is no text, or is equal to what the database alone knows.
            tags.add(family)
    return Reads(found.families, frozenset(tags))


# Where a parameter is: its index or its name.
_Place = int | str


class _Search(NamedTuple):
    """A search for the owners of a statement's rows, by the parameters of the statement."""

    table: str
    column: str
    #: The columns of the table that equal parameters, and the places of these parameters.
    pins: tuple[tuple[str, tuple[_Place, ...]], ...]
    #: The places of those parameters that are names.
    named: tuple[_Place, ...]

    def owners(self, parameters: Any, find: Find | None) -> Sequence[object]:
        """Return the owners' identifiers.

        :raises ValueError: there are more than :data:`.rules.LIMIT`, or no function to ask
        """
        if find is None:
            raise ValueError("nobody to ask")
        values = {column: [parameters[x] for x in places] for column, places in self.pins}
        found = [one for one in find(self.table, self.column, values) if one is not None]
        if len(found) > rules.LIMIT:
            raise ValueError("too many rows")
        return found

    def names(self, parameters: Any) -> set[str]:
        """Return the tags of the names."""
        found = {rules.name_tag(parameters[place]) for place in self.named}
        return found | {rules.NAMES} if found else found


class _Analysis(NamedTuple):
    families: frozenset[str]
    #: The families of tables of which any row may be read, and grants to groups.
    whole: frozenset[str]
    #: For each other table its family, the kinds of its tags, and the places of the identifiers.
    owned: tuple[tuple[str, tuple[str, ...], tuple[_Place, ...]], ...]
    #: For each table whose owners have to be found first, the same with the search for them.
    reached: tuple[tuple[str, tuple[str, ...], _Search], ...] = ()


@functools.lru_cache(maxsize=4096)
def _analyse(statement: str) -> _Analysis:
    try:
        scope = _Select(_Tokens(statement)).parse()
    except _UnknownShapeError:
        named = families_in(statement)
        return _Analysis(named, named, ())
    families: set[str] = set()
    whole: set[str] = set()
    owned = []
    reached = []
    for alias, table in scope.tables.items():
        if table == REVOCATIONS:
            families.add(rules.ANY)
            whole.add(rules.ANY)
        family = rules.FAMILY.get(table)
        if family is None:
            continue
        families.add(family)
        kinds, column = _owner(scope, alias, table)
        if column is None:
            whole.add(family)
            continue
        if places := scope.places(column):
            owned.append((family, kinds, places))
        elif search := _search(scope, column):
            reached.append((family, kinds, search))
        else:
            whole.add(family)
            continue
        if table in rules.GRANTED:
            whole.add(rules.GRANTS_GROUP)
    return _Analysis(frozenset(families), frozenset(whole), tuple(owned), tuple(reached))


def _owner(scope: _Scope, alias: str, table: str) -> tuple[tuple[str, ...], _Column | None]:
    """Return the kinds of tags of a table's rows, and the column of their identifiers."""
    kinds, column = rules.OWNER.get(table, ((), ""))
    if not kinds:
        return kinds, None
    if table not in rules.RESOLVE:
        return kinds, (alias, column)
    # By the other table, whose row each of these belongs to.
    own, other, number, wanted = rules.RESOLVE[table]
    for source in scope.equal_to((alias, own)):
        if source[1] == number and scope.tables.get(source[0]) == other:
            return kinds, (source[0], wanted)
    return kinds, None


def _search(scope: _Scope, column: _Column) -> _Search | None:
    """Return the search that finds the values of a column in the rows that count, if there is one.

    It is in a table whose rows each have a tag of their own, which covers its result.
    """
    for alias, name in (column, *scope.equal_to(column)):
        table = scope.tables.get(alias, "")
        owner = rules.OWNER.get(table, ((), ""))[1]
        if table not in rules.RESOLVE and (places := scope.places((alias, owner))):
            return _Search(table, name, ((owner, places),), ())
        search = rules.NAMED.get(table)
        if search is None:
            continue
        pins = tuple((one, scope.places((alias, one))) for one in search.columns)
        if all(places for _, places in pins):
            return _Search(table, name, pins, scope.places((alias, search.name)))
    return None


_WORD = re.compile(r"\w+")


@functools.lru_cache(maxsize=4096)
def families_in(statement: str) -> frozenset[str]:
    """Return the families of all tables whose names are in a statement's text."""
    words = set(_WORD.findall(statement))
    found = {family for table, family in rules.FAMILY.items() if table in words}
    return frozenset(found | ({rules.ANY} if REVOCATIONS in words else set()))


class _UnknownShapeError(Exception):
    """A statement of a shape that is not understood."""


# A column: the name by which its table is known in the statement, and its own.
_Column = tuple[str, str]


class _Scope:
    """The tables of a SELECT, and its conditions on their rows."""

    def __init__(self) -> None:
        #: Tables by the names they are known by.
        self.tables: dict[str, str] = {}
        #: By column, the parameters of which it equals one.
        self.pinned: dict[_Column, tuple[_Place, ...]] = {}
        # By column, the columns that it equals wherever its row counts.
        self._sources: dict[_Column, set[_Column]] = {}

    def pin(self, column: _Column, places: tuple[_Place, ...]) -> None:
        """Note that only rows count in which ``column`` is one of these parameters."""
        self.pinned.setdefault(column, places)

    def places(self, column: _Column) -> tuple[_Place, ...]:
        """Return the parameters of which a column equals one; none if there are too many."""
        places = self.pinned.get(column, ())
        return places if len(places) <= rules.LIMIT else ()

    def equate(self, column: _Column, source: _Column) -> None:
        """Note that only rows count in which ``column`` is ``source`` of a row that counts."""
        self._sources.setdefault(column, set()).add(source)

    def equal_to(self, column: _Column) -> Iterator[_Column]:
        """Yield the columns from which ``column`` has its value, the nearest first."""
        seen, waiting = {column}, [column]
        while waiting:
            for source in sorted(self._sources.get(waiting.pop(0), ())):
                if source not in seen:
                    seen.add(source)
                    waiting.append(source)
                    yield source

    def resolve(self) -> None:
        """Pin the columns that equal a pinned column."""
        for column in list(self._sources):
            for source in self.equal_to(column):
                if source in self.pinned:
                    self.pin(column, self.pinned[source])


_NAME = r'(?:"[^"]+"|`[^`]+`|[A-Za-z_]\w*)'
_TOKEN = re.compile(
    rf"""\s*(?:
        (?P<positional>\?|%s)
      | %\((?P<format>\w+)\)s
      | :(?P<named>\w+)
      | (?P<cast>::\w+(?:\(\d+\))?)
      | (?P<name>{_NAME}(?:\.{_NAME})*)
      | (?P<other><>|<=|>=|!=|\|\||%%|[-+*/%<>=(),.\[\]]|\d[\w.]*|'(?:[^']|'')*')
    )""",
    re.VERBOSE,
)
_UNSUPPORTED = frozenset(
    {
        *("WITH", "UNION", "EXCEPT", "INTERSECT", "BETWEEN", "CASE", "WINDOW"),
        *("FULL", "RIGHT", "CROSS", "NATURAL", "LATERAL", "USING"),
    }
)
_END_OF_FROM = frozenset({"WHERE", "GROUP", "HAVING", "ORDER", "LIMIT", "OFFSET", "FOR", "FETCH"})
_END_OF_ON = _END_OF_FROM | {"JOIN", "LEFT", "INNER", ","}


class _Token(NamedTuple):
    text: str
    #: The name in parts, without quotes; empty for a token that is no name.
    name: tuple[str, ...] = ()
    place: _Place | None = None

    @property
    def word(self) -> str:
        """The token in upper case, for comparison with keywords."""
        return self.text.upper()


class _Tokens:
    """The tokens of a statement, and the position of the next one."""

    def __init__(self, statement: str) -> None:
        self._tokens = list(_split(statement))
        self._at = 0

    def peek(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _Token("")

    def next(self) -> _Token:
        token = self.peek()
        self._at += 1
        return token

    def take(self, *words: str) -> bool:
        """Step over these words if they come next; return whether they did."""
        end = self._at + len(words)
        found = tuple(token.word for token in self._tokens[self._at : end]) == words
        if found:
            self._at = end
        return found

    def expect(self, word: str) -> None:
        if not self.take(word):
            raise _UnknownShapeError(word)

    def until(self, ends: frozenset[str]) -> list[_Token]:
        """Return the tokens up to one of the words or the closing parenthesis, at this depth."""
        found: list[_Token] = []
        depth = 0
        while (token := self.peek()).text:
            if depth == 0 and (token.word in ends or token.text == ")"):
                break
            depth += (token.text == "(") - (token.text == ")")
            if token.word == "SELECT":
                raise _UnknownShapeError("a subquery in a condition")
            found.append(self.next())
        return found


def _split(statement: str) -> Iterator[_Token]:
    position, count, text = 0, 0, statement.rstrip()
    if "/*" in text or "--" in text:
        raise _UnknownShapeError("a comment")
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise _UnknownShapeError(text[position : position + 20])
        position = match.end()
        if match["positional"]:
            yield _Token("?", place=count)
            count += 1
        elif match["format"] or match["named"]:
            yield _Token("?", place=match["format"] or match["named"])
        elif match["name"]:
            names = tuple(name.strip('"`') for name in re.findall(_NAME, match["name"]))
            if len(names) == 1 and names[0].upper() in _UNSUPPORTED and names[0] == match["name"]:
                raise _UnknownShapeError(names[0])
            yield _Token(match["name"], name=names)
        elif match["other"]:
            yield _Token(match["other"])


class _Select:
    """A parser of one SELECT.

    :param tokens: the statement's tokens, of which the next is the SELECT
    :param scope: the statement's scope, to which tables and conditions are added
    :param path: the prefix of the names of its tables in the scope
    """

    def __init__(self, tokens: _Tokens, scope: _Scope | None = None, path: str = "") -> None:
        self._tokens = tokens
        self._scope = scope or _Scope()
        self._path = path
        self._here: set[str] = set()

    def parse(self) -> _Scope:
        """Read the whole statement; return its scope.

        :raises _UnknownShapeError: it is not understood
        """
        self.read()
        if self._tokens.peek().text:
            raise _UnknownShapeError(self._tokens.peek().text)
        self._scope.resolve()
        return self._scope

    def read(self) -> dict[str, _Column]:
        """Read the SELECT; return its columns by name."""
        self._tokens.expect("SELECT")
        columns = self._tokens.until(frozenset({"FROM"}))
        if self._tokens.take("FROM"):
            self._read_from()
        if self._tokens.take("WHERE"):
            self._read_condition(_END_OF_FROM)
        # The order and number of rows depend on the rows themselves.
        self._tokens.until(frozenset())
        return self._columns(columns)

    def _read_from(self) -> None:
        self._read_item()
        while True:
            if self._tokens.take(","):
                self._read_item()
            elif self._tokens.take("JOIN") or self._tokens.take("INNER", "JOIN"):
                self._read_item()
                self._tokens.expect("ON")
                self._read_condition(_END_OF_ON)
            elif self._tokens.take("LEFT", "OUTER", "JOIN") or self._tokens.take("LEFT", "JOIN"):
                # It leaves out rows of the table that is joined, and none of those before.
                alias = self._read_item()
                self._tokens.expect("ON")
                self._read_condition(_END_OF_ON, only=alias)
            else:
                break
        if self._tokens.peek().word not in (*_END_OF_FROM, "", ")"):
            raise _UnknownShapeError(self._tokens.peek().text)

    def _read_item(self) -> str:
        """Read a table or a subquery with its alias; return the name it is known by."""
        if self._tokens.take("("):
            columns = self._read_subquery()
            alias = self._read_alias("")
            for name, source in columns.items():
                self._scope.equate((alias, name), source)
        else:
            token = self._tokens.next()
            if not token.name:
                raise _UnknownShapeError(token.text)
            table = token.name[-1]
            alias = self._read_alias(table)
            self._scope.tables[alias] = table
        return alias

    def _read_subquery(self) -> dict[str, _Column]:
        inner = _Select(self._tokens, self._scope, f"{self._path}{len(self._scope.tables)}/")
        columns = inner.read()
        self._tokens.expect(")")
        return columns

    def _read_alias(self, name: str) -> str:
        if self._tokens.take("AS"):
            name = self._tokens.next().name[-1:][0]
        else:
            following = self._tokens.peek()
            known = (*_END_OF_ON, "ON", ")", "")
            if following.word not in known:
                name = (self._tokens.next().name or ("",))[-1]
        alias = f"{self._path}{name}"
        if not name or alias in self._here:
            raise _UnknownShapeError(name)
        self._here.add(alias)
        return alias

    def _read_condition(self, ends: frozenset[str], only: str | None = None) -> None:
        """Note the parts of a condition that are joined by AND.

        :param ends: the keywords that end the condition
        :param only: the only table of which the condition leaves out rows; ``None``: all tables
        """
        for part in _conjuncts(self._tokens.until(ends)):
            column = self._column(part[0])
            if column is None and len(part) == 3 and part[1].text == "=":
                part, column = part[::-1], self._column(part[2])
            if column is None or len(part) < 3:
                continue
            if part[1].word == "IN" and part[2].text == "(" and part[-1].text == ")":
                places = _listed(part[3:-1])
            elif part[1].text == "=" and len(part) == 3:
                places = (part[2].place,) if part[2].place is not None else ()
                other = self._column(part[2])
                if other is not None:
                    self._equate(column, other, only)
            else:
                continue
            if places and only in (None, column[0]):
                self._scope.pin(column, places)

    def _equate(self, one: _Column, other: _Column, only: str | None) -> None:
        for column, source in ((one, other), (other, one)):
            if only in (None, column[0]):
                self._scope.equate(column, source)

    def _column(self, token: _Token) -> _Column | None:
        if len(token.name) != 2:
            return None
        alias = f"{self._path}{token.name[0]}"
        return (alias, token.name[1]) if alias in self._here else None

    def _columns(self, tokens: Sequence[_Token]) -> dict[str, _Column]:
        """Return the columns of ``SELECT a.b AS c, a.d``; what is computed is left out."""
        found: dict[str, _Column] = {}
        for part in _parts(tokens, ","):
            column = self._column(part[0]) if part else None
            if column is None:
                continue
            if len(part) == 1:
                found[column[1]] = column
            elif len(part) == 3 and part[1].word == "AS" and part[2].name:
                found[part[2].name[-1]] = column
        return found


def _parts(tokens: Sequence[_Token], separator: str) -> list[list[_Token]]:
    """Split tokens at a word outside of parentheses."""
    parts: list[list[_Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token.text == "(") - (token.text == ")")
        if depth == 0 and token.word == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _conjuncts(tokens: Sequence[_Token]) -> Iterator[list[_Token]]:
    if len(_parts(tokens, "OR")) > 1:
        return
    for part in _parts(tokens, "AND"):
        if len(part) > 2 and part[0].text == "(" and _closes(part, len(part) - 1):
            yield from _conjuncts(part[1:-1])
        elif part:
            yield part


def _closes(tokens: Sequence[_Token], place: int) -> bool:
    """Return whether the parenthesis at ``place`` closes the one at the beginning of the tokens."""
    depth = 0
    for number, token in enumerate(tokens):
        depth += (token.text == "(") - (token.text == ")")
        if depth == 0:
            return number == place
    return False


def _listed(tokens: Sequence[_Token]) -> tuple[_Place, ...]:
    """Return the parameters in a list; none if it holds anything else."""
    places = []
    for part in _parts(tokens, ","):
        if len(part) != 1 or part[0].place is None:
            return ()
        places.append(part[0].place)
    return tuple(places)


__all__ = ["REVOCATIONS", "Reads", "families_in", "reads"]


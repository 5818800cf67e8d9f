"""Text of the files: templates filled with a plan's numbers, under a header that can be checked.

The header carries the command that makes the file, and a digest of the content, by which a change
by hand is noticed. Nothing in it depends on the day or the run: the same plan, site and versions
make the same bytes.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

import jinja2

from keyfront import __version__
from keyfront.common.templates import environment

if TYPE_CHECKING:
    from ..plan.numbers import Number

#: What lies below mirrors the root of the file system, and is copied there.
SYSTEM = "system/"
#: Columns that comments keep to.
WIDTH = 100
_MARK = "# keyfront content: sha256:"
_HEADER = """\
# {title}
#
# Made by keyfront {version} for {versions}, by:
#     {command}
# Change what that command is told rather than this file: it is then kept, and --diff shows what
# is missed. Each number says what it was computed from and what breaks beyond it.
"""


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a deployment.

    :param path: below the folder, with ``/``
    :param text: the whole content, header included
    :param mode: 0o644 for configuration, 0o600 for keys
    """

    path: str
    text: str
    mode: int = 0o644

    @property
    def goes_to(self) -> str:
        """Where the system looks for it: ``system/`` mirrors ``/``. Empty if it is used here."""
        return self.path[len(SYSTEM) - 1 :] if self.path.startswith(SYSTEM) else ""


def fill(template: str, numbers: Mapping[str, Number], **values: object) -> str:
    """Fill a template of ``keyfront.deploy``.

    It sees each number as ``n.uwsgi.processes.value`` and its reason, for a comment, as
    ``n.uwsgi.processes | why``. Comments that grow beyond :data:`WIDTH` are wrapped afterwards.

    :param template: its path below ``keyfront/deploy``, for example ``site/nginx.conf.j2``
    :raises jinja2.UndefinedError: a value or a number that the template names was not given
    """
    text = _environment().get_template(template).render(n=namespace(numbers), **values)
    return "\n".join(_wrapped(line) for line in text.split("\n"))


def why(number: Number) -> str:
    """A number's reason in one line: what it was computed from, and what breaks beyond it."""
    return number.why


def namespace(numbers: Mapping[str, Number]) -> SimpleNamespace:
    """The numbers as attributes: ``uwsgi.processes`` of a mapping becomes two dots."""
    tree = SimpleNamespace()
    for name, number in numbers.items():
        group, _, leaf = name.partition(".")
        if not hasattr(tree, group):
            setattr(tree, group, SimpleNamespace())
        setattr(getattr(tree, group), leaf, number)
    return tree


def with_header(body: str, *, title: str, command: str, versions: str) -> str:
    """Put the header before a file's body: a comment in every language that we render."""
    head = _HEADER.format(title=title, version=__version__, versions=versions, command=command)
    wrapped = "\n".join(_wrapped(line) for line in head.split("\n"))
    rest = f"{wrapped}\n{body.lstrip()}"
    return f"{_MARK}{_digest(rest)}\n{rest}"


def is_untouched(text: str) -> bool | None:
    """Whether a file is as keyfront made it; ``None`` if keyfront did not make it.

    Whichever keyfront: the digest is the file's own.
    """
    first, _, rest = text.partition("\n")
    if not first.startswith(_MARK):
        return None
    return first[len(_MARK) :].strip() == _digest(rest)


def body(text: str) -> str:
    """A file without the header that keyfront put before it."""
    return text.partition("\n\n")[2] if text.startswith(_MARK) else text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _wrapped(line: str) -> str:
    """A comment of its own line in lines of at most :data:`WIDTH` columns; others as they are."""
    if len(line) <= WIDTH:
        return line
    match = re.match(r"( *# ?)( *)", line)
    if match is None:
        return line
    return textwrap.fill(
        line[match.end() :],
        WIDTH,
        initial_indent=match[0],
        subsequent_indent=match[0],
        break_long_words=False,
        break_on_hyphens=False,
    )


@cache
def _environment() -> jinja2.Environment:
    found = environment().overlay()
    found.filters = {**found.filters, "why": why}
    return found

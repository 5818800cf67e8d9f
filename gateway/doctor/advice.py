"""The places of a finding's lines: in which block of which file, or instead of which line.

A line of nginx, Apache or HAProxy is right in one block and refused in another. So such lines come
after a comment that names their place; comments are right in all three.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .settings import Directive, Place, Tree

_MARK = re.compile(r"# (instead of|in|at the end of)(?: (.*) of)? (/\S*?)(?::(\d+))?$")


class Mark(NamedTuple):
    """The place of the lines after a mark.

    :param how: ``instead of``, ``in`` or ``at the end of``
    :param line: the line of the directive that is replaced, or that opens the block, from 1; 0 for
        a whole file
    """

    how: str
    path: str
    line: int


def instead(directive: Directive, *lines: str) -> tuple[str, ...]:
    """Return lines that take the place of a directive."""
    return (f"# instead of {directive.place}", *lines)


def within(block: Directive, *lines: str) -> tuple[str, ...]:
    """Return lines for a block."""
    name = str(block) if len(str(block)) <= 40 else block.name
    return (f"# in {name} of {block.place}", *lines)


def at_the_end(path: str, *lines: str) -> tuple[str, ...]:
    """Return lines for the outermost level of a file."""
    return (f"# at the end of {path}", *lines)


def for_tree(tree: Tree, directive: Directive | None, *lines: str) -> tuple[str, ...]:
    """Return lines that take the place of a directive, or else stand outside of all blocks."""
    return at_the_end(tree.path, *lines) if directive is None else instead(directive, *lines)


def around(tree: Tree, directive: Directive, *lines: str) -> tuple[str, ...]:
    """Return lines that go into the block that a directive is in."""
    block = directive.around[-1] if directive.around else None
    path = directive.place.path or tree.path
    return at_the_end(path, *lines) if block is None else within(block, *lines)


def mark(line: str) -> Mark | None:
    """Return the mark that a line is; ``None`` if it is none."""
    match = _MARK.match(line)
    return Mark(match[1], match[3], int(match[4] or 0)) if match else None


def place_of(line: str) -> Place | None:
    """Return the place that a mark names; ``None`` if the line is no mark."""
    found = mark(line)
    return Place(found.path, found.line) if found else None

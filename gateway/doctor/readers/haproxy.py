"""Reads HAProxy's configuration: sections of lines, in one or several files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ..settings import Directive, Place, Tree
from .files import Files

_SECTIONS = frozenset(
    (
        "global",
        "defaults",
        "frontend",
        "backend",
        "listen",
        "userlist",
        "peers",
        "resolvers",
        "mailers",
        "program",
        "cache",
        "http-errors",
        "ring",
        "fcgi-app",
        "log-forward",
        "crt-store",
        "traces",
        "acme",
        "log-profile",
    )
)


def read(files: Files, paths: Sequence[str]) -> Tree | None:
    """Read files as HAProxy does that is started with all of them; ``None`` without any."""
    tree = Tree(paths[0] if paths else "haproxy.cfg")
    defaults: Directive | None = None
    any_read = False
    for path in paths:
        text = files.text(path)
        if text is None:
            continue
        any_read = True
        section: Directive | None = None
        for number, line in enumerate(text.splitlines(), 1):
            place = Place(path, number)
            lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
            lexer.whitespace_split = True
            lexer.commenters = "#"
            try:
                words = list(lexer)
            except ValueError:
                files.broken(place, "a closing quote")
                continue
            if not words:
                continue
            name, *arguments = words
            if name in _SECTIONS:
                around = (defaults,) if defaults is not None and name != "defaults" else ()
                section = Directive(name, tuple(arguments), place, [], around)
                tree.top.append(section)
                if name == "defaults":
                    defaults = section
            elif section is None:
                if not name.startswith("."):
                    files.broken(place, "a section first, such as global, defaults or frontend")
            else:
                assert section.inside is not None
                section.inside.append(
                    Directive(name, tuple(arguments), place, None, (*section.around, section))
                )
    return tree if any_read else None

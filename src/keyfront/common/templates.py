"""Renders the packaged configuration templates (``keyfront/deploy``).

Paths may hold blanks and letters of any language; how each server takes such a word is a filter of
the templates.
"""

from __future__ import annotations

import shlex
from functools import cache
from importlib.resources import files
from operator import attrgetter

import jinja2


def render(template: str, **values: object) -> str:
    """Return a template of ``keyfront.deploy``, filled in.

    :param template: its path below ``keyfront/deploy``, for example
        ``serve/uwsgi/keyfront.ini.j2``
    :param values: the names that the template uses
    :raises jinja2.UndefinedError: a value that the template names was not given
    """
    return environment().get_template(template).render(values)


@cache
def environment() -> jinja2.Environment:
    """Return the templates with their filters; each is compiled once."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    made.filters.update(
        quoted=quoted,
        uwsgi_value=uwsgi_value,
        unit_word=unit_word,
        shell_word=shell_word,
        # of a number of the plan
        why=attrgetter("why"),
    )
    return made


def quoted(value: object) -> str:
    """Return a value as a word of nginx's or Apache's configuration."""
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def uwsgi_value(value: object) -> str:
    """Return a value for uWSGI's ini files, where ``%`` and a letter are a variable."""
    return str(value).replace("%", "%%")


def unit_word(value: object) -> str:
    """Return a value as a word of a command in a unit of systemd, quoted only if it must be."""
    text = str(value).replace("%", "%%").replace("$", "$$")
    if shlex.quote(text) == text:
        return text
    return quoted(text)


def shell_word(value: object) -> str:
    """Return a value as a word of a command that somebody may copy into a shell."""
    return shlex.quote(str(value))


def _source(template: str) -> str:
    return files("keyfront.deploy").joinpath(template).read_text(encoding="utf-8")

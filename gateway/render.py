"""Renders the packaged configuration templates (``keyfront/deploy``)."""

from __future__ import annotations

from importlib.resources import files

import jinja2


def render(template: str, **values: object) -> str:
    """Fill a template of ``keyfront.deploy``.

    :param template: its path below ``keyfront/deploy``, for example ``uwsgi/keyfront.ini.j2``
    :raises jinja2.UndefinedError: a value that the template names was not given
    """
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    return environment.get_template(template).render(values)


def _source(template: str) -> str:
    return files("keyfront.deploy").joinpath(template).read_text(encoding="utf-8")

"""Rendering a server's configuration: against Jinja2 with the template's text in hand."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import jinja2

from keyfront.common.templates import render, shell_word

TEMPLATE = "serve/keystone/clouds.yaml.j2"
VALUES = {"endpoint": "http://127.0.0.1:5000/v3", "password": "none", "path": "/none"}


def test_render_against_jinja2(paired: Any) -> None:
    """A template is compiled once; Jinja2 alone compiles and fills it each time."""
    text = files("keyfront.deploy").joinpath(TEMPLATE).read_text(encoding="utf-8")

    def theirs() -> str:
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
        )
        environment.filters["shell_word"] = shell_word
        return environment.from_string(text).render(VALUES)

    assert render(TEMPLATE, **VALUES) == theirs()
    paired(lambda: render(TEMPLATE, **VALUES), theirs, limit=0.5)

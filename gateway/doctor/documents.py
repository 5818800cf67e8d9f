"""Writes the part of docs/doctor.md on codes from the registry.

``python -m keyfront.gateway.doctor.documents docs/doctor.md``
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from . import checks  # noqa: F401  (enters all checks into the registry)
from .registry import CHECKS, LAYERS

BEGIN = "<!-- made by python -m keyfront.gateway.doctor.documents docs/doctor.md -->"
_GROUPS = (
    ("X", "Across layers"),
    ("U", "uWSGI"),
    ("N", "nginx"),
    ("A", "Apache and mod_wsgi"),
    ("H", "HAProxy"),
    ("K", "Keystone and its keys"),
    ("L", "LDAP"),
    ("D", "Database"),
    ("M", "memcached and Redis"),
    ("S", "The kernel and systemd"),
    ("F", "Files"),
    ("R", "Files of keyfront render"),
    ("V", "Versions"),
    ("P", "The running machine, with --live"),
)


def codes() -> str:
    """Return the text on all codes."""
    parts = [BEGIN]
    for letter, title in _GROUPS:
        parts.append(f"## {title}")
        for code, check in sorted(CHECKS.items()):
            if code[0] != letter:
                continue
            layers = ", ".join(LAYERS[layer] for layer in check.layers)
            words = (
                (
                    f"**{check.holds}** ({check.level}; looks at {layers}). Otherwise: "
                    f"{check.harm} "
                    f"{check.explanation} Source: {check.source}."
                )
                .replace("<", "&lt;")
                .replace("..", ".")
                .replace(". .", ".")
            )
            filled = textwrap.fill(
                words, 100, break_long_words=False, break_on_hyphens=False
            )
            parts.append(f"### {code}\n\n{filled}")
    return "\n\n".join(parts) + "\n"


def replaced(text: str) -> str:
    """Return a document with its part on codes made anew."""
    return text[: text.index(BEGIN)] + codes()


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(replaced(document.read_text(encoding="utf-8")), encoding="utf-8")

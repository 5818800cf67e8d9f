"""Reads nginx's configuration with crossplane, its includes followed below any root."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..settings import Directive, Place, Tree
from .files import Files, Unread

_INSTALL = "crossplane is not installed here: run pip install 'keyfront[doctor]'"
_DEEPEST = 16


def read(files: Files, path: str) -> Tree | None:
    """Read a configuration; ``None`` if its first file cannot be read."""
    try:
        import crossplane
    except ImportError:
        files.unread.append(Unread(path, _INSTALL))
        return None
    if files.text(path) is None:
        return None
    folder = path.rpartition("/")[0]
    tree = Tree(path)

    def one(name: str, into: list[Directive], around: tuple[Directive, ...]) -> None:
        real = str(files.resolved(name))
        payload = crossplane.parse(
            real, single=True, catch_errors=True, check_ctx=False, check_args=False
        )
        for error in payload["errors"]:
            said = str(error["error"]).rpartition(" in ")[0] or str(error["error"])
            files.broken(Place(name, error["line"] or 0), f"nginx's syntax: {said}")
        if not payload["errors"]:
            _semicolons(crossplane.lex(real), files, name)
        for config in payload["config"]:
            entered(config["parsed"], name, into, around)

    def entered(
        parsed: list[dict[str, Any]],
        name: str,
        into: list[Directive],
        around: tuple[Directive, ...],
    ) -> None:
        for item in parsed:
            if item["directive"] == "#":
                continue
            if item["directive"] == "include" and len(around) < _DEEPEST and item["args"]:
                pattern = item["args"][0]
                pattern = pattern if pattern.startswith("/") else f"{folder}/{pattern}"
                found = files.glob(pattern)
                if not found and not any(x in pattern for x in "*?["):
                    files.unread.append(Unread(pattern, f"{name} includes it and it is not there"))
                for included in found:
                    if files.text(included) is not None:
                        one(included, into, (*around, Directive("include", (), Place(name))))
                continue
            block = item.get("block")
            outside = tuple(x for x in around if x.name != "include")
            directive = Directive(
                item["directive"],
                tuple(item["args"]),
                Place(name, item["line"]),
                None if block is None else [],
                outside,
            )
            into.append(directive)
            if block is not None:
                assert directive.inside is not None
                entered(block, name, directive.inside, (*around, directive))

    one(path, tree.top, ())
    return tree


def _semicolons(tokens: Iterable[tuple[str, int, bool]], files: Files, name: str) -> None:
    """Note each block that ends in the middle of a directive, which crossplane lets pass."""
    before, at, plain = ";", 0, True
    for token, line, quoted in tokens:
        if token.startswith("#") and not quoted:
            continue
        if token == "}" and not quoted and not (plain and before in ";{}"):
            files.broken(Place(name, at), "a ; at the end of this line")
        before, at, plain = token, line, not quoted

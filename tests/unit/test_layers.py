"""The map of the packages: no module-level import cycle, and APIs that exist.

Which layer may import which is import-linter's part: ``tox -e layers``, by what
``[tool.importlinter]`` in pyproject.toml allows.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import keyfront

ROOT = Path(keyfront.__file__).parent


def _modules() -> dict[str, Path]:
    """Return the file of each module of keyfront, by its dotted name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports_at_load(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements that run when a module is loaded, outside of functions."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _imports_at_load(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody"):
                yield from _imports_at_load(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from _imports_at_load(handler.body)


def _imported(name: str, path: Path) -> set[str]:
    """Return the modules of keyfront that a module names in its imports at load."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for statement in _imports_at_load(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found.update(alias.name for alias in statement.names)
            continue
        base = importlib.util.resolve_name(
            "." * statement.level + (statement.module or ""), package
        )
        for alias in statement.names:
            inside = f"{base}.{alias.name}"
            found.add(inside if inside in MODULES else base)
    return {one for one in found if one in MODULES and one != name}


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, from one of them back to itself; empty without any."""
    done: set[str] = set()
    for start in sorted(graph):
        path: list[str] = []
        left = [(start, iter(sorted(graph[start])))] if start not in done else []
        if left:
            path.append(start)
        while left:
            name, following = left[-1]
            child = next(following, None)
            if child is None:
                done.add(name)
                path.pop()
                left.pop()
            elif child in path:
                return [*path[path.index(child) :], child]
            elif child not in done:
                path.append(child)
                left.append((child, iter(sorted(graph[child]))))
    return []


def test_there_are_modules_to_look_at():
    """Without the folders at the top of the repository the tests below would pass for nothing."""
    for layer in ("common", "middleware", "gateway", "cli", "benchmarks"):
        assert sum(name.startswith(f"keyfront.{layer}") for name in MODULES) > 5, layer


def test_a_cycle_is_found():
    assert _cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c", "b"]
    assert _cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_by_others_when_it_is_loaded():
    graph = {name: _imported(name, path) for name, path in MODULES.items()}
    assert sum(map(len, graph.values())) > len(graph), "the imports are not seen"
    assert not (cycle := _cycle(graph)), " -> ".join(cycle)


PACKAGES = sorted(name for name, path in MODULES.items() if path.name == "__init__.py")


@pytest.mark.parametrize("name", PACKAGES)
def test_the_api_that_a_package_declares_exists(name):
    package = importlib.import_module(name)
    declared = getattr(package, "__all__", [])
    assert len(set(declared)) == len(declared)
    assert [one for one in declared if not hasattr(package, one)] == []

"""The map of the packages: no module-level import cycle, and APIs that are declared and kept to.

Which layer may import which is import-linter's part: ``tox -e layers``, by what
``[tool.importlinter]`` in pyproject.toml allows.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
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


def _declared(package: str) -> list[str]:
    """Return the API that a package declares in its ``__init__``: names, and modules of its own."""
    found: list[str] = getattr(importlib.import_module(package), "__all__", [])
    return found


def _uses(name: str, path: Path) -> Iterator[str]:
    """Yield what a module names of keyfront, wherever it does so: ``package.module.attribute``."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            base = importlib.util.resolve_name(
                "." * statement.level + (statement.module or ""), package
            )
            yield from (f"{base}.{alias.name}" for alias in statement.names)


def _undeclared(user: str, used: str) -> Iterator[str]:
    """Yield what somebody uses of packages that they do not declare, as ``package: name``."""
    parts = used.split(".")
    for end in range(2, len(parts)):
        package, name = ".".join(parts[:end]), parts[end]
        if package not in PACKAGES or f"{user}.".startswith(f"{package}."):
            continue
        if name not in _declared(package):
            yield f"{package}: {name} (used by {user})"


@pytest.mark.parametrize("name", PACKAGES)
def test_the_api_that_a_package_declares_exists(name):
    package, declared = importlib.import_module(name), _declared(name)
    assert len(set(declared)) == len(declared)
    missing = [x for x in declared if not hasattr(package, x) and f"{name}.{x}" not in MODULES]
    assert missing == []


@pytest.mark.parametrize("layer", ["common", "middleware", "gateway", "cli"])
def test_each_package_declares_its_api(layer):
    silent = [x for x in PACKAGES if f"{x}.".startswith(f"keyfront.{layer}.") and not _declared(x)]
    assert silent == []


def test_of_other_packages_only_their_apis_are_used():
    """Measurements and tests may look inside of what they measure and test."""
    used = {
        (user, one)
        for user, path in MODULES.items()
        if not user.startswith("keyfront.benchmarks")
        for one in _uses(user, path)
        if one.startswith("keyfront.")
    }
    assert len(used) > len(PACKAGES), "the imports are not seen"
    points = importlib.metadata.distribution("keyfront").entry_points
    used |= {("an entry point", ".".join([x.module, x.attr or "__name__"])) for x in points}
    wrong = {each for user, one in used for each in _undeclared(user, one)}
    assert not wrong, "put it into __all__ of the package: " + "; ".join(sorted(wrong))


def test_what_is_not_declared_is_found():
    assert list(_undeclared("keyfront.cli.main", "keyfront.middleware.ldap.pool.Pool")) == [
        "keyfront.middleware.ldap: pool (used by keyfront.cli.main)"
    ]
    assert list(_undeclared("keyfront.cli.main", "keyfront.middleware.ldap.LDAPPool")) == []
    assert list(_undeclared("keyfront.middleware.ldap.wsgi", "keyfront.middleware.ldap.pool")) == []

"""The mechanical part of the docstrings' measure: parameters are there, and named by what they are.

Of ``:param NAME: TEXT`` the name is a parameter (or a field of a class), and the text begins with
what the parameter is: "seconds to wait", "the file's path", "true if ...". Words that begin a
clause without its noun ("of the file", "whether it waits") leave the reader to guess it. So it is
with ``:returns:`` and with comments on attributes and constants (``#:``).
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import keyfront

ROOT = Path(keyfront.__file__).parent

_CLAUSES = re.compile(
    r"(as|how|in|of|that|what|when|where|whether|which|who|whom|whose|why)\b", re.IGNORECASE
)
_FIELD = re.compile(r"^\s*:(param|ivar) ([^:]+): *(.*)", re.MULTILINE)
# What a function returns; and the first line of a comment on an attribute or a constant.
_RETURNS = re.compile(r"^ *:returns?: *(.*)", re.MULTILINE)
_COMMENT = re.compile(r"^(?! *#:).*\n *#: *(.*)", re.MULTILINE)

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef




def _named(node: Definition) -> set[str]:
    """Return the names that may stand after ``:param`` in a docstring.

    A class is described with the arguments that make it: those of ``__init__`` or ``__new__``, or
    its fields.
    """
    if not isinstance(node, ast.ClassDef):
        given = node.args
        more = [each for each in (given.vararg, given.kwarg) if each is not None]
        return {x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs, *more)}
    names: set[str] = set()
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
        elif isinstance(statement, ast.FunctionDef) and statement.name in ("__init__", "__new__"):
            names |= _named(statement)
    return names


def _faults(source: str) -> list[str]:
    """Return what is wrong with the parameters in the docstrings of a file, one text each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, Definition):
            continue
        for kind, name, text in _FIELD.findall(ast.get_docstring(node) or ""):
            where = f"{node.lineno} {node.name}: {name}"
            if _CLAUSES.match(text):
                found.append(f"{where} begins with a clause: {text}")
            if kind == "param" and name.lstrip("*") not in _named(node):
                found.append(f"{where} is no parameter")
    return found


def _clauses(source: str) -> list[str]:
    """Return the clauses that stand for what is returned or held, one text each."""
    texts = (*_RETURNS.findall(source), *_COMMENT.findall(source))
    return [f"a clause: {text}" for text in texts if _CLAUSES.match(text)]


@pytest.mark.parametrize("layer", ["benchmarks", "cli", "common", "gateway", "middleware"])
def test_parameters_exist_and_are_named_by_what_they_are(layer):
    files = sorted((ROOT / layer).rglob("*.py"))
    assert len(files) > 5
    faults = {
        f"{path.relative_to(ROOT)}:{fault}"
        for path in files
        for fault in _faults(path.read_text(encoding="utf-8"))
    }
    assert not faults, "\n".join(sorted(faults))


@pytest.mark.parametrize(
    "line, fault",
    [
        (":param size: bytes of it", ""),
        (":param size: true if it is large", ""),
        (":param size: of the file", "clause"),
        (":param size: Whether it is large", "clause"),
        (":param width: columns", "no parameter"),
    ],
)
def test_faults_are_found(line, fault):
    source = f'def read(size):\n    """Read.\n\n    {line}\n    """\n'
    (found,) = _faults(source) or [""]
    assert (fault in found) if fault else not found


@pytest.mark.parametrize("layer", ["cli", "common", "gateway", "middleware"])
def test_what_is_returned_or_held_is_named_by_what_it_is(layer):
    faults = {
        f"{path.relative_to(ROOT)}: {fault}"
        for path in (ROOT / layer).rglob("*.py")
        for fault in _clauses(path.read_text(encoding="utf-8"))
    }
    assert not faults, "\n".join(sorted(faults))


@pytest.mark.parametrize(
    "text, count",
    [
        ("#: When it ended.\n#: Seconds.\nended = 0.0\n", 1),
        ("#: Seconds.\n#: When it ended.\nended = 0.0\n", 0),
        ("    :returns: what was read\n", 1),
        ("    :returns: bytes that were read\n", 0),
    ],
)
def test_clauses_are_found(text, count):
    assert len(_clauses(f"import os\n{text}")) == count


def _public() -> Iterator[tuple[str, object]]:
    """Yield the functions and classes that the product's packages declare, with their names."""
    for path in ROOT.rglob("__init__.py"):
        package = ".".join(path.relative_to(ROOT.parent).parent.parts)
        if package.startswith("keyfront.benchmarks"):
            continue
        module = importlib.import_module(package)
        for name in getattr(module, "__all__", ()):
            found = getattr(module, name, None)
            if inspect.isfunction(found) or inspect.isclass(found):
                yield f"{package}.{name}", found


def _undocumented(function: object) -> list[str]:
    """Return the parameters of a function or class that its docstring does not name."""
    text = inspect.getdoc(function) or ""
    named = {name for _, name, _ in _FIELD.findall(text)}
    given = inspect.signature(function).parameters  # type: ignore[arg-type]
    return [name for name in given if name not in (*named, "self", "cls")]


def test_what_packages_declare_has_its_parameters_documented():
    """But for errors and enumerations: nobody outside makes these."""
    missing = []
    seen = 0
    for name, found in _public():
        assert inspect.getdoc(found), name
        if isinstance(found, type) and issubclass(found, BaseException | enum.Enum):
            continue
        seen += 1
        missing += [f"{name}: {each}" for each in _undocumented(found)]
        if not isinstance(found, type):
            continue
        for method, each in vars(found).items():
            function = getattr(each, "__func__", each)
            if inspect.isfunction(function) and not method.startswith("_"):
                missing += [f"{name}.{method}: {one}" for one in _undocumented(function)]
    assert seen > 15, "the declared functions are not seen"
    assert missing == []

"""The documents: links lead somewhere, and Python shown in them is Python.

Needs nothing but pytest, so that the docs environment of tox stays small.
"""

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(r"^( *)(```+|~~~+)([^\n`]*)\n(.*?)^ *\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def prose(document: Path) -> str:
    """The text without code, in which brackets and hashes mean something else."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def anchors(document: Path) -> set[str]:
    """The names by which headings are linked to, as the usual hosts of repositories make them."""
    names: set[str] = set()
    for heading in HEADING.findall(prose(document)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = base = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        count = 0
        while name in names:
            count += 1
            name = f"{base}-{count}"
        names.add(name)
    return names | set(re.findall(r'<a (?:id|name)="([^"]+)"', prose(document)))


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    text = re.sub(r"`[^`\n]*`", "", prose(document))
    for match in LINK.finditer(text):
        link = match[1] or match[2]
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        there = target.is_relative_to(ROOT) and target.exists()
        if there and anchor and target.suffix == ".md":
            there = anchor in anchors(target)
        if not there:
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_in_documents_compiles(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        language = match[3].split()[:1]
        code = textwrap.dedent(match[4])
        if language in (["python"], ["py"]) and not code.lstrip().startswith(">>>"):
            line = text.count("\n", 0, match.start()) + 1
            compile(code, f"{name_of(document)}:{line}", "exec")


def logged() -> str:
    """All texts that keyfront logs, with what is filled in left as it is written."""
    found = []
    for folder in ("middleware", "gateway", "src"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_the_lines_of_the_log_are_those_that_are_logged() -> None:
    document = (ROOT / "docs/running.md").read_text(encoding="utf-8")
    table = document[document.index("| line | what it means") :]
    lines = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(lines) > 20
    texts = logged()
    assert [line for line in lines if line not in texts] == []

"""The documents: links lead somewhere, Python shown in them is Python, log lines are explained.

Needs nothing but pytest, so that the docs environment of tox stays small.
"""

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# The tests there are, and their files.
NAMES = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in [path.stem, *re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))]
}

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


@pytest.mark.parametrize("name", ["architecture.md", "design.md"])
def test_files_that_are_named_exist(name: str) -> None:
    """By their whole paths, by their names, or by as much as tells them from others."""
    tops = ("src", "middleware", "gateway", "deploy", "benchmarks", "tests", "docs")
    files = {
        f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}"
        for top in tops
        for path in ((ROOT / top), *(ROOT / top).rglob("*"))
    }
    text = FENCE.sub("", (ROOT / "docs" / name).read_text(encoding="utf-8"))
    named = set(re.findall(r"`([\w./-]+(?:\.py|\.json|\.yml|/))`", text))
    assert len(named) > 5
    wrong = [one for one in named if not any(file.endswith(f"/{one}") for file in files)]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_tests_that_are_named_exist(document: Path) -> None:
    """Files and folders, by their whole paths or a pattern, and single tests by their names."""
    text = document.read_text(encoding="utf-8").replace("NAME", "*")
    named = {name.rstrip("./") for name in re.findall(r"\btests/[\w./*-]+", text)}
    assert [name for name in sorted(named) if not any(ROOT.glob(name))] == []
    tests = set(re.findall(r"(?:`|::)(test_\w+)`", text))
    assert sorted(tests - NAMES) == []


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


LEVELS = ("warning", "error", "exception", "critical")
# Of a directory's and the heartbeat's own lines some are explained where those are.
EXPLAINING = ("running.md", "ldap.md", "heartbeat.md")


def sources() -> dict[Path, ast.Module]:
    """The code of the product."""
    return {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("middleware", "gateway", "src")
        for path in (ROOT / folder).rglob("*.py")
    }


def texts(tree: ast.AST) -> list[str]:
    """All texts in it, with what is filled in left as it is written."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def logged(tree: ast.Module) -> list[tuple[int, str]]:
    """The lines that a module logs at WARNING and above: where, and the text."""
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        logger = node.func.value
        if node.func.attr not in LEVELS or not isinstance(logger, ast.Name):
            continue
        if logger.id.lower().strip("_") not in ("log", "logger"):
            continue
        (text, *_) = node.args
        if isinstance(text, ast.Name):
            # one of those that the variable was set to
            found += [
                (node.lineno, given)
                for other in ast.walk(tree)
                if isinstance(other, ast.Assign) and text.id == getattr(other.targets[0], "id", "")
                for given in texts(other.value)
            ]
        else:
            found += [(node.lineno, given) for given in texts(text)]
    return found


def rows(document: Path) -> list[str]:
    """What the tables of a document explain: code in the first column."""
    return re.findall(r"^\| `([^`]+)`[^|]*\|", document.read_text(encoding="utf-8"), re.MULTILINE)


def table_of_lines() -> list[str]:
    document = ROOT / "docs/running.md"
    text = document.read_text(encoding="utf-8")
    return [row for row in rows(document) if row in text[text.index("| line | what it means") :]]


def test_the_lines_of_the_log_are_those_that_are_logged() -> None:
    lines = table_of_lines()
    assert len(lines) > 20
    all_texts = "\n".join(text for tree in sources().values() for text in texts(tree))
    assert [line for line in lines if line not in all_texts] == []


def test_each_line_that_is_logged_is_explained() -> None:
    """Whoever adds a warning adds a row: what it means, and what to do."""
    explained = table_of_lines()
    for name in EXPLAINING[1:]:
        for row in rows(ROOT / "docs" / name):
            explained += [x.strip() for x in re.split(r"…|\b[A-Z]{3,}\b", row) if len(x) > 9]
    unexplained = [
        f"{name_of(path)}:{number}: {text}"
        for path, tree in sources().items()
        for number, text in logged(tree)
        if not any(line in text for line in explained)
    ]
    assert unexplained == [], f"in no table of {', '.join(EXPLAINING)}"

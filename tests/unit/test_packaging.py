"""What is in the wheel, and what the metadata promises."""

import ast
import importlib.metadata
import importlib.resources
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = ("gateway", "middleware", "deploy", "benchmarks")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, so that building leaves nothing behind in the repository."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    built = shutil.ignore_patterns(
        ".git", ".tox", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache",
        # other processes write there meanwhile
        ".hypothesis", "pytest-cache-files-*",
    )  # fmt: skip
    return Path(shutil.copytree(ROOT, copy, ignore=built))


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """Built through the hook that pip itself calls, without an environment of its own."""
    into = tree.parent / "wheel"
    into.mkdir()
    hook = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    run(sys.executable, "-W", "ignore", "-c", hook, into, cwd=tree)
    (built,) = into.iterdir()
    return built


def test_wheel_holds_only_the_package_and_its_metadata(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in files_of(wheel)}
    assert len(tops) == 2
    assert "keyfront" in tops
    assert re.fullmatch(r"keyfront-[0-9a-z.]+\.dist-info", (tops - {"keyfront"}).pop())


def test_wheel_holds_every_source_file(tree: Path, wheel: Path) -> None:
    expected = {"keyfront/py.typed"}
    source = tree / "src"
    expected |= {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    for top in TREES:
        found = [path for path in (tree / top).rglob("*") if path.is_file()]
        if top != "deploy":
            # what micro-benchmarks counted, the report's page and wrk's script lie beside them
            found = [one for one in found if one.suffix in (".py", ".json", ".css", ".j2", ".lua")]
        assert found, top
        expected |= {f"keyfront/{path.relative_to(tree).as_posix()}" for path in found}
    packed = {name for name in files_of(wheel) if name.startswith("keyfront/")}
    assert packed == expected


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    source = (ROOT / "src/keyfront/__init__.py").read_text()
    assert f'\n__version__ = "{re.search(r"^Version: (.+)$", text, re.M)[1]}"\n' in source
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert "\nRequires-Python: >=3.11\n" in text
    base = [line for line in text.splitlines() if line.startswith("Requires-Dist:")]
    assert len([line for line in base if "extra ==" not in line]) == 2


def test_every_requirement_says_why() -> None:
    source = (ROOT / "setup.py").read_text()
    lines = source.splitlines()
    lists = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("BASE", "EXTRAS")
    ]
    assert len(lists) == 2
    requirements = [
        item
        for part in lists
        for group in ([part] if isinstance(part, ast.List) else part.values)
        for item in group.elts
    ]
    assert len(requirements) > 10
    for item in requirements:
        assert re.search(r",  # \w.{10,}", lines[item.lineno - 1]), item.value


# pip before 23.1 compares extras letter by letter; Debian 12 has 23.0.1, and its Python no wheel.
SYSTEM_PYTHON = Path("/usr/bin/python3")
OWN_PYTHON_HAS = "import sys, ensurepip; assert sys.version_info >= (3, 11)"


def documented_extras() -> set[str]:
    """The extras that documents, errors and the makefile tell to install, as they spell them."""
    files = [
        ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md"),
        *(path for tree in ("src", *TREES) for path in (ROOT / tree).rglob("*") if path.is_file()),
    ]  # fmt: skip
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    # The list in the README, too.
    listed = re.search(r"Everything else is an extra: (.*?)\. setup", text, re.DOTALL)
    assert listed is not None
    told = re.findall(r"\bkeyfront\[([\w,-]+)\]", text)
    return set(re.findall(r"`([^`]+)`", listed[1])) | set(",".join(told).split(","))


def stand_in(folder: Path, name: str) -> None:
    """A wheel that requires nothing and satisfies everybody."""
    plain = re.sub(r"[-_.]+", "_", name)
    info = f"{plain}-99.dist-info"
    with zipfile.ZipFile(folder / f"{plain}-99-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.once
def test_the_systems_own_pip_finds_each_extra_that_is_named(wheel: Path, tmp_path: Path) -> None:
    """One that it does not find it passes over, with a warning in a page of others."""
    asked = subprocess.run([SYSTEM_PYTHON, "-c", OWN_PYTHON_HAS], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip(f"{SYSTEM_PYTHON} makes no environment that keyfront runs in")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    required: dict[str, set[str]] = {}
    for line in lines:
        found = re.match(r"Requires-Dist: ([\w.-]+)[^;]*(?:; extra == ['\"]([\w-]+)['\"])?$", line)
        if found:
            required.setdefault(found[2] or "", set()).add(found[1])
    folder = tmp_path / "wheels"
    folder.mkdir()
    for one in set().union(*required.values()):
        stand_in(folder, one)
    shutil.copy(wheel, folder)
    wanted = documented_extras()
    assert len(wanted) > 10
    run(SYSTEM_PYTHON, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    pip = [tmp_path / "venv/bin/pip", "--isolated", "--disable-pip-version-check", "install"]
    options = ["--dry-run", "--no-index", "--find-links", folder, "--report", tmp_path / "report"]
    said = run(*pip, *options, f"keyfront[{','.join(sorted(wanted))}]", cwd=tmp_path)
    assert not re.search(r"keyfront \S+ does not provide the extra", said), said
    report = json.loads((tmp_path / "report").read_text())
    installed = {one["metadata"]["name"].lower() for one in report["install"]}
    for extra in wanted:
        assert {x.lower() for x in required[extra]} <= installed, extra
    said = run(*pip, *options, "keyfront[nonesuch]", cwd=tmp_path)
    assert re.search(r"keyfront \S+ does not provide the extra", said), "it would say nothing"


def test_no_extra_installs_both_builds_of_uwsgi() -> None:
    extras = importlib.metadata.metadata("keyfront").get_all("Provides-Extra")
    requires = importlib.metadata.requires("keyfront")
    for extra in extras:
        ours = {
            re.match(r"[\w-]+", line)[0].lower()
            for line in requires
            if re.search(f"extra == ['\"]{extra}['\"]", line)
        }
        assert not {"uwsgi", "pyuwsgi"} <= ours, extra


@pytest.mark.parametrize(
    "entry_point",
    importlib.metadata.distribution("keyfront").entry_points,
    ids=lambda entry_point: f"{entry_point.group}:{entry_point.name}",
)
def test_entry_point_resolves(entry_point: importlib.metadata.EntryPoint, tmp_path: Path) -> None:
    # In a process of its own, since loading Keystone or a pytest plugin changes the process.
    load = (
        "import sys\n"
        "from importlib.metadata import EntryPoint\n"
        "assert EntryPoint(*sys.argv[1:]).load() is not None\n"
    )
    names = (entry_point.name, entry_point.value, entry_point.group)
    run(sys.executable, "-c", load, *names, cwd=tmp_path)


@pytest.mark.parametrize("folder", TREES)
def test_folders_are_importable_only_inside_keyfront(folder: str, tmp_path: Path) -> None:
    ask = (
        "import sys\n"
        "from importlib.util import find_spec\n"
        "assert find_spec(sys.argv[1]) is None\n"
        "assert find_spec('keyfront.' + sys.argv[1]) is not None\n"
    )
    run(sys.executable, "-c", ask, folder, cwd=tmp_path)


def test_data_files_are_readable_through_importlib() -> None:
    data = [
        path.relative_to(ROOT / "deploy").as_posix()
        for path in (ROOT / "deploy").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    for name in data:
        packed = importlib.resources.files("keyfront.deploy").joinpath(name)
        assert packed.read_bytes() == (ROOT / "deploy" / name).read_bytes()
    assert importlib.resources.files("keyfront").joinpath("py.typed").is_file()

"""A project against its own release: --gate-baseline in all its forms, with nothing downloaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.pytest_runs import run, run_apart

pytest_plugins = ["pytester"]

MODULE = "def work():\n    return sum(range({}))\n"
SETUP = """\
from setuptools import setup

setup(name="hot", version="1.0", package_dir={"": "src"}, py_modules=["hot"])
"""
TESTS = """\
import hot


def test_work(paired):
    paired(hot.work)
"""


def project(folder: Path) -> None:
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "hot.py").write_text(MODULE.format(200))
    (folder / "setup.py").write_text(SETUP)


@pytest.fixture
def release(pytester: pytest.Pytester, tmp_path: Path) -> Path:
    """The sources of a release beside a project that is the same until it is changed."""
    made = tmp_path / "release"
    project(made)
    project(pytester.path)
    (pytester.path / "test_hot.py").write_text(TESTS)
    pytester.makeini("[pytest]\npythonpath = src\n")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same release, built once: where it does not matter in which form it is given."""
    folder = tmp_path_factory.mktemp("wheel")
    project(folder / "release")
    hook = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", hook, str(folder)]
    subprocess.run(command, cwd=folder / "release", check=True, capture_output=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def slow_down(pytester: pytest.Pytester) -> None:
    (pytester.path / "src" / "hot.py").write_text(MODULE.format(1000))


def speed_up(pytester: pytest.Pytester) -> None:
    (pytester.path / "src" / "hot.py").write_text(MODULE.format(20))


def test_the_same_passes_and_a_slower_one_fails(
    pytester: pytest.Pytester, release: Path, wheel: Path
) -> None:
    # two processes differ a little, beside others by half (seen: 1.46)
    same = run_apart(pytester, f"--gate-baseline={wheel}", "--gate-limit=3")
    same.assert_outcomes(passed=1)
    same.stdout.re_match_lines([r"PASS +\d\.\d{3} .* limit 3, .*test_work", r".*control"])
    slow_down(pytester)
    slower = run(pytester, f"--gate-baseline={release}")
    slower.assert_outcomes(failed=1)
    slower.stdout.re_match_lines(
        [
            rf"candidate .*, baseline .* per call \(medians\), baseline in {release}",
            r"pairs of processes: (\d+\.\d{3} FAIL, ){2}\d+\.\d{3} FAIL",
        ]
    )
    # a release is built from a copy
    assert sorted(path.name for path in release.iterdir()) == ["setup.py", "src"]


@pytest.mark.usefixtures("release")
def test_a_wheel_is_a_release(pytester: pytest.Pytester, wheel: Path) -> None:
    speed_up(pytester)
    result = run(pytester, f"--gate-baseline={wheel}")
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines([r"PASS +0\.[0-7]\d\d .*test_work"])


def test_a_revision_is_a_release(pytester: pytest.Pytester, release: Path) -> None:
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run([*git, *arguments], cwd=pytester.path, check=True, timeout=300)
    speed_up(pytester)
    result = run(pytester, "--gate-baseline=v1", "--gate-json=gate.json")
    result.assert_outcomes(passed=1)
    result.stdout.re_match_lines([r"PASS +0\.[0-7]\d\d .*test_work"])
    (gate,) = json.loads((pytester.path / "gate.json").read_text())["gates"]
    assert gate["against"] == "in v1"


@pytest.mark.usefixtures("release")
def test_what_a_release_does_not_know_has_to_be_named(
    pytester: pytest.Pytester, wheel: Path
) -> None:
    hot = pytester.path / "src" / "hot.py"
    hot.write_text(hot.read_text() + "\n\ndef fresh():\n    return work()\n")
    test = pytester.path / "test_hot.py"
    test.write_text(TESTS.replace("hot.work", "hot.fresh"))
    unnamed = run(pytester, f"--gate-baseline={wheel}")
    unnamed.assert_outcomes(failed=1)
    unnamed.stdout.fnmatch_lines(
        [
            '*if the release does not know it yet, say so by paired(..., new="why")',
            "E *AttributeError: module 'hot' has no attribute 'fresh'",
        ]
    )
    test.write_text(TESTS.replace("hot.work", 'lambda: hot.fresh(), new="since 1.1"'))
    named = run(pytester, f"--gate-baseline={wheel}")
    named.assert_outcomes(passed=1)
    named.stdout.fnmatch_lines(["NEW *test_work: since 1.1"])


@pytest.mark.usefixtures("release")
def test_modules_from_elsewhere_are_no_release(pytester: pytest.Pytester, wheel: Path) -> None:
    test = pytester.path / "test_hot.py"
    test.write_text(f"import sys\nsys.path.insert(0, {str(pytester.path / 'src')!r})\n{TESTS}")
    result = run(pytester, f"--gate-baseline={wheel}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*hot comes from */src/hot.py, not from the release: *"])


@pytest.mark.parametrize("name", ["nothing-like-that", "no.whl"])
def test_a_release_that_is_none_is_named(
    pytester: pytest.Pytester, release: Path, name: str
) -> None:
    result = run(pytester, f"--gate-baseline={name}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"--gate-baseline = {name}: must be a wheel, *"])
    assert "Traceback" not in result.stdout.str()


def test_a_release_that_cannot_be_built_is_named(
    pytester: pytest.Pytester, tmp_path: Path, release: Path
) -> None:
    broken = tmp_path / "broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    result = run(pytester, f"--gate-baseline={broken}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"--gate-baseline = {broken}: pip cannot install it: *"])

"""The series of OpenStack: that the list, tox's environments, the names and the page are one."""

from __future__ import annotations

import ast
import configparser
import re
from pathlib import Path

import pytest

from keyfront.gateway.keystone import series
from series import functional, installs, matrix

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "series"
LISTED = matrix.listed()["series"]
DOCUMENT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


def test_the_names_are_those_of_the_list() -> None:
    assert {one["keystone"]: one["name"] for one in LISTED} == series.SERIES


def test_each_has_its_constraints() -> None:
    assert {one["name"] for one in LISTED} == {path.stem for path in FOLDER.glob("*.txt")}
    for one in LISTED:
        text = (FOLDER / f"{one['name']}.txt").read_text(encoding="utf-8")
        assert re.search(r"^keystonemiddleware===", text, re.MULTILINE)
        # upper constraints name libraries, and never the service that is tested
        assert not re.search(r"^(keystone|glance|nova|openstack-placement|keyfront)===", text, re.M)


def test_each_has_its_environments() -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    (section,) = [name for name in tox.sections() if name.startswith("testenv:{20")]
    names, pythons, forms = re.findall(r"\{([^}]*)\}", section)
    assert names.split(",") == sorted(one["name"] for one in LISTED)
    wanted = {f"-py{python.replace('.', '')}" for one in LISTED for python in one["pythons"]}
    assert {*pythons.split(",")} == {"", *wanted}
    assert forms == ",-telling,-functional"
    lines = tox[section]["deps"].split("\n")
    for one in LISTED:
        packages = {
            "keystone": "keystone", "glance": "glance", "nova": "nova",
            "placement": "openstack-placement", "neutron": "neutron",
        }  # fmt: skip
        for service, package in packages.items():
            if service not in one:
                assert not any(x.startswith(one["name"]) and package in x for x in lines)
                continue
            form = "-!telling" if service in ("glance", "nova", "neutron") else ""
            assert f"{one['name']}{form}: {package}~={one[service]}.0" in lines
        assert f"{one['name']}: -ctests/series/{one['name']}.txt" in lines


def test_ci_runs_what_tells_most_of_each_but_the_newest() -> None:
    script = (ROOT / ".ci" / "test").read_text(encoding="utf-8")
    (told,) = re.findall(r'^TELLING="(.*)"$', script, re.MULTILINE)
    pairs = [word.split("/") for word in told.split()]
    assert [name for name, _ in pairs] == sorted(one["name"] for one in LISTED)[:-1]
    pythons = {one["name"]: one["pythons"] for one in LISTED}
    # The newest Python that it runs on; the first of all runs the newest series.
    assert all(f"3.{minor}" == pythons[name][-1] for name, minor in pairs)


def test_what_tells_most_is_of_each_part() -> None:
    words = (FOLDER / "telling.args").read_text(encoding="utf-8").split("\n")
    files = [word.partition("::")[0] for word in words if word.startswith("tests/")]
    assert all((ROOT / file).exists() for file in files)
    for part, tests in matrix.listed()["parts"].items():
        assert any(file.startswith(test) for file in files for test in tests), part


def test_the_tests_of_each_part_exist() -> None:
    for part in matrix.listed()["parts"].values():
        for name in part:
            assert (ROOT / name).exists(), name


def test_the_page_has_each_series() -> None:
    for one in LISTED:
        assert re.search(rf"^\| {one['name']}\b[^|]*\| {one['keystone']} \|", DOCUMENT, re.M)


def hooked() -> set[str]:
    """The modules of others that the product asks for by name, to look at or to change."""
    found = set()
    for folder in ("gateway/keystone", "gateway/heartbeat", "middleware/ldap/keystone"):
        for path in (ROOT / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and node.args:
                    name, argument = ast.unparse(node.func), node.args[0]
                    asked = name in {"import_keystone", "importlib.import_module"}
                    if asked and isinstance(argument, ast.Constant):
                        found.add(str(argument.value))
                module = isinstance(node, ast.ImportFrom) and node.module
                if module and module.startswith("keystone.identity."):
                    found |= {f"{module}.{one.name}" for one in node.names}
    return found - {"keystone", "xmlschema"}


def test_the_page_names_each_module_that_is_hooked() -> None:
    modules = hooked()
    assert len(modules) > 20
    absent = sorted(name for name in modules if f"`{name}`" not in DOCUMENT)
    assert not absent


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("30.0.0", "30.0.0 (OpenStack 2026.2)"),
        ("27.1.0.dev3", "27.1.0.dev3 (OpenStack 2025.1)"),
        ("25.0.0", "25.0.0 (of no tested series)"),
        ("unknown", "unknown (of no tested series)"),
    ],
)
def test_a_version_is_told_with_its_series(version: str, said: str) -> None:
    assert series.described(version) == said


def test_the_table_is_made_of_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "RESULTS", tmp_path)
    (one,) = matrix.environments(["2025.1"], ["3.11"])
    report = (
        '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="1"'
        ' timestamp="2026-11-{}T10:00:00+00:00"/></testsuites>'
    )
    one.report("serve").write_text(report.format(5, 0, 29))
    one.report("units").write_text(report.format(9, 2, 28))
    made = matrix.table([one], {"serve": [], "holes": [], "units": []})
    row = "| 2025.1 | 27 | 3.11 | 4 |  | **2 failed**, 6 | 2026-11-28 |"
    assert made.splitlines()[-1] == row
    # What was to be run and left no report does not look as if an earlier run were its own.
    failed = matrix.table([one], {"serve": [], "holes": []}, {(one, "holes")})
    assert failed.splitlines()[-1] == "| 2025.1 | 27 | 3.11 | 4 | **failed** | 2026-11-29 |"
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- series -->\nold\n<!-- /series -->\nafter\n")
    matrix.put_in(made, document)
    text = document.read_text()
    assert text.startswith("before\n<!-- series -->\n\n| OpenStack |")
    assert text.endswith(f"{row}\n\n<!-- /series -->\nafter\n")
    assert "old" not in text
    document.write_text("no markers\n")
    with pytest.raises(SystemExit, match=r"page\.md has no <!-- series -->"):
        matrix.put_in(made, document)


def test_what_was_run_elsewhere_stays_in_the_table(tmp_path: Path) -> None:
    head = "| OpenStack | server | database | identity | image | run |\n|---|---|---|---|---|---|\n"
    here = (
        "| 2026.2 | a | b |  | 5 | 2026-11-29 |\n| 2026.2 | c | b |  |  |  |\n"
        "| 2026.1 | a | b | 7 |  | 2026-11-29 |\n| 2026.1 | c | b |  |  |  |\n"
        "| 2025.2 | a | b | 7 | 5 | 2026-11-29 |"
    )
    elsewhere = (
        "| 2026.2 | a | b | 4 |  | 2026-11-24 |\n| 2026.2 | c | b | 6 |  | 2026-11-23 |\n"
        "| 2026.1 | a | b | **1 failed**, 6 |  | 2026-11-24 |\n"
        "| 2025.2 | a | b | 7 |  | 2026-11-24 |\n| 2024.1 | a | b | 7 | 5 | 2026-11-24 |\n"
    )
    document = tmp_path / "page.md"
    document.write_text(f"<!-- series -->\n\n{head}{elsewhere}\n<!-- /series -->\n")
    for _ in range(2):
        matrix.put_in(head + here, document)
        assert document.read_text() == (
            f"<!-- series -->\n\n{head}"
            "| 2026.2 | a | b | 4 | 5 | 2026-11-24 |\n"  # the day of its oldest figure
            "| 2026.2 | c | b | 6 |  | 2026-11-23 |\n"
            "| 2026.1 | a | b | 7 |  | 2026-11-29 |\n"  # run again, and mended
            "| 2025.2 | a | b | 7 | 5 | 2026-11-29 |\n"  # a series that is no longer listed goes
            "\n<!-- /series -->\n"
        )


def test_a_column_is_known_by_its_name() -> None:
    earlier = (
        "| OpenStack | server | database | identity | image | run |\n|---|---|---|---|---|---|\n"
        "| 2026.2 | a | b | 4 | 5 | 2026-11-24 |"
    )
    new = (
        "| OpenStack | server | database | image | compute | run |\n|---|---|---|---|---|---|\n"
        "| 2026.2 | a | b |  | 6 | 2026-11-29 |"
    )
    row = "| 2026.2 | a | b | 5 | 6 | 2026-11-24 |"
    assert matrix.with_earlier(new, earlier).splitlines()[2:] == [row]


def test_what_is_not_listed_is_refused() -> None:
    with pytest.raises(SystemExit, match="lists no such series"):
        matrix.environments(["2019.1"], None)


def test_the_table_of_other_suites_is_made_of_results() -> None:
    passed = {"passed": 138, "skipped": 0, "failed": 0}
    bad = {"passed": 60, "skipped": 3, "failed": 1}
    results = {
        "2026.2": {
            "uwsgi postgresql": {"identity": passed, "date": "2026-11-29"},
            "nginx+uwsgi mariadb": {"identity": passed, "image": bad, "date": "2026-11-28"},
        }
    }
    head, _, *rows = matrix.with_earlier(functional.table(results), "").splitlines()
    suites = "identity | image | compute | network | placement"
    assert head == f"| OpenStack | server | database | {suites} | run |"
    assert rows == [
        "| 2026.2 | `uwsgi` | postgresql | 138 |  |  |  |  | 2026-11-29 |",
        "| 2026.2 | `nginx+uwsgi` | mariadb | 138 | **1 failed**, 60, 3 skipped |  |  |  |"
        " 2026-11-28 |",
    ]


def test_the_table_of_installations_tells_what_pip_did() -> None:
    before = {"glance": "33.0.0", "webob": "1.8.9", "six": "1.17.0"}
    quiet = installs.compared(before, {**before, "keyfront": "0.1.0"})
    assert quiet == {"added": [], "moved": []}
    after = {"glance": "33.0.0", "webob": "1.8.8", "keyfront": "0.1.0", "jinja2": "3.1.6"}
    loud = installs.compared(before, after)
    results = {
        "2026.2 glance": {**loud, "date": "2026-11-29"},
        "2026.2 keystone": {**quiet, "extras": loud, "date": "2026-11-29"},
    }
    head, _, *rows = matrix.with_earlier(installs.table(results), "").splitlines()
    assert head == "| OpenStack | Python | into that of | added | moved | run |"
    moved = "jinja2 | six 1.17.0 to nothing, webob 1.8.9 to 1.8.8 | 2026-11-29 |"
    assert rows == [
        "| 2026.2 | 3.13 | keystone | nothing | nothing | 2026-11-29 |",
        f"| 2026.2 | 3.13 | keystone, extras | {moved}",
        f"| 2026.2 | 3.13 | glance | {moved}",
    ]


def test_the_page_shows_each_installation_and_none_that_moved_something() -> None:
    _, _, rest = DOCUMENT.partition(installs.START)
    shown, ended, _ = rest.partition(installs.END)
    assert ended
    rows = [line.split(" | ") for line in shown.strip().splitlines()[2:]]
    wanted = {(one["name"], name) for one in LISTED for name in installs.SERVICES if name in one}
    assert {(row[0].strip("| "), row[2]) for row in rows if "extras" not in row[2]} == wanted
    assert {row[4] for row in rows} == {"nothing"}


def test_the_page_has_a_place_for_them_and_shows_only_what_passed() -> None:
    before, found, rest = DOCUMENT.partition(functional.START)
    table, ended, _ = rest.partition(functional.END)
    assert before and found and ended
    assert "failed" not in table


def test_identity_runs_everywhere_and_what_services_ask_once(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functional, "find_spec", lambda name: object())
    where = [
        (suite, server, database)
        for suite in functional.SUITES
        for server in functional.SHAPES
        for database in functional.DATABASES
        if functional.wanted(suite, server, database)
    ]
    assert [one[0] for one in where].count("identity") == 10
    suites = ("image", "compute", "network", "placement")
    assert where[10:] == [(suite, *functional.SERVICES_ON) for suite in suites]
    monkeypatch.setattr(functional, "find_spec", lambda name: None)
    assert not functional.wanted("compute", *functional.SERVICES_ON)
    assert not functional.wanted("network", *functional.SERVICES_ON)

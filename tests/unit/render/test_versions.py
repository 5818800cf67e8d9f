"""Which versions files are rendered for."""

from __future__ import annotations

from pathlib import Path

import pytest

from keyfront.errors import OptionError
from keyfront.gateway.render import versions
from keyfront.gateway.render.versions import HYBRID, NEWEST, Version


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of the system's programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(versions, "SYSTEM_PATH", str(folder))
    return folder


def script(path: Path, says: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)


def test_nothing_here_is_the_newest(system: Path, tmp_path: Path) -> None:
    found = versions.find(tmp_path)
    for name, newest in NEWEST.items():
        assert (found[name].text, found[name].how) == (newest, "newest")
        assert "none was found" in str(found[name])
    assert found["nginx"].has("http_v2_module")


def test_they_are_asked(system: Path, tmp_path: Path) -> None:
    script(system / "nginx", "echo 'nginx version: nginx/1.18.0 (Ubuntu)' >&2\n"
           "echo 'configure arguments: --with-http_ssl_module --with-pcre-jit' >&2")
    script(system / "httpd", "echo 'Server version: Apache/2.4.37 (Red Hat)'")
    script(system / "haproxy", "echo 'HAProxy version 2.6.12-1+deb12u2 2024/01/01'")
    script(tmp_path / "venv/bin/uwsgi", '[ "$1" = --version ] && echo 2.0.28 || echo " --listen x"')
    so = tmp_path / "venv/lib/python3.11/site-packages/mod_wsgi/server/mod_wsgi-py311.so"
    so.parent.mkdir(parents=True)
    so.touch()
    (so.parents[2] / "mod_wsgi-6.0.3-py3.11.egg-info").mkdir()
    assert versions.find(tmp_path / "venv")["mod_wsgi"].text == "6.0.3", "by an old pip"
    (so.parents[2] / "mod_wsgi-6.0.3-py3.11.egg-info").rmdir()
    (so.parents[2] / "mod_wsgi-6.0.3.dist-info").mkdir()
    found = versions.find(tmp_path / "venv")
    assert [found[x].text for x in ("nginx", "apache", "haproxy", "uwsgi", "mod_wsgi")] == [
        "1.18.0", "2.4.37", "2.6.12", "2.0.28", "6.0.3",
    ]
    assert found["nginx"].features == {"http_ssl_module"}
    # as pyuwsgi's is
    assert found["uwsgi"].has("script")
    assert found["uwsgi"].has("listen") and not found["uwsgi"].has("route-run")
    assert found["uwsgi"].program == tmp_path / "venv/bin/uwsgi"
    assert found["mod_wsgi"].program == so


@pytest.mark.parametrize(
    ("words", "has"),
    [
        ("OpenSSL 3.0.19 27 Jan 2026", False), ("OpenSSL 3.4.3 1 Jul 2025", False),
        ("OpenSSL 3.5.0 8 Apr 2025", True), ("OpenSSL 3.10.0 1 Jan 2030", True),
        ("OpenSSL 4.0.0 14 Apr 2026", True), ("OpenSSL 1.1.1 (compatible; AWS-LC 1.60.0)", False),
        ("BoringSSL", False), ("LibreSSL 4.1.0", False), ("nothing", False),
    ],
)  # fmt: skip
def test_who_has_the_hybrid_group(system: Path, tmp_path: Path, words: str, has: bool) -> None:
    script(system / "nginx", f"echo nginx version: nginx/1.26.3; echo 'built with {words}'")
    script(system / "haproxy", '[ "$1" = -vv ] && echo HAProxy version 3.0.11; '
           f"echo 'Built with OpenSSL version : OpenSSL 3.5.0'; "
           f"echo 'Running on OpenSSL version : {words}'")
    script(system / "httpd", "echo 'Server version: Apache/2.4.65'")
    assert not versions.find(tmp_path)["apache"].has(HYBRID), "it does not tell"
    script(system / "openssl", f"echo 'OpenSSL 3.5.1 1 Jul 2025 (Library: {words})'")
    found = versions.find(tmp_path)
    assert [found[name].has(HYBRID) for name in ("nginx", "haproxy", "apache")] == [has] * 3


def test_nginx_that_runs_with_another_openssl(system: Path, tmp_path: Path) -> None:
    says = "echo nginx/1.26.3; echo 'built with OpenSSL 3.5.1 1 Jul (running with OpenSSL {})'"
    for running, has in (("3.0.19 27 Jan 2026", False), ("3.5.4 30 Sep 2025", True)):
        script(system / "nginx", says.format(running))
        assert versions.find(tmp_path)["nginx"].has(HYBRID) == has


def test_nothing_is_known_of_the_openssl_of_one_that_is_not_here(
    system: Path, tmp_path: Path
) -> None:
    script(system / "openssl", "echo 'OpenSSL 3.5.1 1 Jul 2025 (Library: OpenSSL 3.5.1)'")
    found = versions.find(tmp_path, {"nginx": "1.30.0"})
    assert not [name for name in NEWEST if found[name].has(HYBRID)]


@pytest.mark.parametrize("says", ["exit 1", "echo what?", "kill -9 $$"])
def test_one_that_does_not_tell_is_as_if_it_were_not_here(
    system: Path, tmp_path: Path, says: str
) -> None:
    script(system / "nginx", says)
    assert versions.find(tmp_path)["nginx"].how == "newest"


def test_the_operator_knows_better(system: Path, tmp_path: Path) -> None:
    script(system / "nginx", "echo nginx/1.18.0")
    found = versions.find(tmp_path, versions.parse_assumed(["nginx=1.22.1", "uwsgi=2.0.21"]))
    assert (found["nginx"].text, found["nginx"].how) == ("1.22.1", "assumed")
    assert found["uwsgi"].at_least(2, 0, 21) and not found["uwsgi"].at_least(2, 0, 22)


@pytest.mark.parametrize("text", ["nginx", "nginx=", "nginx=new", "lighttpd=1.4", "nginx=1.2\n3"])
def test_assumptions_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="--assume"):
        versions.parse_assumed([text])


def test_an_option_is_known_by_asking_or_by_its_release() -> None:
    asked = Version(name="uwsgi", text="2.0.31", how="found", features=frozenset({"a"}))
    assert asked.knows("a", 9) and not asked.knows("b", 2)
    told = Version(name="uwsgi", text="2.0.21", how="assumed")
    assert told.knows("b", 2, 0, 21) and not told.knows("b", 2, 0, 22)

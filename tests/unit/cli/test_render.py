"""``keyfront render``: what it writes, keeps, shows and refuses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from keyfront.cli import main as cli
from keyfront.gateway.render import certificates

# Of another machine: nothing is looked for on this one.
ASSUMED = ("uwsgi=2.0.31", "nginx=1.22.1", "apache=2.4.65", "haproxy=2.6.12", "mod_wsgi=6.1.1")
HERE = ("--cores", "2", "--memory", "4G")
MACHINE = (*HERE, *(word for server in ASSUMED for word in ("--assume", server)))


def run(folder: Path, *words: str) -> int:
    return cli.main(["render", str(folder), *MACHINE, *words])


def content(folder: Path) -> dict[str, bytes]:
    return {str(x.relative_to(folder)): x.read_bytes() for x in folder.rglob("*") if x.is_file()}


def test_files_and_where_they_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "d") == 0
    out = capsys.readouterr().out
    assert "nginx+uwsgi, profile standard" in out
    assert f"cp -r {tmp_path}/d/system/. /" in out
    assert {"uwsgi.ini", "nginx.conf", "keystone.ini"} <= set(content(tmp_path / "d"))


def test_again_by_the_command_in_the_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ("--server", "apache+uwsgi", "--json-logs", "--assume", "nginx=1.22.1", "--nodes", "2",
            "--memcached", "192.0.2.9:11211", "--haproxy", "192.0.2.1:5000,192.0.2.2:5000",
            "--self-signed", "cloud.example.org", "--hsts", "600", "--http-redirect",
            "--profile", "large", "--config", str(tmp_path / "config"))
    assert run(tmp_path / "d", *told) == 0
    before = content(tmp_path / "d")
    head = (tmp_path / "d/uwsgi.ini").read_text().partition("\n\n")[0].splitlines()
    start = next(i for i, line in enumerate(head) if "keyfront render" in line)
    end = next(i for i, line in enumerate(head) if line.startswith("# Change what"))
    command = " ".join(line.removeprefix("#").strip() for line in head[start:end])
    assert cli.main(shlex.split(command)[1:]) == 0
    assert content(tmp_path / "d") == before
    assert " new" not in capsys.readouterr().out.rpartition("profile large")[2]


def test_what_is_named_and_not_here_is_said_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv = tmp_path / "venv"
    words = ["render", str(tmp_path / "d"), *HERE, "--server", "mod_wsgi"]
    words += ["--virtualenv", str(venv)]
    words += ["--tls-certificate", "/no.crt", "--tls-key", "/no.key", "--assume", "apache=2.4.65"]
    assert cli.main(words) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.split(" is not here")[0] for line in told] == [
        "keyfront: /no.crt", "keyfront: /no.key",
        "keyfront: /usr/lib/apache2/modules/mod_wsgi.so", f"keyfront: {venv}/bin/keyfront",
    ]  # fmt: skip
    assert f"apache.conf names it: run apt install apache2-dev gcc, then {venv}/bin/pip" in told[2]
    assert "'keyfront[mod-wsgi]'" in told[2]
    assert (tmp_path / "d/apache.conf").exists()
    assert run(tmp_path / "e", "--server", "mod_wsgi", "--self-signed", "localhost") == 0
    assert capsys.readouterr().err == ""


def test_a_server_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    venv = str(tmp_path / "venv")
    words = ("--virtualenv", venv, "--assume", "nginx=1.22.1", "--server", "nginx+uwsgi")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keyfront.gateway.render.versions.SYSTEM_PATH", str(tmp_path))
        assert cli.main(["render", str(tmp_path / "d"), *HERE, *words]) == 1
    lines = capsys.readouterr().err.splitlines()
    for line, program in zip(lines, ("keyfront", "uwsgi"), strict=True):
        start = f"keyfront: {venv}/bin/{program} is not here, and system/etc/systemd/"
        assert line.startswith(start)
        assert f"run {venv}/bin/pip install 'keyfront[uwsgi]'" in line


def test_diff_shows_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "d", "--diff", "--self-signed", "localhost") == 1
    assert not (tmp_path / "d").exists()
    assert "+++ " in capsys.readouterr().out
    run(tmp_path / "d")
    assert run(tmp_path / "d", "--diff") == 0
    capsys.readouterr()
    before = content(tmp_path / "d")
    assert run(tmp_path / "d", "--diff", "--latency", "2") == 1
    assert "+harakiri" in capsys.readouterr().out
    assert content(tmp_path / "d") == before


def test_a_hand_s_change_is_kept_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    ini = tmp_path / "uwsgi.ini"
    ini.write_text(ini.read_text().replace("processes = 2", "processes = 3"))
    assert run(tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith(" kept")] == ["uwsgi.ini"]
    assert any(line.startswith("Kept, ") and "--force" in line for line in lines)
    assert "processes = 3" in ini.read_text()
    assert run(tmp_path, "--diff") == 1
    assert run(tmp_path, "--force") == 0
    assert "processes = 3" not in ini.read_text()


def test_another_line_up_s_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    capsys.readouterr()
    run(tmp_path, "--server", "uwsgi")
    lines = capsys.readouterr().out.splitlines()
    assert "nginx.conf" in [line.split()[0] for line in lines if line.endswith(" left over")]
    assert any(line.startswith("Left over ") and "remove" in line for line in lines)
    assert (tmp_path / "nginx.conf").exists()


def test_a_plan_that_cannot_be_met_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "d"
    assert run(where, "--database-connections", "1", "--self-signed", "localhost") == 3
    errors = capsys.readouterr().err
    assert "database.connections: " in errors and "max_connections must be at least" in errors
    assert not where.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--server", "lighttpd"), "--server = lighttpd: must be one of nginx+uwsgi,"),
        (("--profile", "tiny"), "--profile = tiny: must be one of small, standard, large"),
        (("--cores", "0"), "--cores = 0: must be"),
        (("--memory", "-1"), "--memory"),
        (("--memory", "1M"), "--memory"),
        (("--database-connections", "-5"), "--database-connections"),
        (("--hsts", "never"), "--hsts = never"),
        (("--hsts", "60"), "--hsts = 60: must be left out without"),
        (("--self-signed", "a b"), "--self-signed"),
        (("--self-signed", "a", "--tls-certificate", "/x"), "left out with --tls-certificate"),
        (("--tls-certificate", "/x"), "--tls-key"),
        (("--haproxy", "nodes"), "--haproxy"),
        (("--assume", "nginx"), "--assume"),
        (("--public-host", ""), "--public-host = nothing"),
        (("--nosuch",), "--nosuch"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    try:
        status = run(tmp_path / "d", *words)
    except SystemExit as end:
        status = end.code  # type: ignore[assignment]
    assert status == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
    assert not (tmp_path / "d").exists()


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert run(tmp_path / "file" / "d", "--self-signed", "localhost") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "DIR" in error
    assert (tmp_path / "file").read_text() == "x"


def test_a_key_is_shown_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--self-signed", "localhost")
    run(tmp_path, "--self-signed", "localhost", "--diff", "--latency", "9")
    secret = certificates.paths(tmp_path)[1].read_text().splitlines()[1]
    captured = capsys.readouterr()
    assert secret not in captured.out + captured.err
    others = [text for name, text in content(tmp_path).items() if not name.endswith(".key")]
    assert not [text for text in others if secret.encode() in text]

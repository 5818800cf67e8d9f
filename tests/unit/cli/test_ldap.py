"""``keyfront ldap check``: its command line, and its table."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from keyfront.cli import ldap as ldap_commands
from keyfront.cli import main as cli
from keyfront.cli.ldap import Options
from keyfront.errors import DirectoryTimeoutError
from keyfront.middleware.ldap import diagnose as probe
from keyfront.middleware.ldap.diagnose import FAILED, NOTE, OK, WARNING
from keyfront.middleware.ldap.diagnose import ServerReport as Report
from keyfront.middleware.ldap.protocol.tls import TLS
from keyfront.middleware.ldap.protocol.urls import ServerURL
from support.certificates import certificates

URL = "ldap://ds1.example.org:389"


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Options]]:
    """What would be asked of whom; ds9 is away."""
    asked: list[tuple[str, Options]] = []

    def examine(urls: Sequence[ServerURL], chosen: Options) -> Iterator[Report]:
        for url in urls:
            asked.append((url.text, chosen))
            report = Report(url)
            if "ds9" in url.host:
                report.fail("connect", DirectoryTimeoutError("no connection", server=url.text))
            else:
                report.add("connect", OK, "192.0.2.1:389, 0.2 ms", address="192.0.2.1:389")
            yield report

    monkeypatch.setattr(ldap_commands, "examine", examine)
    return asked


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = cli.main(["ldap", "check", *arguments])
    except SystemExit as end:
        status = int(end.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    return err


def test_each_server_is_looked_at_once(
    examined: list[tuple[str, Options]], capsys: pytest.CaptureFixture[str]
) -> None:
    urls = ["ldap://ds1.example.org", "ldaps://ds2.example.org", "LDAP://ds1.example.org:389/"]
    status, out, err = run(capsys, *urls)
    assert (status, err) == (0, "")
    assert [text for text, _ in examined] == [URL, "ldaps://ds2.example.org:636"]
    assert out.splitlines()[:2] == [URL, "  ✓ connect         192.0.2.1:389, 0.2 ms"]
    assert out.endswith("all is well\n")


def test_a_warning_is_not_all_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(ServerURL.parse(URL))
    report.add("bind", WARNING, "the password went in the clear")
    monkeypatch.setattr(ldap_commands, "examine", lambda *_: iter([report]))
    status, out, _ = run(capsys, URL)
    assert status == 0
    assert out.endswith("all works; ! is to be looked at\n")


def test_one_that_fails_is_exit_1(
    examined: list[tuple[str, Options]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "ldap://ds9", URL)
    assert status == 1
    assert "  ✗ connect         no connection\n" in out
    assert out.endswith("1 of 2 failed\n")
    assert len(examined) == 2


def test_for_programs(
    examined: list[tuple[str, Options]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "--json", "ldap://ds9", URL)
    assert status == 1
    first, second = json.loads(out)
    assert (first["url"], first["ok"]) == ("ldap://ds9:389", False)
    assert first["checks"][0]["state"] == "failed"
    assert second["ok"]
    assert second["checks"] == [
        {
            "name": "connect",
            "state": "ok",
            "text": "192.0.2.1:389, 0.2 ms",
            "address": "192.0.2.1:389",
        }
    ]


def test_the_options_reach_the_check(
    examined: list[tuple[str, Options]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the service\n")
    secret.chmod(0o600)
    status, _, _ = run(
        capsys, "--start-tls", "--bind-dn", "cn=s,dc=x", "--password-file", str(secret),
        "--base", "dc=x", "--timeout", "2.5", URL,
    )  # fmt: skip
    assert status == 0
    ((_, chosen),) = examined
    assert chosen.tls.start_tls
    assert (chosen.bind_dn, chosen.password) == ("cn=s,dc=x", "of the service")
    assert (chosen.base, chosen.timeout) == ("dc=x", 2.5)
    assert "of the service" not in repr(chosen)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: URL"),
        (["http://x"], "URL = http://x"),
        (["ldap://x/dc=y"], "URL = "),
        (["--timeout", "0", URL], "--timeout = 0: must be a number of seconds from 0.01 to 600"),
        (["--timeout", "nan", URL], "--timeout = nan"),
        (["--ca-file", "/nowhere", URL], "--ca-file = /nowhere"),
        (["--client-cert", "/nowhere", "ldaps://x"], "--client-cert = /nowhere: must be a file"),
        (["--client-key", "/x", "ldaps://x"], "--client-key = /x: must be given together with"),
        (["--sasl-external", "ldaps://x"], "--client-cert = (not set): must be set with --sasl-ex"),
        (["--sasl-external", "--bind-dn", "cn=x", "ldapi://%2Fx"], "--bind-dn = cn=x: must be"),
        (["--sasl-external", URL], f"EXTERNAL: must be used over TLS only, and {URL} is without"),
        (["--sasl-gssapi", "--sasl-external", "ldaps://x"], "--sasl-gssapi = True: must be left"),
        (["--sasl-gssapi", URL], f"--sasl-gssapi = GSSAPI: must be used over TLS only, and {URL}"),
        (["--sasl-gssapi", "ldapi://%2Fx"], "--sasl-gssapi = GSSAPI: must be used with servers"),
        (["--kerberos-keytab", "/x", URL], "--kerberos-keytab = /x: must be left out without --s"),
        (["--kerberos-without-tls", URL], "--kerberos-without-tls = True: must be left out"),
        (["--start-tls", "ldaps://x"], "--start-tls = ldaps://x:636: must be left out"),
        (["--bind-dn", "", URL], "--bind-dn = (empty)"),
        (["--password-file", "/nowhere", URL], "left out without --bind-dn"),
        (["--bind-dn", "cn=x", "--password-file", "/nowhere", URL], "--password-file = /nowhere"),
        (["--bind-dn", "cn=x", "--password", "hush-hush", URL], "use --password-file"),
        (["--bind-dn", "cn=x", "--password=hush-hush", URL], "use --password-file"),
        (["--pass", "hush-hush", URL], "unrecognized"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    examined: list[tuple[str, Options]],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    error = refusal(capsys, *arguments)
    assert words in error
    if "--pass" not in arguments:
        assert "hush-hush" not in error
    assert not examined


def test_a_client_certificate(
    examined: list[tuple[str, Options]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pair = certificates(tmp_path).client
    shown = ("--client-cert", str(pair.certificate), "--client-key", str(pair.key))
    assert run(capsys, *shown, "ldaps://x", "ldapi://%2Fx", "--sasl-external")[0] == 0
    assert run(capsys, *shown, "ldap://x", "--start-tls")[0] == 0
    assert run(capsys, "ldapi://%2Fx", "--sasl-external")[0] == 0
    found = [chosen for _, chosen in examined]
    assert [each.sasl for each in found] == ["EXTERNAL", "EXTERNAL", None, "EXTERNAL"]
    assert found[0].tls.client_cert == str(pair.certificate)
    assert found[0].tls.client_key == str(pair.key)
    error = refusal(capsys, *shown, "ldap://x")
    assert f"--client-cert = {pair.certificate}: must be left out without ldaps:// or" in error


def test_a_password_is_asked_for_at_a_terminal_only(
    examined: list[tuple[str, Options]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("never read"))
    error = refusal(capsys, "--bind-dn", "cn=x", URL)
    assert "--password-file = (not given)" in error
    answers = ["typed", ""]
    asked: list[str] = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(
        ldap_commands.getpass, "getpass", lambda text: asked.append(text) or answers.pop(0)
    )
    assert run(capsys, "--bind-dn", "cn=x", URL)[0] == 0
    assert asked == ["Password of cn=x: "]
    assert examined[0][1].password == "typed"
    assert "no password" in refusal(capsys, "--bind-dn", "cn=x", URL)


def report() -> Report:
    made = Report(ServerURL.parse(URL))
    made.add("connect", OK, "192.0.2.1:389, 0.2 ms")
    made.add("certificate", WARNING, "ends soon " * 20)
    made.add("naming contexts", NOTE, "dc=" + "x" * 200)
    made.add("search", FAILED, "bell \a and \n new line \x1b[31m")
    return made


def test_a_table_is_80_columns_of_harmless_text() -> None:
    lines = ldap_commands.table(report()).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)
    assert lines[0] == URL
    assert lines[2].startswith("  ! certificate     ends soon")
    assert lines[3].startswith(" " * 20 + "ends soon")
    assert lines[-1].startswith("  ✗ search          bell ? and")


def test_a_terminal_that_knows_ascii_only() -> None:
    for encoding, expected in (("utf-8", "✗"), ("ascii", "x"), ("latin-1", "x")):
        out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert ldap_commands._marks(out)[FAILED] == expected
        out.close()


def test_a_report_is_fine_if_nothing_failed() -> None:
    made = report()
    assert not made.ok
    made.checks.pop()
    assert made.ok


def test_the_server_is_named_once() -> None:
    made = Report(ServerURL.parse(URL))
    made.fail("bind", DirectoryTimeoutError("no answer within 5 s", server=URL))
    assert made.checks[0].text == "no answer within 5 s"


@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("no search_base is given, and the server names none", "no --base is given"),
        ("the password went in the clear; use ldaps:// or start_tls", "or --start-tls"),
        ("dc=x is not shown to cn=x; try another bind_dn", "another --bind-dn"),
    ],
)
def test_options_are_called_as_on_the_command_line(library: str, command: str) -> None:
    made = Report(ServerURL.parse(URL))
    made.add("search", WARNING, library)
    for_programs = ldap_commands._for_programs(made)["checks"][0]["text"]
    for shown in (ldap_commands.table(made), for_programs):
        assert command in shown
        assert "_" not in shown


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, "does not say what it is"),
        ({"objectclass": ["top", "OpenLDAProotDSE"]}, "OpenLDAP"),
        ({"vendorname": ["389 Project"], "vendorversion": ["389/2"]}, "389 Project 389/2"),
        ({"supportedcapabilities": ["1.2.840.113556.1.4.800"]}, "Active Directory"),
    ],
)
def test_who_made_the_server(about: dict[str, list[str]], expected: str) -> None:
    assert probe._vendor(about) == expected


def test_options_show_no_password() -> None:
    assert "hush" not in repr(Options(tls=TLS(), bind_dn="cn=x", password="hush-hush"))

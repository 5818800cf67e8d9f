"""``keyfront doctor`` as a command: pages, exit statuses, secrets, and that it changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keyfront.cli.main import main
from keyfront.gateway.doctor import config_files
from keyfront.gateway.doctor.registry import CHECKS
from support.doctor.cases import CASES
from support.doctor.deployments import CLEAN, DEBIAN_NGINX, KOLLA, LDAP_GALERA
from support.doctor.machines import Machine
from support.programs import own_folder
from support.served import PATIENCE

_CONF = "/etc/keystone/keystone.conf"
_INI = "/etc/keystone/keystone-uwsgi.ini"
_PASSWORD = "hunter2-very-secret"
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def doctor(machine: Machine, folder: Path, *arguments: str) -> int:
    machine.make(folder)
    return main(["doctor", "--root", str(folder), "--assume", "uwsgi=2.0.31", *arguments])


def faulty() -> Machine:
    """A machine with faults in all layers."""
    return (
        DEBIAN_NGINX.swap(_INI, "harakiri = 60\n", "")
        .swap(_INI, "strict = true\n", "stats = 0.0.0.0:1717\n")
        .swap("/etc/nginx/nginx.conf", "worker_connections 4096", "worker_connections 768")
        .swap("/etc/nginx/nginx.conf", "TLSv1.2 TLSv1.3", "TLSv1 TLSv1.2")
    )


def test_errors_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(faulty(), tmp_path) == 1
    page = capsys.readouterr().out
    assert page.index("ERROR U12") < page.index("WARN  U05")
    assert "/etc/nginx/nginx.conf:6" in page
    assert "+ harakiri = 60" in page
    assert "keyfront doctor --explain U05" in page
    for head in ("Found right", "Could not be looked at", "To do"):
        assert f"\n{head}\n" in page


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_clean_ends_with_0(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(CLEAN[name], tmp_path) == 0
    assert "0 errors, 0 warnings, 0 notes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "said"),
    [("30.0.0", "30.0.0 (OpenStack 2026.2)"), ("25.1.0", "25.1.0 (of no tested series)")],
)
def test_the_series_of_the_keystone_found_is_named(
    version: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = f"/opt/keystone/lib/python3.12/site-packages/keystone-{version}.dist-info/METADATA"
    machine = DEBIAN_NGINX.put(installed, "Name: keystone\n").put(
        _INI, f"{DEBIAN_NGINX.files[_INI]}virtualenv = /opt/keystone\n"
    )
    machine = replace(machine, assumed={})
    doctor(machine, tmp_path)
    page = " ".join(capsys.readouterr().out.split())
    assert f" for Keystone {said}: " in page
    doctor(machine, tmp_path, "--json")
    assert json.loads(capsys.readouterr().out)["keystone"] == said


def test_no_keystone_found_names_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doctor(DEBIAN_NGINX, tmp_path)
    assert "for Keystone" not in capsys.readouterr().out


def test_warnings_alone_end_with_0(tmp_path: Path) -> None:
    assert doctor(KOLLA.swap(_INI, "harakiri = 60\n", ""), tmp_path) == 0


def test_the_page_is_80_columns_wide_with_and_without_colour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(faulty(), tmp_path, "--color", "never")
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    doctor(faulty(), tmp_path, "--color", "always")
    coloured = capsys.readouterr().out
    assert "\x1b[1;31m" in coloured
    assert _ESCAPES.sub("", coloured) == plain
    # Lines to be written are whole, however long.
    told = [x for x in plain.splitlines() if not x.startswith(("           + ", "        "))]
    assert max(map(len, told)) <= 80


@pytest.mark.once
@pytest.mark.parametrize("code", sorted(CASES))
def test_every_finding_fits_and_tells_no_secret(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fires, _ = CASES[code]
    for path in (_CONF, "/etc/keystone/domains/keystone.corp.conf"):
        if path in fires.files:
            fires = fires.put(
                path,
                re.sub(
                    r":secret@|= secret\b",
                    lambda x: x[0].replace("secret", _PASSWORD),
                    fires.files[path],
                ),
            )
    doctor(fires, tmp_path, "--json")
    assert _PASSWORD not in capsys.readouterr().out
    doctor(fires, tmp_path)
    page = capsys.readouterr().out
    assert _PASSWORD not in page
    assert all(len(line) <= 80 or line.startswith("        ") for line in page.splitlines())


@pytest.mark.parametrize("options", [(), ("--json",), ("--fix-plan",)])
def test_no_word_of_a_file_steers_the_terminal(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e"
    machine = (
        faulty()
        .swap(_INI, "stats = 0.0.0.0:1717", f"stats = 0.0.0.0:1717{evil}")
        .put(_CONF, f"[DEFAULT]\n{evil}\n")
    )
    doctor(machine, tmp_path, *options)
    page = capsys.readouterr().out
    assert not set(page) & set(evil) - set("]0;owned[2J")


def test_passwords_of_urls_are_masked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = LDAP_GALERA.append(
        _CONF,
        f"[cache]\nmemcache_socket_timeout = "
        f"mysql://u:{_PASSWORD}@h\n[identity]\npassword_hash_rounds = 15\n",
    ).append("/etc/sysctl.d/99-sysctl.conf", f"password = {_PASSWORD}\nnonsense {_PASSWORD}\n")
    doctor(machine, tmp_path)
    assert _PASSWORD not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keystone", "/nowhere"], "--keystone = "),
        (["--uwsgi", "/nowhere"], "--uwsgi = "),
        (["--nginx", "/nowhere"], "--nginx = "),
        (["--apache", "/nowhere"], "--apache = "),
        (["--haproxy", "/nowhere"], "--haproxy = "),
        (["--systemd", "nowhere"], "--systemd = nowhere"),
        (["--explain", "Z99"], "--explain = Z99"),
        (["--nodes", "0"], "--nodes = 0"),
        (["--database-connections", "many"], "--database-connections = many"),
        (["--assume", "perl=5"], "--assume = perl=5"),
        (["--compare", "/nowhere"], "--compare = /nowhere"),
        (["--root", "/nowhere"], "--root = /nowhere"),
    ],
)
def test_input_that_cannot_be_used_ends_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"keyfront: {said}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("code", sorted(CHECKS))
def test_explains_each_code(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", code.lower()]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{code} ({CHECKS[code].level})")
    assert all(len(line) <= 80 or " " not in line.strip() for line in page.splitlines())


def test_json_and_another_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(DEBIAN_NGINX, tmp_path / "one", "--json") == 0
    one = capsys.readouterr().out
    content = json.loads(one)
    assert content["status"] == 0
    assert len(content["node"]["keys"]["fernet_tokens"]) == 4
    assert "key10" not in one
    (tmp_path / "one.json").write_text(one, encoding="utf-8")
    other = DEBIAN_NGINX.put("/etc/keystone/fernet-keys/10", "another").swap(
        _CONF, "expiration = 86400", "expiration = 3600"
    )
    assert doctor(other, tmp_path / "two", "--compare", str(tmp_path / "one.json")) == 1
    page = capsys.readouterr().out
    assert "ERROR K13" in page
    assert "[token] expiration 3600 here, 86400 there" in " ".join(page.split())


def test_named_files_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an operator does it with a file that lies anywhere."""
    file = tmp_path / "uwsgi.ini"
    file.write_text(
        "[uwsgi]\nmodule = keystone.wsgi.api:application\nprocesses = 4\n", encoding="utf-8"
    )
    assert main(["doctor", "--uwsgi", str(file)]) == 1
    page = capsys.readouterr().out
    assert "ERROR U16" in page
    assert str(file) in page


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["debian-nginx", "devstack", "rdo-puppet", "kolla"])
def test_the_fix_plan_is_a_diff_and_changes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = CLEAN[name]
    machine.make(tmp_path)
    before = everything(tmp_path)
    assert main(["doctor", "--root", str(tmp_path), "--fix-plan"]) == 1
    told = capsys.readouterr()
    assert everything(tmp_path) == before
    assert not Path("/etc/keyfront").exists()
    assert "keyfront render /etc/keyfront --server " in told.err
    assert "\n+++ /etc/keyfront/" in told.out
    ours = [line for line in told.out.splitlines() if line.startswith("+")]
    assert [line for line in ours if "***" in line] == [], "what is to be written is whole"
    if name == "debian-nginx":
        assert "--- /etc/keystone/keystone-uwsgi.ini" in told.out
        assert "--- /etc/nginx/nginx.conf" in told.out
        assert "--server nginx+uwsgi " in told.err


def test_the_fix_plan_tells_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = DEBIAN_NGINX.append(
        _INI, f"env = OS_DB_PASSWORD={_PASSWORD}\nlogger = redislog:redis://u:{_PASSWORD}@h\n"
    )
    machine.make(tmp_path)
    main(["doctor", "--root", str(tmp_path), "--fix-plan"])
    told = capsys.readouterr()
    assert re.search(r"^-env .*\*\*\*", told.out, re.MULTILINE)
    assert _PASSWORD not in told.out + told.err


def test_links_of_another_root_lead_nowhere_else(tmp_path: Path) -> None:
    DEBIAN_NGINX.make(tmp_path)
    sites = tmp_path / "etc/nginx/sites-enabled"
    sites.rename(tmp_path / "srv-sites")
    sites.symlink_to("/srv-sites")
    (tmp_path / "etc/keystone/keystone.conf.d").symlink_to("/etc")
    assert main(["doctor", "--root", str(tmp_path), "--assume", "uwsgi=2.0.31"]) == 0
    nginx = config_files.look(tmp_path).nginx
    assert nginx is not None
    assert len(nginx.all("uwsgi_pass")) == 1
    (tmp_path / "srv-sites").rename(tmp_path / "gone")
    sites.unlink()
    sites.symlink_to(sites)
    assert main(["doctor", "--root", str(tmp_path)]) in (0, 1)


def test_what_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = DEBIAN_NGINX.swap(
        "/etc/nginx/nginx.conf", "/etc/nginx/mime.types", "/etc/nginx/gone.types"
    )
    doctor(machine, tmp_path)
    page = " ".join(capsys.readouterr().out.split())
    assert "/etc/nginx/gone.types: /etc/nginx/nginx.conf includes it and it is not there" in page


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder to be opened to others: pytest's are closed by each one that starts."""
    with own_folder("doctor") as found:
        yield found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_as_a_user_who_may_read_little(elsewhere: Path) -> None:
    DEBIAN_NGINX.make(elsewhere)
    for path in (elsewhere, *elsewhere.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (elsewhere / "etc/keystone/keystone.conf").chmod(0o640)
    (elsewhere / "etc/keystone/fernet-keys").chmod(0o700)
    (elsewhere / "etc/nginx/sites-enabled").chmod(0o700)
    # The first run imports: this Python may lie where others may not read.
    code = (
        "import os, sys\nfrom keyfront.cli.main import main\n"
        "words = ['doctor', '--root', sys.argv[1]]\n"
        "main(words); sys.stdout.flush(); os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "print('AS NOBODY'); sys.exit(main(words))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(elsewhere)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=PATIENCE,
    )
    said = " ".join(done.stdout.partition("AS NOBODY")[2].split())
    assert done.returncode in (0, 1), said
    assert "Traceback" not in said
    assert "/etc/keystone/keystone.conf: permission denied: run this as root" in said
    assert "uWSGI U01" in said


#: Lines of others' files: each has a secret where a tool or an operator writes it.
_SECRET_LINES = {
    "/etc/nginx/sites-enabled/keystone": (
        'proxy_set_header Authorization "Basic {}";',
        "proxy_set_header X-Api-Key {};",
        "uwsgi_param HTTP_X_SERVICE {};",
        "auth_basic_user_file {};",
        "set $upstream_key {};",
        "# once it was {}",
    ),
    "/etc/apache2/apache2.conf": (
        "OIDCClientSecret {}",
        "OIDCCryptoPassphrase {}",
        'RequestHeader set Authorization "Basic {}"',
        "RequestHeader set X-Api-Key {}",
        "SetEnv DB_URL {}",
        "AuthLDAPBindPassword {}",
        "BalancerMember http://h route={}",
        "ProxyPass /x http://h/ key={}",
        "Define TOKEN {}",
    ),
    "/etc/haproxy/haproxy.cfg": (
        "    stats auth admin:{}",
        "    cookie {} insert",
        "    http-request set-header Authorization Bearer\\ {}",
        "    user admin insecure-password {}",
        "    acl known hdr(X-Api) -m str {}",
    ),
    "/etc/keystone/keystone-uwsgi.ini": (
        "env = AWS_SECRET={}",
        "env = FOO_KEY={}",
        "logger = redislog:redis://u:{}@h",
        "route = ^/x basicauth:r,{}",
        "stats-push = statsd:h,{}",
        "; {}",
    ),
}


@pytest.mark.parametrize("lineup", ["debian-nginx", "devstack", "kolla", "charm", "rdo-puppet"])
def test_the_fix_plan_shows_no_secret_of_others_lines(
    lineup: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, secrets = CLEAN[lineup], []
    for path, lines in _SECRET_LINES.items():
        for number, line in enumerate(lines if path in machine.files else ()):
            secrets.append(f"QWxhZGRpbjpPcGVu{number}{path[-3:]}")
            machine = machine.append(path, f"{line.format(secrets[-1])}\n")
    machine.make(tmp_path)
    main(["doctor", "--root", str(tmp_path), "--fix-plan"])
    told = capsys.readouterr()
    assert "\n+++ " in told.out
    assert [x for x in secrets if x in told.out + told.err] == []
    doctor(machine, tmp_path)
    page = capsys.readouterr().out
    assert [x for x in secrets if x in page] == []


def test_the_fix_plan_shows_what_render_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DEBIAN_NGINX.make(tmp_path)
    main(["doctor", "--root", str(tmp_path), "--fix-plan"])
    plan = capsys.readouterr().out
    for line in ("processes = 4", "listen = 1024", "worker_rlimit_nofile 16384;"):
        assert f"\n-{line}" in plan


#: What is right for a server, and need not be what an option of keyfront render takes.
_ODD = [
    ("ssl_certificate /etc/ssl/both.pem;", ""),
    ("", "inet:localhost:11211"),
    ("", "inet6:[::1]:11211,unix:/run/m.sock"),
    ("", "nonsense of somebody:port"),
]


@pytest.mark.parametrize(("certificate", "servers"), _ODD)
def test_the_fix_plan_takes_over_what_it_can(
    certificate: str, servers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = DEBIAN_NGINX
    if certificate:
        site = "/etc/nginx/sites-enabled/keystone"
        machine = machine.swap(site, "    location", f"    {certificate}\n    location")
    if servers:
        machine = machine.swap(_CONF, "192.0.2.11:11211,192.0.2.12:11211", servers)
    machine.make(tmp_path)
    assert main(["doctor", "--root", str(tmp_path), "--fix-plan"]) == 1
    told = capsys.readouterr()
    assert "\n+++ /etc/keyfront/nginx.conf" in told.out
    if servers.startswith("inet:"):
        assert "--memcached localhost:11211" in told.err


_SSL = "/etc/ssl/both.pem"


@pytest.mark.parametrize("key", ["", f"    ssl_certificate_key {_SSL};\n"])
def test_the_fix_plan_of_one_file_with_certificate_and_key(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nginx = DEBIAN_NGINX.swap(
        "/etc/nginx/sites-enabled/keystone",
        "    location",
        f"    ssl_certificate {_SSL};\n{key}    location",
    )
    apache = CLEAN["devstack"].append(
        "/etc/apache2/sites-enabled/keystone-api.conf",
        f"SSLEngine on\nSSLCertificateFile {_SSL}\n"
        + (f"SSLCertificateKeyFile {_SSL}\n" if key else ""),
    )
    for number, (machine, lines) in enumerate(
        (
            (nginx, (f"ssl_certificate {_SSL};", f"ssl_certificate_key {_SSL};")),
            (apache, (f"SSLCertificateFile {_SSL}", f"SSLCertificateKeyFile {_SSL}")),
        )
    ):
        root = tmp_path / str(number)
        machine.make(root)
        assert main(["doctor", "--root", str(root), "--fix-plan"]) == 1
        told = capsys.readouterr()
        assert f"--tls-certificate {_SSL} --tls-key {_SSL}" in told.err
        # Of nginx the operator's own line stays as it is, so it is in the diff without a mark.
        written = [x[1:].strip().replace('"', "") for x in told.out.splitlines() if x[:1] in "+ "]
        assert set(lines) <= set(written), written


@pytest.mark.parametrize(
    ("listen", "option"),
    [
        ("5000 ssl", "--listen '*:5000'"),
        ("192.0.2.1:5000 ssl", "--listen 192.0.2.1:5000"),
        ("0.0.0.0:5000 ssl default_server", "--listen '*:5000'"),
        ("[::]:5000 ssl ipv6only=off", "--listen '*:5000'"),
        ("[2001:db8::1]:5000 ssl", "--listen '[2001:db8::1]:5000'"),
        ("*:443 ssl http2", "--listen '*:443'"),
        ("localhost:5000 ssl", "--listen localhost:5000"),
        ("unix:/run/nginx.sock ssl", ""),
    ],
)
def test_the_fix_plan_listens_as_the_server_does(
    listen: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DEBIAN_NGINX.swap(
        "/etc/nginx/sites-enabled/keystone", "listen 5000 ssl", f"listen {listen}"
    ).make(tmp_path)
    assert main(["doctor", "--root", str(tmp_path), "--fix-plan"]) == 1
    told = capsys.readouterr()
    assert "not taken over" not in told.err
    assert (option or "keyfront render /etc/keyfront --server nginx+uwsgi") in told.err
    assert ("--listen" in told.err) is bool(option)


@pytest.mark.parametrize(
    "node",
    [
        {"versions": [1]},
        {"versions": {"keystone": 1}},
        {"keys": {"fernet_tokens": "abc"}},
        {"keys": {"fernet_tokens": [1]}},
        {"workers": {"processes": "4"}},
        {"settings": []},
        {"clocks": {"a": "b"}},
    ],
)
def test_another_nodes_words_of_another_kind(
    node: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.json"
    file.write_text(json.dumps({"node": node}), encoding="utf-8")
    assert doctor(DEBIAN_NGINX, tmp_path / "root", "--compare", str(file)) == 2
    assert "its node has another kind of" in capsys.readouterr().err


def test_a_link_needs_nothing_but_what_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor(faulty(), tmp_path, "--json")
    for one in json.loads(capsys.readouterr().out)["findings"]:
        words = one["link"].split()
        assert words[0] == "keyfront"
        assert main(words[1:]) == 0

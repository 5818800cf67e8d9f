"""Who may reach the epochs in Redis and how: rights, TLS, socket, database, prefix, commands."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("redis")

from keyfront.cli import main as cli
from keyfront.errors import CoordinatorError
from keyfront.middleware.tokens.coordinator.factory import coordinator_of
from keyfront.middleware.tokens.coordinator.redis import outages
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.middleware.tokens.counters import HITS
from keyfront.middleware.tokens.epochs import ALL_SLOT, DIGEST, Slots, slots
from keyfront.middleware.tokens.invalidation import change_log
from keyfront.middleware.tokens.invalidation.change_log import Coordinators
from keyfront.middleware.tokens.node_cache import NodeCache
from support.certificates import Certificates, certificates
from support.clocks import Clock
from support.redis_epochs import KEY, TIMEOUT, RedisClock, values
from support.redis_servers import RedisServer, redis_server

ENTRY = Slots((ALL_SLOT, 101))
CHANGED = Slots((101,))
DOCUMENT = Path(__file__).parents[3] / "docs" / "cluster.md"


def users() -> list[str]:
    """The lines of the ACL that docs/cluster.md gives, with passwords."""
    lines = re.findall(r"^ +(user keyfront-\S+ .*)$", DOCUMENT.read_text(), re.MULTILINE)
    assert len(lines) == 2
    return [line.replace(">SECRET", ">hush") for line in lines]


def attach(url: str, *, create: bool = True, **options: object) -> Redis:
    made = coordinator_of(values(url, **options), create)
    assert made is not None
    return made


def change(coordinator: Redis) -> None:
    coordinator.stamp(coordinator.mark(CHANGED))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server(acl=users()) as server:
        yield server


@pytest.fixture(autouse=True)
def no_waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "server" in request.fixturenames:
        RedisClock(request.getfixturevalue("server")).put_in_place(monkeypatch)


def test_the_rights_that_the_document_gives(server: RedisServer) -> None:
    keystone = attach(server.url_of("keyfront-keystone:hush"))
    service = attach(server.url_of("keyfront-service:hush"), create=False)
    lease = attach(server.url_of("keyfront-service:hush"), create=False, consistency="lease")
    change(keystone)
    keystone.flush()
    assert keystone.recover() == 0
    assert keystone.statistics()["flushes"] == 1
    for one in (keystone, service, lease):
        epoch = one.now()
        assert one.fresh(epoch, ENTRY)
    change(keystone)
    assert not service.fresh(epoch, ENTRY)
    # Nothing that it was refused is asked for by the way.
    assert server.client.acl_log() == []
    for deed in (service.flush, service.recover, lambda: service.mark(CHANGED)):
        with pytest.raises(CoordinatorError, match="permission"):
            deed()
    assert service.fresh(service.now(), ENTRY)
    elsewhere = attach(server.url_of("keyfront-service:hush"), coordinator_prefix="other:")
    with pytest.raises(CoordinatorError, match="permission"):
        elsewhere.now()
    for one in (keystone, service, lease, elsewhere):
        one.close()


def test_what_is_kept_there_names_nobody(server: RedisServer) -> None:
    """Changes, under way and made, are numbers of slots, which many names share."""
    one = attach(server.url_of("keyfront-keystone:hush"))
    named = slots(["user:jane-doe", "grants:user:jane-doe", "project:payroll"], one.slot_count)
    one.stamp(one.mark(named))
    under_way = one.mark(named)
    kept = [(key, server.client.hgetall(key)) for key in server.client.scan_iter()]
    assert len(kept) > 1
    assert not re.search("jane|doe|payroll|hush", repr(kept))
    one.stamp(under_way)
    one.close()


def test_a_wrong_password_is_told_and_not_shown(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    one = attach(server.url_of("keyfront-keystone:swordfish"))
    with pytest.raises(CoordinatorError, match="invalid username-password") as caught:
        one.now()
    assert not one.fresh((1, 1), ENTRY)  # type: ignore[arg-type]
    assert "swordfish" not in f"{caught.value!r} {caplog.text} {one!r} {caught.value.__cause__}"
    one.close()


def test_prefixes_and_databases_are_tables_of_their_own(server: RedisServer) -> None:
    first = attach(server.url)
    change(first)
    epoch = first.now()
    other = attach(server.url, coordinator_prefix="region2:")
    another = attach(f"{server.url}/3")
    for one in (other, another):
        assert one.now().generation != epoch.generation
        one.flush()
    assert first.fresh(epoch, ENTRY)
    assert server.client.exists(KEY, f"region2:epochs:{DIGEST}") == 2
    for one in (first, other, another):
        one.close()


def test_a_socket(server: RedisServer) -> None:
    one = attach(f"unix://keyfront-keystone:hush@{server.socket}")
    change(one)
    assert one.fresh(one.now(), ENTRY)
    one.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.getbasetemp())


def test_tls(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tls=made, config=["tls-auth-clients yes"]) as server:
        RedisClock(server).put_in_place(monkeypatch)
        monkeypatch.setattr(outages, "time", Clock())
        mine = {
            "coordinator_cert_file": str(made.client.certificate),
            "coordinator_key_file": str(made.client.key),
        }
        one = attach(server.url, coordinator_ca_file=str(made.ca_file), **mine)
        change(one)
        assert one.fresh(one.now(), ENTRY)
        one.close()
        for wrong in (
            {"coordinator_ca_file": str(made.other_ca_file), **mine},
            {**mine},  # the system knows no such authority
            {"coordinator_ca_file": str(made.ca_file)},
        ):
            other = attach(server.url, **wrong)
            with pytest.raises(CoordinatorError):
                other.now()
            other.close()


def test_a_certificate_for_another_host(
    made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Certificates(made.folder)
    monkeypatch.setattr(Certificates, "server", property(lambda self: self.named("wrong-host")))
    with redis_server(tls=elsewhere) as server:
        one = attach(server.url, coordinator_ca_file=str(made.ca_file))
        with pytest.raises(CoordinatorError, match=r"certificate|hostname"):
            one.now()
        one.close()


@pytest.fixture
def configured(server: RedisServer, tmp_path: Path) -> Path:
    path = tmp_path / "keystone.conf"
    path.write_text(
        f"[database]\nconnection = sqlite:///{tmp_path}/k.db\n"
        f"[keyfront_token_cache]\npath = {tmp_path / 'node'}\n"
        f"coordinator = {server.url_of('keyfront-keystone:hush')}\n"
        f"coordinator_timeout = {TIMEOUT}\n"
    )
    return path


def test_commands(
    server: RedisServer, configured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = attach(server.url)
    change(one)
    epoch = one.now()
    secret = coordinator_of(values(server.url), True, folder=tmp_path / "node")
    assert secret is not None
    key = secret.secret  # with it the folder is made
    node = NodeCache(tmp_path / "node", size=1 << 20, flight_timeout=1)
    node.start(key)
    node.counters.row[HITS] += 3
    where = ["--config-file", str(configured)]
    assert cli.main(["tokens", "flush", *where]) == 0
    assert f"epochs in {server.url}/0" in capsys.readouterr().out
    assert not one.fresh(epoch, ENTRY)
    assert cli.main(["tokens", "stats", "--json", *where]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["hits"], counts["changes"], counts["flushes"]) == (3, 1, 1)
    assert counts["coordinator"] == f"{server.url}/0"
    assert cli.main(["tokens", "stats", *where]) == 0
    assert "hush" not in capsys.readouterr().out
    server.kill()
    assert cli.main(["tokens", "flush", *where]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"keyfront: {server.url}/0: ") and said.count("\n") == 1
    assert "hush" not in said
    for made in (one, secret):
        made.close()


def test_commands_complete_nothing_that_others_may_be_at(
    server: RedisServer, configured: Path
) -> None:
    """As right after Redis was lost: they cannot ask the database who wrote before."""
    keystone = attach(server.url)
    keystone.settled = lambda owner, age: False
    assert cli.main(["tokens", "flush", "--config-file", str(configured)]) == 0
    assert cli.main(["tokens", "check", "--config-file", str(configured)]) == 1
    assert keystone.statistics()["flushes"] == 1
    assert not keystone.fresh(keystone.now(), ENTRY)
    keystone.settled = lambda owner, age: True
    keystone.recover()
    assert keystone.fresh(keystone.now(), ENTRY)
    keystone.close()


def test_whoever_reads_the_configuration_takes_part(
    server: RedisServer, configured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As keystone-manage does, which makes no table in the folder and finds none there."""
    from oslo_config import cfg
    from oslo_db import options as database

    conf = cfg.ConfigOpts()
    database.set_defaults(conf)
    conf([], project="keystone", default_config_files=[str(configured)])
    monkeypatch.setitem(sys.modules, "keystone.conf", SimpleNamespace(CONF=conf))
    coordinators = Coordinators()
    monkeypatch.setattr(change_log, "coordinators", coordinators)
    one, keystone = attach(server.url, create=False), attach(server.url)
    change(keystone)  # it begins the table, of which this one cannot find out who wrote before
    told = change_log.Changes(lambda: tmp_path / "node")
    told.end(told.begin(["user:1"]), ["user:1"])
    epoch = one.now()
    every = slots(["all", "user:1"], one.slot_count)
    assert one.fresh(epoch, every)
    mark = told.begin(["user:1"])
    assert not one.fresh(epoch, every)
    told.end(mark, ["user:1"])
    assert not one.fresh(epoch, every)
    assert one.fresh(one.now(), every)
    server.kill()
    with pytest.raises(CoordinatorError):
        told.begin(["user:1"])
    coordinators.forget(tmp_path / "node")
    for made in (one, keystone):
        made.close()


def test_many_slots_are_touched_at_once(server: RedisServer) -> None:
    one = attach(server.url)
    change(one)
    epoch = one.now()
    one.touch(Slots(range(100, 20_000)))
    assert not one.fresh(epoch, ENTRY)
    one.close()

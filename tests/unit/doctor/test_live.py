"""What --live reads: the kernel's counters, queues, disks, logs, processes, the database."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy

from keyfront.gateway.doctor import live, places, schema
from keyfront.gateway.doctor.diagnosis import diagnose
from keyfront.gateway.doctor.live import Queue
from support.doctor.deployments import LOOPBACK
from support.doctor.machines import NOW, Machine

_CONF = "/etc/keystone/keystone.conf"

RUNNING = (
    LOOPBACK.put(
        "/proc/net/netstat",
        "TcpExt: SyncookiesSent ListenOverflows ListenDrops\nTcpExt: 0 7 9\n"
        "IpExt: InNoRoutes\nIpExt: 0\n",
    )
    .put("/proc/net/sockstat", "sockets: used 290\nTCP: inuse 9 orphan 0 tw 321 alloc 20 mem 2\n")
    .put("/proc/sys/net/netfilter/nf_conntrack_count", "12\n")
    .put("/proc/sys/net/netfilter/nf_conntrack_max", "65536\n")
    .put("/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    .put("/proc/meminfo", "MemTotal:        2048000 kB\nMemFree: 1 kB\n")
    .put("/proc/stat", f"cpu 1 2 3\nbtime {int(NOW) - 1000}\n")
    .put("/proc/4242/cmdline", "/usr/bin/uwsgi\0--ini\0/etc/keystone/keystone-uwsgi.ini\0")
    .put("/proc/4242/statm", "90000 25600 5000 1 0 1 0\n")
    .put("/proc/4242/limits", "Limit   Soft\nMax open files            1024   524288   files\n")
    .put("/proc/4242/fd/0", "")
    .put("/proc/1/cmdline", "/sbin/init\0")
    .put("/proc/1/statm", "1 1 1 1 0 1 0\n")
    .put(
        "/var/log/nginx/error.log",
        "connect() failed (11: Resource temporarily unavailable)\n" * 12
        + "recv() failed (104: Connection reset by peer)\n",
    )
    .put("/dev/shm/", "")
)


def test_what_proc_and_logs_say(tmp_path: Path) -> None:
    found = RUNNING.found(tmp_path)
    seen = live.look(found)
    assert seen.counters == {
        "ListenOverflows": 7, "ListenDrops": 9, "TIME_WAIT": 321, "nf_conntrack_count": 12,
        "nf_conntrack_max": 65536, "ports": 28232,
    }
    assert seen.memory == 2048000 << 10
    (process,) = seen.processes
    assert (process.pid, process.name, process.files) == (4242, "uwsgi", (1, 1024))
    assert process.rss == 25600 * os.sysconf("SC_PAGE_SIZE") >> 20
    assert seen.lines["queue full"] == (12, "/var/log/nginx/error.log")
    assert seen.lines["connection reset by peer"][0] == 1
    assert "/dev/shm" in seen.disks
    found.live = seen
    codes = {x.check.code for x in diagnose(found).results}
    assert {"P01", "P10"} <= codes


def test_what_ss_says() -> None:
    queues = live.parse_queues(
        "tcp   LISTEN 0      4096         0.0.0.0:5000       0.0.0.0:*\n"
        "u_str LISTEN 101    100    /run/uwsgi/keystone.sock 25263              * 0\n"
        "nonsense\n"
    )
    assert queues == [
        Queue("0.0.0.0:5000", 0, 4096), Queue("/run/uwsgi/keystone.sock", 101, 100),
    ]


def test_this_machine_is_looked_at_without_failing() -> None:
    found = places.look(now=NOW)
    assert live.look(found).memory > 0


def on(machine: Machine, url: str) -> Machine:
    known = "mysql+pymysql://keystone:secret@192.0.2.10/keystone?ssl_ca=/etc/ssl/ca.pem"
    return machine.swap(_CONF, known, url)


def test_indexes_of_a_database_are_compared_with_keystones_models(tmp_path: Path) -> None:
    found = on(LOOPBACK, "sqlite:////var/keystone.sqlite?plugin=keyfront").found(tmp_path)
    # What is not there is not made.
    assert schema.look(found) is None
    assert not (tmp_path / "var").exists()
    (tmp_path / "var").mkdir()
    (tmp_path / "var/keystone.sqlite").touch()
    # Imports the models.
    assert schema.look(found) == schema.Schema()
    from keystone.common import sql

    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/var/keystone.sqlite")
    with engine.begin() as connection:
        sql.ModelBase.metadata.create_all(connection)
    assert schema.look(found) == schema.Schema()
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("DROP INDEX ix_user_default_project_id"))
    engine.dispose()
    found.schema = schema.look(found)
    assert found.schema == schema.Schema(missing_indexes=[("user", ("default_project_id",))])
    (result,) = diagnose(found, ["D08"]).results
    assert result.finding.lines[0].startswith("CREATE INDEX")


def test_a_database_that_is_away_is_told_without_its_password(tmp_path: Path) -> None:
    found = on(LOOPBACK, "mysql+pymysql://keystone:hunter2@127.0.0.1:1/keystone").found(tmp_path)
    assert schema.look(found) is None
    said = str(found.unread)
    assert "the database" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("url", ["nonsense", "mysql+nodriver://u:hunter2@h/k", "://"])
def test_a_url_that_is_none_ends_nothing(url: str, tmp_path: Path) -> None:
    found = on(LOOPBACK, url).found(tmp_path)
    assert schema.look(found) is None
    assert "hunter2" not in str(found.unread)
    assert replace(LOOPBACK).diagnosis(tmp_path).right

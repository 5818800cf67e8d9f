"""What --live reads: the kernel's counters, queues, disks, logs, processes, the database."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy

from keyfront.gateway.doctor import cgroups, config_files, machine_state, report, schema
from keyfront.gateway.doctor.diagnosis import diagnose
from keyfront.gateway.doctor.machine_state import Live, Process, Queue
from keyfront.gateway.doctor.readers.files import Files
from keyfront.gateway.doctor.settings import Place
from support.doctor.deployments import LOOPBACK
from support.doctor.machines import NOW, Machine
from support.served import PATIENCE

_CONF = "/etc/keystone/keystone.conf"
_INI = "/etc/keystone/keystone-uwsgi.ini"

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
    seen = machine_state.look(found)
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
    queues = machine_state.parse_queues(
        "tcp   LISTEN 0      4096         0.0.0.0:5000       0.0.0.0:*\n"
        "u_str LISTEN 101    100    /run/uwsgi/keystone.sock 25263              * 0\n"
        "nonsense\n"
    )
    assert queues == [
        Queue("0.0.0.0:5000", 0, 4096), Queue("/run/uwsgi/keystone.sock", 101, 100),
    ]


def test_this_machine_is_looked_at_without_failing() -> None:
    found = config_files.look(now=NOW)
    assert machine_state.look(found).memory > 0


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


@contextlib.contextmanager
def answering(answer: bytes | None) -> Iterator[int]:
    """A server that says one thing to each client once it spoke, or for None nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                kept.append(client)
                if answer is not None:
                    client.recv(4096)
                    client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in kept:
                one.close()


def test_clocks_are_compared_with_memcacheds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_state, "is_here", lambda host: False)
    monkeypatch.setattr(machine_state, "_QUICK", PATIENCE)
    began = time.time()
    late = f"STAT pid 1\r\nSTAT time {int(began) - 60}\r\nEND\r\n".encode()
    with answering(late) as port:
        machine = LOOPBACK.swap(
            _CONF, "192.0.2.11:11211,192.0.2.12:11211", f"inet:127.0.0.1:{port},unix:/run/m.sock"
        )
        found = machine.found(tmp_path)
        found.live = machine_state.look(found)
    # What it tells gets older until it is read.
    assert 59 < found.live.clocks["memcached at 127.0.0.1"] < 61 + time.time() - began
    found.live.synchronized = True
    (result,) = diagnose(found, ["P07"]).results
    assert result.finding.what.endswith("s ahead of that of memcached at 127.0.0.1")
    assert result.level == "error"


@pytest.mark.parametrize("answer", [b"", b"nonsense", b"ERROR\r\nEND\r\n"])
def test_a_memcached_that_tells_no_time(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_state, "is_here", lambda host: False)
    monkeypatch.setattr(machine_state, "_QUICK", 0.2)
    with answering(answer) as port:
        machine = LOOPBACK.swap(_CONF, "192.0.2.11:11211,192.0.2.12:11211", f"127.0.0.1:{port}")
        assert machine_state.look(machine.found(tmp_path)).clocks == {}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:11211", ("localhost", 11211)),
        ("inet:localhost:11212", ("localhost", 11212)),
        ("inet6:[::1]:11211", ("::1", 11211)),
        ("192.0.2.1", ("192.0.2.1", 11211)),
        ("unix:/run/memcached.sock", ("", 0)),
        ("/run/memcached.sock", ("", 0)),
        ("", ("", 0)),
    ],
)
def test_addresses_of_memcached(text: str, address: tuple[str, int]) -> None:
    assert machine_state.memcached_address(text) == address


@pytest.mark.parametrize("driver", ["mysql+pymysql", "postgresql+psycopg2"])
def test_a_database_that_is_silent_is_given_up(
    driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts, and says nothing, for ever; and its driver waits for longer than we do."""
    monkeypatch.setattr(schema, "_ANSWER", 3600)
    with answering(None) as port:
        found = on(LOOPBACK, f"{driver}://keystone:hunter2@127.0.0.1:{port}/k").found(tmp_path)
        assert schema.look(found, patience=0.5) is None
    (said,) = [x.why for x in found.unread if x.what == "the database"]
    assert said.startswith("it cannot be asked (no answer within 0.5 s)")


@pytest.mark.parametrize(
    ("driver", "waits"),
    [
        ("mysql+pymysql", {"connect_timeout", "read_timeout", "write_timeout"}),
        ("postgresql+psycopg2", {"connect_timeout", "options"}),
    ],
)
def test_drivers_wait_for_seconds(driver: str, waits: set[str], tmp_path: Path) -> None:
    url = sqlalchemy.make_url(f"{driver}://u:p@h/k")
    _, arguments = schema._for_reading(LOOPBACK.found(tmp_path), url)
    assert set(arguments) == waits


def test_a_database_in_use_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    found = on(LOOPBACK, "sqlite:////var/keystone.sqlite").found(tmp_path)
    (tmp_path / "var").mkdir()
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/var/keystone.sqlite")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE user (id INTEGER)")
        before = {x: x.read_bytes() for x in (tmp_path / "var").iterdir()}
        assert schema.look(found) is not None
        assert {x: x.read_bytes() for x in (tmp_path / "var").iterdir()} == before
    engine.dispose()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, ""),
        ({"wsrep_cluster_size": "3", "wsrep_local_state_comment": "Synced"}, ""),
        ({"wsrep_cluster_size": "3", "wsrep_local_state_comment": "Donor/Desynced"}, "not Synced"),
        (
            {
                "wsrep_cluster_size": "1",
                "wsrep_local_state_comment": "Synced",
                "wsrep_cluster_status": "non-Primary",
            },
            "without the majority",
        ),
        (
            {
                "wsrep_cluster_size": "3",
                "wsrep_local_state_comment": "Synced",
                "wsrep_local_recv_queue": "5000",
            },
            "5000 transactions",
        ),
    ],
)
def test_the_state_of_a_node_of_galera(status: dict[str, str], said: str) -> None:
    assert said in schema.galera(status)
    assert bool(said) is bool(schema.galera(status))


def test_limits_of_control_groups(tmp_path: Path) -> None:
    """The smallest of a process' own group and all around it."""
    machine = Machine(
        files={
            "/proc/7/cgroup": "0::/kubepods.slice/pod1.slice/cri.scope\n",
            "/sys/fs/cgroup/kubepods.slice/memory.max": "8589934592\n",
            "/sys/fs/cgroup/kubepods.slice/pod1.slice/memory.max": "536870912\n",
            "/sys/fs/cgroup/kubepods.slice/pod1.slice/cri.scope/memory.max": "max\n",
            "/proc/8/cgroup": "9:name=systemd:/x\n4:memory:/docker/abc\n",
            "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "268435456\n",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
    )
    machine.make(tmp_path)
    files = Files(tmp_path)
    assert cgroups.memory_limit(files) is None
    assert cgroups.memory_limit(files, [7]) == (
        512 << 20, Place("/sys/fs/cgroup/kubepods.slice/pod1.slice/memory.max"),
    )  # fmt: skip
    assert cgroups.memory_limit(files, [7, 8, 9]) == (
        256 << 20, Place("/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes"),
    )  # fmt: skip


_LOADED = "WSGI app 0 (mountpoint='') ready in {} seconds on interpreter 0x5c pid: 7 (default)\n"


def test_what_waits_while_keystone_is_loaded(tmp_path: Path) -> None:
    """Of the busiest six seconds, across a minute's end."""
    lines = "".join(
        f'192.0.2.7 - - [24/Nov/2026:04:{minute:02}:{second:02} +0000] "POST /v3" 201 9\n'
        for minute, second in ((0, 1), *((0, 58),) * 60, *((1, 2),) * 60, (1, 4), (5, 5))
    )
    machine = (
        LOOPBACK.append(_INI, "logto = /srv/uwsgi.log\n")
        .swap(_INI, "listen = 1024", "listen = 100")
        .put("/srv/uwsgi.log", _LOADED.format(3) + _LOADED.format(6))
        .put("/var/log/nginx/access.log", lines)
    )
    found = machine.found(tmp_path)
    found.live = machine_state.look(found)
    assert found.live.loading == (6.0, "/srv/uwsgi.log")
    assert found.live.busiest == (120, "/var/log/nginx/access.log")
    (result,) = diagnose(found, ["P13"]).results
    assert result.finding.what == (
        "120 requests came within the 6 s that Keystone takes to load, the queue holds 100"
    )
    assert result.level == "error"


def test_uwsgis_own_log_of_requests_counts(tmp_path: Path) -> None:
    request = "[pid: 1|app: 0] 192.0.2.7 () {1 vars} [Tue Nov 24 04:00:01 2026] GET /v3 =>\n"
    machine = LOOPBACK.append(_INI, "logto2 = /srv/uwsgi.log\n").put(
        "/srv/uwsgi.log", _LOADED.format(2) + request * 3
    )
    seen = machine_state.look(machine.found(tmp_path))
    assert seen.busiest == (3, "/srv/uwsgi.log")


def test_a_load_that_outlasts_the_web_server(tmp_path: Path) -> None:
    from support.doctor.deployments import DEBIAN_NGINX

    machine = replace(DEBIAN_NGINX, live=Live(loading=(70.0, "/x.log"), busiest=(1, "/y.log")))
    (result,) = machine.diagnosis(tmp_path, "P13").results
    assert result.finding.what == (
        "Keystone takes 70 s to load, uwsgi_read_timeout is 75 s"
    )


def test_clocks_of_two_nodes_are_compared_by_what_they_share(tmp_path: Path) -> None:
    here = replace(LOOPBACK, live=Live(clocks={"the database at db": 7.0, "memcached at a": 0.1}))
    there = {"node": {"clocks": {"the database at db": 0.2, "memcached at b": 9.0}}}
    made = replace(here, node=there).diagnosis(tmp_path, "K14")
    assert [(x.level, x.finding.what) for x in made.results] == [
        (
            "error",
            "this clock is 7 s ahead of the other node's, as compared with the database at db",
        )
    ]
    assert report.node_part(here.found(tmp_path))["clocks"]["the database at db"] == 7.0


def test_what_runs_is_printed(tmp_path: Path) -> None:
    one = Process(pid=42, name="uwsgi", rss=107, files=(23, 1024), begun=NOW - 7300, shm=0)
    many = [replace(one, pid=100 + x, rss=50, files=None) for x in range(30)]
    found = replace(LOOPBACK, live=Live(processes=[*many, one])).found(tmp_path)
    page = report.text(diagnose(found), found)
    lines = page[page.index("Keystone's processes") :].splitlines()
    assert lines[2].split() == ["42", "uwsgi", "107", "23", "of", "1024", "2", "h"]
    assert lines[3].split() == ["100", "uwsgi", "50", "-", "2", "h"]
    assert "  and 11 more of at most 50 MiB" in lines
    assert "  /etc/keystone/fernet-keys: 4 keys, the primary 10 is 24 h old" in lines
    content = json.loads(report.as_json(diagnose(found), found))
    assert content["processes"][-1]["mebibytes"] == 107
    assert content["key_ages"] == {"/etc/keystone/fernet-keys": 86400.0}


def test_what_the_server_says_of_its_time_is_printed(tmp_path: Path) -> None:
    phases = {"login": {"TCP": 1.0, "first byte": 2500.0, "the rest": 0.5}}
    told = Live(
        login={"login": 2501.5}, phases=phases, timings={"login": {"db": 41.25}},
        request_ids={"login": "req-1"},
    )  # fmt: skip
    found = replace(LOOPBACK, live=told).found(tmp_path)
    made = diagnose(found, ["P11"])
    (result,) = made.results
    assert result.level == "warning"
    assert result.finding.what == (
        "the login took 2502 ms, most of it first byte: TCP 1.0 ms, first byte 2500.0 ms, "
        "the rest 0.5 ms"
    )
    assert result.finding.lines == ("grep req-1 /var/log/keystone/*.log",)
    page = report.text(made, found)
    assert "  of it: db                   41.2\n" in page
    assert "  the login in Keystone's log: req-1\n" in page


def test_probes_of_kubernetes_are_seen_in_logs(tmp_path: Path) -> None:
    line = (
        '10.0.0.1 - - [24/Nov/2026:14:00:00 +0000] "GET /healthcheck HTTP/1.1" 200 5 "-" '
        '"kube-probe/1.31"\n'
    )
    machine = LOOPBACK.put("/var/log/nginx/access.log", line)
    found = machine.found(tmp_path / "a")
    found.live = machine_state.look(found)
    (result,) = diagnose(found, ["X23"]).results
    assert result.finding.where == (Place("/var/log/nginx/access.log"),)
    found = machine.put("/var/log/nginx/access.log", line.replace("kube-probe", "curl")).found(
        tmp_path / "b"
    )
    found.live = machine_state.look(found)
    assert [x.code for x in diagnose(found, ["X23"]).right] == ["X23"]

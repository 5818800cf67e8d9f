"""The plan keeps what it promises, on every machine, for every workload and profile."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyfront.common.machine import MIB, Machine
from keyfront.errors import OptionError
from keyfront.gateway.login_limit import MOST
from keyfront.gateway.plan import costs
from keyfront.gateway.plan.compute import GROUPS, Plan, plan
from keyfront.gateway.plan.reasons import Numbers, count
from keyfront.gateway.plan.workload import PROFILES, SMALL, Profile, Workload, profile_named

# Every name that templates and programs rely on.
_NAMES = """
uwsgi.processes uwsgi.threads uwsgi.gevent uwsgi.listen uwsgi.harakiri uwsgi.buffer_size
uwsgi.login_limit uwsgi.login_processes uwsgi.socket_timeout uwsgi.max_requests
uwsgi.max_requests_delta
uwsgi.max_worker_lifetime uwsgi.max_worker_lifetime_delta uwsgi.reload_on_rss uwsgi.reload_memory
uwsgi.worker_reload_mercy
database.max_pool_size database.max_overflow database.connections
ldap.pool_size ldap.auth_pool_size ldap.connections memcached.pool_maxsize memcached.connections
nginx.worker_processes nginx.worker_connections nginx.worker_rlimit_nofile nginx.in_flight
nginx.login_in_flight nginx.header_buffers nginx.header_buffer_size nginx.login_rate
nginx.login_burst
apache.server_limit apache.threads_per_child apache.max_request_workers apache.start_servers
apache.min_spare_threads apache.max_spare_threads apache.listen_backlog
apache.async_request_worker_factor apache.prefork_max_request_workers
apache.prefork_start_servers apache.prefork_min_spare_servers apache.prefork_max_spare_servers
apache.header_field_size
mod_wsgi.processes mod_wsgi.login_processes mod_wsgi.threads mod_wsgi.listen_backlog
mod_wsgi.queue_timeout
mod_wsgi.request_timeout mod_wsgi.connect_timeout mod_wsgi.socket_timeout
mod_wsgi.graceful_timeout mod_wsgi.shutdown_timeout mod_wsgi.deadlock_timeout
mod_wsgi.maximum_requests
haproxy.maxconn haproxy.server_maxconn haproxy.queue_timeout
timeout.client timeout.balancer timeout.proxy timeout.harakiri timeout.mercy timeout.stop
timeout.keepalive timeout.balancer_keepalive
limits.body limits.header limits.nofile sysctl.somaxconn sysctl.tcp_max_syn_backlog
memory.total_estimate memory.limit
token_cache.memory token_cache.node_memory capacity.logins capacity.validations front.clients
"""

optional = st.none()
rates = optional | st.floats(0, 1e6) | st.floats(0, 100)
limits = optional | st.integers(1, 1_000_000) | st.integers(1, 500)
machines = st.builds(
    Machine,
    cores=st.integers(1, 1024),
    memory=st.integers(256, 2**21).map(lambda mib: mib * MIB),
    somaxconn=st.integers(1, 262144) | st.sampled_from([128, 4096]),
    nofile=st.integers(256, 1048576),
)
workloads = st.builds(
    Workload,
    logins=rates,
    validations=rates,
    first_validations=st.floats(0, 1),
    database_connections=limits,
    ldap_connections=limits,
    memcached_connections=limits,
    nodes=st.integers(1, 1000) | st.integers(1, 5),
    latency=st.floats(0.1, 300),
    token_cache=st.booleans(),
    login_processes=st.just(0) | st.integers(1, 8),
)
profiles = st.sampled_from(list(PROFILES.values()))
any_plan = st.builds(plan, machines, workloads, profiles)
examples = settings(deadline=None, max_examples=300)


def value(made: Plan, name: str) -> int:
    found = made[name].value
    assert type(found) is int
    return found


def refused(made: Plan) -> set[str]:
    return {conflict.name for conflict in made.conflicts}


@examples
@given(any_plan)
def test_every_number_is_there_and_says_why(made: Plan) -> None:
    assert set(made.numbers) == set(_NAMES.split())
    for name, number in made.numbers.items():
        assert number.name == name
        assert type(number.value) is int
        assert number.value >= 0
        assert number.unit
        for text in (number.source, number.breaks):
            assert text
            assert text == " ".join(text.split()), "one line"
            assert not text.endswith(".")
        assert number.breaks[0].isupper() or number.breaks.startswith("uWSGI")
    for conflict in made.conflicts:
        assert "must be" in conflict.gives
        assert conflict.gives == " ".join(conflict.gives.split())
        assert conflict.wanted != conflict.limit


@examples
@given(any_plan)
def test_whoever_is_nearer_the_client_waits_longer(made: Plan) -> None:
    chain = ["timeout.client", "timeout.balancer", "timeout.proxy", "timeout.harakiri"]
    seconds = [value(made, name) for name in chain]
    assert seconds == sorted(set(seconds), reverse=True)
    # nginx waits for a request in the queue, too, and harakiri does not
    waited = made.workload.latency
    assert value(made, "timeout.proxy") > value(made, "timeout.harakiri") + waited
    assert value(made, "timeout.client") > value(made, "timeout.balancer") + waited
    assert value(made, "timeout.harakiri") >= made.workload.latency
    assert value(made, "timeout.stop") > value(made, "timeout.mercy")
    assert value(made, "timeout.mercy") <= value(made, "timeout.harakiri")
    assert 60 < value(made, "timeout.balancer_keepalive") < value(made, "timeout.keepalive")
    assert value(made, "uwsgi.harakiri") == value(made, "timeout.harakiri")
    assert value(made, "mod_wsgi.socket_timeout") > value(made, "mod_wsgi.request_timeout")
    assert value(made, "uwsgi.socket_timeout") <= value(made, "uwsgi.harakiri")


@examples
@given(any_plan)
def test_no_budget_is_exceeded_without_a_word(made: Plan) -> None:
    told = made.workload
    everywhere = value(made, "uwsgi.processes") * told.nodes
    each = {
        "database": value(made, "database.max_pool_size") + value(made, "database.max_overflow"),
        "ldap": value(made, "ldap.pool_size") + value(made, "ldap.auth_pool_size"),
        "memcached": value(made, "memcached.pool_maxsize"),
    }
    allowed = {
        "database": told.database_connections and told.database_connections * 0.8,
        "ldap": told.ldap_connections,
        "memcached": told.memcached_connections,
    }
    for name, most in allowed.items():
        total = value(made, f"{name}.connections")
        assert total == everywhere * each[name]
        assert each[name] >= value(made, "uwsgi.threads"), "no thread waits for another's"
        if most is not None:
            assert (total > most) == (f"{name}.connections" in refused(made))
    daemons = value(made, "mod_wsgi.processes") + value(made, "mod_wsgi.login_processes")
    assert daemons <= max(2, value(made, "uwsgi.processes"))
    assert value(made, "mod_wsgi.threads") <= value(made, "uwsgi.threads")


@examples
@given(machines, workloads, profiles)
def test_the_limit_that_a_conflict_asks_for_is_enough(
    machine: Machine, workload: Workload, chosen: Profile
) -> None:
    made = plan(machine, workload, chosen)
    for conflict in made.conflicts:
        if conflict.name == "database.connections":
            wanted = math.ceil(conflict.wanted / 0.8)
            assert str(wanted) in conflict.gives
            if wanted <= 1_000_000:
                told = {**vars(workload), "database_connections": wanted}
                assert "database.connections" not in refused(
                    plan(machine, Workload(**told), chosen)
                )


@examples
@given(any_plan)
def test_everything_fits_into_memory_or_it_is_said(made: Plan) -> None:
    limit, total = value(made, "memory.limit"), value(made, "memory.total_estimate")
    assert limit <= made.machine.memory_mib
    assert (total > limit) == ("memory.total_estimate" in refused(made))
    if total > limit:
        assert value(made, "uwsgi.processes") == 1
    # a worker that reloads at its threshold has taken no more of its own than was planned for it
    own = value(made, "uwsgi.reload_on_rss") - costs.SHARED - value(made, "token_cache.node_memory")
    fixed = costs.SHARED + costs.OWN + value(made, "token_cache.node_memory")
    assert fixed + own * value(made, "uwsgi.processes") <= total
    if made.profile.name == "small":
        assert limit <= 256
    threads = value(made, "apache.max_request_workers") * costs.APACHE_THREAD
    assert threads <= max(limit / 4, 64 * costs.APACHE_THREAD)


@examples
@given(any_plan)
def test_the_queue_is_one_that_the_kernel_gives(made: Plan) -> None:
    kernel = made.machine.somaxconn
    assert 1 <= value(made, "uwsgi.listen") <= min(kernel, 65535)
    assert 1 <= value(made, "mod_wsgi.listen_backlog") <= min(kernel, 65535)
    own = value(made, "uwsgi.login_processes")
    others = max(0, value(made, "uwsgi.processes") - own)
    listen, threads = value(made, "uwsgi.listen"), value(made, "uwsgi.threads")
    assert value(made, "nginx.in_flight") == listen + others * threads
    assert value(made, "nginx.login_in_flight") == (listen + own * threads if own else 0)
    assert value(made, "sysctl.somaxconn") >= 4096
    assert value(made, "sysctl.somaxconn") >= value(made, "uwsgi.listen")
    assert value(made, "sysctl.tcp_max_syn_backlog") >= value(made, "sysctl.somaxconn")


def test_apache_has_threads_beside_two_hundred_slow_clients() -> None:
    made = plan(Machine(cores=1, memory=2048 * MIB, somaxconn=4096), Workload())
    assert value(made, "apache.max_request_workers") > 200
    # a process each, which costs more
    assert value(made, "apache.prefork_max_request_workers") == 128


@examples
@given(any_plan)
def test_the_proxies_hold_what_they_shall(made: Plan) -> None:
    workers, each = value(made, "nginx.worker_processes"), value(made, "nginx.worker_connections")
    # nginx keeps a sixteenth free
    usable = workers * each * 15 // 16
    assert usable >= value(made, "front.clients") + value(made, "nginx.in_flight")
    assert value(made, "nginx.worker_rlimit_nofile") >= 2 * each
    assert value(made, "limits.nofile") >= value(made, "nginx.worker_rlimit_nofile")
    threads = value(made, "apache.threads_per_child")
    most = value(made, "apache.max_request_workers")
    assert most == value(made, "apache.server_limit") * threads
    assert threads <= 64, "ThreadLimit's default"
    assert value(made, "apache.start_servers") <= value(made, "apache.server_limit")
    assert value(made, "apache.min_spare_threads") <= most
    assert (
        value(made, "apache.max_spare_threads") >= value(made, "apache.min_spare_threads") + threads
    )
    low, high = (value(made, f"apache.prefork_{x}_spare_servers") for x in ("min", "max"))
    assert low < high <= value(made, "apache.prefork_max_request_workers")
    header = value(made, "limits.header")
    assert header >= 60000, "a header of 60 kB"
    buffers = value(made, "nginx.header_buffers") * value(made, "nginx.header_buffer_size")
    assert header <= buffers < value(made, "uwsgi.buffer_size")
    assert 1 <= value(made, "nginx.login_rate") <= value(made, "nginx.login_burst")


@settings(deadline=None, max_examples=100)
@given(machines, workloads, profiles)
def test_the_same_input_gives_the_same_plan(
    machine: Machine, workload: Workload, chosen: Profile
) -> None:
    assert plan(machine, workload, chosen) == plan(machine, workload, chosen)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 1023), st.integers(256, 2**20), profiles)
def test_more_cores_never_give_fewer_processes(cores: int, mib: int, chosen: Profile) -> None:
    made = [plan(Machine(cores=cores + x, memory=mib * MIB), profile=chosen) for x in (0, 1)]
    fewer, more = (value(one, "uwsgi.processes") for one in made)
    # a core more is an nginx worker more, which may take the room of a process
    assert more >= fewer - 1


def test_groups_come_one_after_the_other() -> None:
    made = plan(Machine(cores=2, memory=4096 * MIB))
    groups = [name.partition(".")[0] for name in made.numbers]
    assert groups == sorted(groups, key=GROUPS.index)


def test_one_process_a_core() -> None:
    for cores in (2, 8, 64):
        made = plan(Machine(cores=cores, memory=2**40))
        assert value(made, "uwsgi.processes") == cores
    assert value(plan(Machine(cores=1, memory=2**40)), "uwsgi.processes") == 2


def test_memory_bounds_processes() -> None:
    made = plan(Machine(cores=64, memory=1024 * MIB))
    assert 2 <= value(made, "uwsgi.processes") < 64
    assert value(made, "token_cache.memory") < 64
    assert not made.conflicts


def test_the_small_profile_fits_into_256_mib() -> None:
    made = plan(Machine(cores=2, memory=256 * MIB), profile=SMALL)
    assert not made.conflicts
    assert value(made, "uwsgi.processes") == 2
    assert made.profile.gives_up


def test_overflow_shrinks_before_anything_must_give() -> None:
    machine = Machine(cores=4, memory=8192 * MIB)
    for allowed, overflow in ((1000, 2), (20, 2), (15, 1), (10, 0)):
        made = plan(machine, Workload(database_connections=allowed))
        assert value(made, "database.max_overflow") == overflow
        assert not made.conflicts
    (conflict,) = plan(machine, Workload(database_connections=9)).conflicts
    assert (conflict.name, conflict.wanted, conflict.limit) == ("database.connections", 8, 7)
    assert conflict.gives == (
        "the database's max_connections must be at least 10, or uwsgi.processes at most 3 a node "
        "instead of 4"
    )


def test_nodes_that_are_too_many() -> None:
    told = Workload(database_connections=10, nodes=100)
    (conflict,) = plan(Machine(cores=1, memory=8192 * MIB), told).conflicts
    assert conflict.gives.endswith("or there must be fewer than 100 nodes")


def test_load_that_the_cores_cannot_bear() -> None:
    told = Workload(logins=50)
    (conflict,) = plan(Machine(cores=4, memory=8192 * MIB), told).conflicts
    # 50 x 0.38 s / 0.7
    assert (conflict.name, conflict.wanted, conflict.limit) == ("uwsgi.processes", 28, 4)
    assert conflict.gives.startswith("cores must be at least 28 a node instead of 4 (70% busy)")
    assert not plan(Machine(cores=28, memory=2**35), told).conflicts
    told = Workload(logins=50, nodes=7)
    assert not plan(Machine(cores=4, memory=8192 * MIB), told).conflicts


def test_a_login_that_takes_longer_than_it_may() -> None:
    told = Workload(logins=1, latency=0.3)
    (conflict,) = plan(Machine(cores=4, memory=8192 * MIB), told).conflicts
    assert conflict.name == "latency"
    assert "password_hash_rounds" in conflict.gives
    assert not plan(
        Machine(cores=4, memory=8192 * MIB), Workload(logins=1, latency=0.3, ldap_connections=100)
    ).conflicts


def test_the_queue_follows_what_is_answered_in_time() -> None:
    machine = Machine(cores=2, memory=8192 * MIB)
    queue = {
        (cache, latency): value(
            plan(machine, Workload(token_cache=cache, latency=latency, first_validations=0.4)),
            "uwsgi.listen",
        )
        for cache in (True, False)
        for latency in (1.0, 2.0)
    }
    # 2 cores x seconds / 87 ms
    assert (queue[False, 1.0], queue[False, 2.0]) == (22, 45)
    assert queue[True, 1.0] > 20 * queue[False, 1.0]
    assert queue[True, 2.0] > queue[True, 1.0]


def test_more_first_validations_are_fewer_a_second() -> None:
    machine = Machine(cores=2, memory=8192 * MIB)
    made = [plan(machine, Workload(first_validations=share)) for share in (0, 0.035, 1)]
    # 2 cores / (0.2 ms + share x 5 ms)
    found = [value(one, "capacity.validations") for one in made]
    assert found == [10000, 5333, 384]
    assert "3.5% at 5 ms more" in made[1]["capacity.validations"].source


def test_a_directory_takes_more_threads() -> None:
    machine = Machine(cores=2, memory=8192 * MIB)
    assert value(plan(machine), "uwsgi.threads") == 2
    made = plan(machine, Workload(ldap_connections=100))
    assert value(made, "uwsgi.threads") == value(made, "ldap.pool_size") == 4
    # 2 processes x 2 pools x 2 connections
    made = plan(machine, Workload(ldap_connections=8))
    assert value(made, "uwsgi.threads") == 2
    assert not made.conflicts


@pytest.mark.parametrize(
    ("cores", "workload", "expected"),
    (
        (1, Workload(), 1),
        (2, Workload(), 2),
        (64, Workload(), 64),
        (2, Workload(ldap_connections=100), 6),
        (256, Workload(ldap_connections=100000), MOST),
    ),
)
def test_a_login_for_each_core_or_while_they_wait_for_a_directory(
    cores: int, workload: Workload, expected: int
) -> None:
    made = plan(Machine(cores=cores, memory=256 * 1024 * MIB), workload)
    assert value(made, "uwsgi.login_limit") == expected
    of_all = value(made, "uwsgi.processes") * value(made, "uwsgi.threads")
    assert expected < of_all


def test_nginx_takes_no_room_from_the_application() -> None:
    made = plan(Machine(cores=128, memory=256 * MIB), profile=SMALL)
    assert value(made, "nginx.worker_processes") <= 2
    assert value(made, "uwsgi.processes") == 2


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--logins", {"logins": -1}),
        ("--logins", {"logins": math.nan}),
        ("--logins", {"logins": math.inf}),
        ("--validations", {"validations": 1e7}),
        ("--first-validations", {"first_validations": 1.01}),
        ("--first-validations", {"first_validations": math.nan}),
        ("--database-connections", {"database_connections": 0}),
        ("--ldap-connections", {"ldap_connections": -5}),
        ("--memcached-connections", {"memcached_connections": 10**7}),
        ("--nodes", {"nodes": 0}),
        ("--nodes", {"nodes": 1001}),
        ("--latency", {"latency": 0}),
        ("--latency", {"latency": math.nan}),
        ("--latency", {"latency": 301}),
    ],
)
def test_a_workload_out_of_range(option: str, told: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        Workload(**told)
    assert caught.value.option == option


def test_a_profile_that_is_none() -> None:
    with pytest.raises(OptionError, match="one of small, standard, large"):
        profile_named("huge")


def test_a_number_is_computed_once() -> None:
    numbers = Numbers()
    numbers.put("uwsgi.processes", 1, "processes", "x", "y")
    with pytest.raises(ValueError, match="twice"):
        numbers.put("uwsgi.processes", 2, "processes", "x", "y")


def test_counted_nouns() -> None:
    assert count(1, "process") == "1 process"
    assert count(2, "process") == "2 processes"
    assert count(3, "core") == "3 cores"


def test_logins_have_processes_besides_the_others() -> None:
    machine = Machine(cores=2, memory=4 * 2**30, somaxconn=4096)
    made = plan(machine, Workload(login_processes=1))
    assert value(made, "uwsgi.processes") == 3 and not made.conflicts
    assert value(made, "uwsgi.login_limit") == 2
    assert value(made, "mod_wsgi.processes") == 2
    assert value(made, "mod_wsgi.login_processes") == 1
    given = plan(machine, Workload(processes=3, login_processes=2))
    assert value(given, "uwsgi.processes") == 3
    small = plan(Machine(cores=2, memory=300 * MIB), Workload(login_processes=3))
    assert "uwsgi.login_processes" in refused(small)
    # mod_wsgi's load Keystone each by itself.
    tight = plan(Machine(cores=2, memory=512 * MIB), Workload(login_processes=1))
    assert not tight.conflicts and value(tight, "mod_wsgi.login_processes") == 0
    for processes, own, most in ((2, 2, 1), (None, -1, 4095), (None, 4096, 4095)):
        with pytest.raises(OptionError, match=f"--login-processes = {own}: .*0 to {most}"):
            Workload(processes=processes, login_processes=own)

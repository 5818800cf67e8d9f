"""The files that a login passes when its connections are open: few enough to read in one go."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import keystone.conf.default
import keystone.conf.ldap
import pytest
from keystone.common import driver_hints
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from oslo_config import cfg

import keyfront.middleware
from keyfront.common.request_phases import DIRECTORY, RequestPhases, current
from keyfront.gateway.traces.spans import TracedPhases
from keyfront.middleware.ldap import LDAPPool
from keyfront.middleware.ldap.keystone.driver import Identity
from support.directory import Directory, directory

keystone.conf.default.register_opts(keystone.conf.CONF)

PACKAGE = Path(keyfront.middleware.__file__).parents[1]
MOST = 11


@pytest.fixture(scope="module")
def slapd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    with directory(tmp_path_factory.mktemp("slapd"), users=2) as server:
        yield server


def files_of(call: Callable[[], Any]) -> set[str]:
    """The files of keyfront in which a function is called meanwhile, in this thread."""
    found = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    paths = {Path(name) for name in found}
    return {str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE)}


def test_a_login_by_the_library(slapd: Directory) -> None:
    user = slapd.users[0]
    with LDAPPool(slapd.url, user_dn=f"uid={{}},{slapd.people}", auth_min_size=1) as pool:
        pool.wait()
        pool.authenticate(user.uid, user.password)
        passed = files_of(lambda: pool.authenticate(user.uid, user.password))
    assert "middleware/ldap/protocol/connection.py" in passed
    assert len(passed) <= MOST - 3, sorted(passed)


def test_a_login_of_a_user_who_is_searched(slapd: Directory) -> None:
    user = slapd.users[0]
    with LDAPPool(slapd.url, search_base=slapd.people, auth_min_size=1) as pool:
        pool.wait()
        pool.authenticate(user.uid, user.password)
        passed = files_of(lambda: pool.authenticate(user.uid, user.password))
    assert "middleware/ldap/protocol/search_filter.py" in passed
    assert len(passed) <= MOST - 2, sorted(passed)


def test_a_login_by_keystone(slapd: Directory, tmp_path: Path) -> None:
    """What Keystone asks its driver for at a login: the user, the password, the groups."""
    user = slapd.users[0]
    path = tmp_path / "keystone.conf"
    path.write_text(
        f"[ldap]\nurl = {slapd.url}\nuser = {slapd.service_dn}\n"
        f"password = {slapd.service_password}\nsuffix = {slapd.suffix}\n"
        f"user_tree_dn = {slapd.people}\nuser_id_attribute = uid\nuser_name_attribute = cn\n"
        f"group_tree_dn = {slapd.groups}\ngroup_name_attribute = cn\nchase_referrals = false\n"
        "[keyfront_ldap]\nauth_min_size = 1\n"
    )
    conf = cfg.ConfigOpts()
    keystone.conf.ldap.register_opts(conf)
    conf(args=[], project="keystone", default_config_files=[str(path)], default_config_dirs=[])
    driver = Identity(conf)

    def log_in() -> None:
        found = driver.get_user_by_name(user.cn, "default")
        assert driver.authenticate(found["id"], user.password)["id"] == user.uid
        driver.list_groups_for_user(user.uid, driver_hints.Hints())

    try:
        driver.pool.get().wait()
        log_in()
        passed = files_of(log_in)
        # what a slow request is told to have spent there
        asked = RequestPhases()
        token = current.set(asked)
        log_in()
        current.reset(token)
        told = _spans_of(log_in)
    finally:
        driver.pool.get().close()
    assert "middleware/ldap/keystone/handler.py" in passed
    assert len(passed) <= MOST, sorted(passed)
    assert asked.counts[DIRECTORY] >= 3
    assert asked.seconds[DIRECTORY] > 0
    assert Counter(span.name for span in told)["directory bind"] == 1
    assert {span.name for span in told} == {"directory bind", "directory search"}
    for span in told:
        assert span.end_time > span.start_time
        for secret in (user.password, user.uid, user.cn, slapd.people):
            assert secret not in span.to_json()


def _spans_of(call: Callable[[], object]) -> list[Any]:
    """The spans that a trace of a request with this call has of the directory."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    token = current.set(TracedPhases(provider.get_tracer("test"), Context()))
    try:
        call()
    finally:
        current.reset(token)
    return list(exporter.get_finished_spans())

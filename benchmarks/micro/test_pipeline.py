"""What the entrypoint and each filter add to a request that is not theirs."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")

from keyfront.benchmarks.compare import token_hit
from keyfront.benchmarks.compare.token_stand_in import request
from keyfront.benchmarks.micro.subjects import bare, served
from keyfront.gateway import application
from keyfront.gateway.heartbeat import installation as heartbeat
from keyfront.gateway.node import health
from keyfront.gateway.node.counters import NodeCounts, count_requests
from keyfront.gateway.queue_limit import limit_queue
from keyfront.gateway.request_body import read_whole
from keyfront.middleware.ldap.wsgi import filter_factory

# In microseconds a few tenths each; the bare application takes less than one itself.
LIMIT = 5.0

_LDAP_AUTH = {
    "urls": "ldap://127.0.0.1:1",
    "user_dn": "uid={},ou=People,dc=example,dc=org",
    "public_paths": "/v3/auth/tokens",
}
_PASTE = """\
[pipeline:main]
pipeline = ldap_auth bare

[app:bare]
paste.app_factory = keyfront.benchmarks.micro.subjects:bare_factory

[filter:ldap_auth]
use = egg:keyfront#ldap_auth
""" + "".join(f"{name} = {value}\n" for name, value in _LDAP_AUTH.items())


def _post() -> dict[str, Any]:
    """Return a login: no filter of ours answers it."""
    return {**request(0), "REQUEST_METHOD": "POST", "wsgi.input": io.BytesIO()}


def test_entrypoint_against_bare(paired: Any) -> None:
    """uWSGI's entrypoint, which reads bodies first, for a request without one."""
    made = bare()
    paired(served(read_whole(made, read_chunk=lambda: b"")), served(made), limit=LIMIT)


def _node(made: Any, folder: Path) -> Any:
    """Return an application behind what counts the requests of a node and answers for health."""
    counts = NodeCounts()
    counts.share(folder / "node")
    counts.begin()
    questions = health.answers(
        settings=health.from_environment(), checks=health.Checks({}, described=str), folder=folder
    )
    return limit_queue(count_requests(made, counts, questions), seconds=60, waited=counts.queued)


def test_node_against_bare(paired: Any, tmp_path: Path) -> None:
    """A request that is counted, with the time that it waited."""
    made = bare()
    node = _node(made, tmp_path)
    # Not the first one, whose wait is told by no clock but the server's.
    for _ in range(2):
        environ = {**request(0), "HTTP_X_REQUEST_START": f"t={time.time():.6f}"}
        served(node, environ)()
    # It takes 4.6 to 5.0 times; instructions are counted below.
    paired(served(node, environ), served(made, environ), limit=6)


def test_node_counts(counted: Any, tmp_path: Path) -> None:
    """Counting asks the kernel nothing."""
    counted(syscalls_of_10_requests=counted.syscalls(served(_node(bare(), tmp_path))))


@pytest.mark.slow
def test_node_in_instructions(instructions: Any, tmp_path: Path) -> None:
    instructions(served(_node(bare(), tmp_path)))


def test_token_cache_against_bare(paired: Any, tmp_path: Path) -> None:
    """A request that the cache lets through."""
    made = bare()
    cache = token_hit.new_filter(made, tmp_path / "shared", 10)
    paired(served(cache, _post()), served(made, _post()), limit=LIMIT)


def test_ldap_auth_against_bare(paired: Any) -> None:
    """A request that needs no login; identities that a client claims are taken off it."""
    made, build = bare(), filter_factory({}, **_LDAP_AUTH)
    paired(served(build(made)), served(made), limit=4 * LIMIT)


def test_heartbeat_against_bare(paired: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat is not on the way of a request: the very same application comes back."""
    monkeypatch.setattr(heartbeat, "install", lambda **_: None)
    made = bare()
    wrapped = heartbeat.filter_factory({})(made)
    assert wrapped is made
    # one request for both: two lie differently in memory, which is seen in so short a step
    environ = request(0)
    paired(served(wrapped, environ), served(made, environ), limit=1.1)


def test_paste_pipeline_against_the_same_by_hand(paired: Any, tmp_path: Path) -> None:
    """An application that a paste file names is not slower than one that is put together here."""
    path = tmp_path / "paste.ini"
    path.write_text(_PASTE)
    loaded = application.load(f"config:{path}")
    build = filter_factory({}, **_LDAP_AUTH)
    paired(served(loaded), served(build(bare())), limit=1.1)


def test_counts(counted: Any, tmp_path: Path) -> None:
    """Letting a request through asks the kernel nothing."""
    cache = token_hit.new_filter(bare(), tmp_path / "shared", 10)
    whole = read_whole(cache, read_chunk=lambda: b"")
    counted(syscalls_of_10_requests=counted.syscalls(served(whole, _post())))


@pytest.mark.slow
def test_token_cache_in_instructions(instructions: Any, tmp_path: Path) -> None:
    cache = token_hit.new_filter(bare(), tmp_path / "shared", 10)
    instructions(served(cache, _post()))

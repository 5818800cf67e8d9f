"""The database goes away and comes back under a Keystone that is being asked, on real processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from support import servers
from support.fault_proxy import FaultProxy
from support.keystone_world import VALIDATE, Answer, Client, World
from support.keystones import keystone_state, serve_as_is
from support.served import Served, free_port, wait_for

pytest.importorskip("keystone")

ASKED = 40
TOLD = "the database cannot be reached"
# path: the usual folder, named after the database.
EXTRA = """\
[identity]
password_hash_rounds = 4
[keyfront_token_cache]
path =
"""


@pytest.mark.slow
def test_it_is_said_in_a_line_and_answered_with_503(tmp_path: Path) -> None:
    """Also where Keystone would write a traceback of 35 kB for each request."""
    port = free_port()
    with servers.mariadb(tmp_path, port=port) as database, FaultProxy(port) as proxy:
        database.fresh_database("keystone")
        url = f"mysql+pymysql://root@127.0.0.1:{proxy.port}/keystone"
        state = keystone_state(tmp_path / "state", database_url=url, extra=EXTRA)
        with serve_as_is(state, "uwsgi") as served:
            token = World(served.url, served.password).admin
            headers = {"X-Auth-Token": token, "X-Subject-Token": token}

            def look_up(number: int) -> Answer:
                # A user of whom nothing is kept anywhere.
                return ask(served, "GET", f"/users/{number}", {"X-Auth-Token": token})

            assert ask(served, "GET", VALIDATE, headers).status == 200
            assert look_up(0).status == 404
            size = len(served.log("keystone.log"))
            proxy.cut()
            with ThreadPoolExecutor(4) as pool:
                answers = list(pool.map(look_up, range(1, 1 + ASKED)))
            answers.append(ask(served, "POST", VALIDATE, {}, login(served)))
            assert {answer.status for answer in answers} == {503}
            for answer in answers:
                assert answer.headers["Retry-After"] == "1"
                assert answer.body["error"]["code"] == 503
            known = ask(served, "GET", VALIDATE, headers)
            assert known.status == 200, "what is known needs no database"

            log = served.log("keystone.log")[size:]
            assert TOLD in log
            assert "Traceback" not in log
            assert len(log) < 400 * ASKED, "a line a second and worker, whatever is asked"
            proxy.forward()
            wait_for(lambda: look_up(1 + ASKED).status == 404, "the database is back")
            assert ask(served, "POST", VALIDATE, {}, login(served)).status == 201


def ask(
    served: Served, method: str, path: str, headers: dict[str, str], body: object = None
) -> Answer:
    with closing(Client(served.url)) as client:
        return client.request(method, path, headers, body)


def login(served: Served) -> dict[str, object]:
    user = {"name": "admin", "domain": {"id": "default"}, "password": served.password}
    return {"auth": {"identity": {"methods": ["password"], "password": {"user": user}}}}

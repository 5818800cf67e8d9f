"""Logins have workers of their own, where the operator says so: nothing else waits behind them."""

from __future__ import annotations

import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from support import APPS
from support.deployments import MACHINE, WORKLOAD, Deployment, deployed, observed
from support.programs import own_folder
from support.served import wait_for

if not Path(sys.prefix, "bin", "uwsgi").exists():
    pytest.skip("no uWSGI", allow_module_level=True)

# More than all workers have threads.
LOGINS = 16
# Also of no route of Keystone's: what the limit takes for a login waits for a turn wherever it is.
PATHS = (
    *("/v3/auth/tokens", "/v3/users/0123/password", "/v3/OS-OAUTH2/token"),
    *("/v3/other/auth/tokens//", "/v3/a%0Ab/password", "/auth/tokens"),
)


def _log_in(site: Deployment, number: int) -> tuple[int, object]:
    with closing(site.connect(f"127.9.{number}.1")) as connection:
        connection.request("POST", PATHS[number % len(PATHS)], b"{}")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()).get("worker")


def _sees_workers_of_their_own(site: Deployment, held: Path) -> None:
    """As many logins as there can be are held, and others that come meanwhile are answered."""
    for file in held.iterdir():
        file.unlink()
    with ThreadPoolExecutor(LOGINS) as pool:
        logins = [pool.submit(_log_in, site, number) for number in range(LOGINS)]
        try:
            threads = site.plan["uwsgi.threads"].value
            wait_for(lambda: len(list(held.glob("begun-*"))) == threads, "all threads have one")
            with closing(site.connect()) as connection:
                others = {observed(connection)["worker"] for _ in range(20)}
            assert len(list(held.glob("begun-*"))) == threads
        finally:
            (held / "go").touch()
        answers = [one.result() for one in logins]
    # Those who waited for longer than the second that the line-up is planned for.
    assert {status for status, _ in answers} <= {200, 503}, answers
    assert {worker for status, worker in answers if status == 200} == {3}
    assert others <= {1, 2}


def test_nothing_waits_behind_logins() -> None:
    with own_folder("logins") as folder, own_folder("held") as held:
        folder.chmod(0o711)
        held.chmod(0o777)
        workload = replace(WORKLOAD, login_processes=1)
        environment = {"HELD_LOGINS": str(held), "PYTHONPATH": str(APPS)}
        with deployed(
            folder, "nginx+uwsgi", target="held_logins_app:application", manager=True,
            machine=replace(MACHINE, memory=2**31), workload=workload, environment=environment,
        ) as site:  # fmt: skip
            site.wait()
            assert site.plan["uwsgi.processes"].value == 3
            _sees_workers_of_their_own(site, held)
            manager = site.processes[0]
            (former,) = manager.children()
            manager.send_signal(signal.SIGHUP)
            wait_for(lambda: not former.is_running(), "it has reloaded")
            _sees_workers_of_their_own(site, held)

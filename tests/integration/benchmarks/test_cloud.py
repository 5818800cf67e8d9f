"""``keyfront bench cloud`` on a Keystone that ``keyfront serve`` runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keyfront.benchmarks import results
from keyfront.benchmarks.lineups.keystone import PROJECTS, ask, log_in, login
from support import keystones

pytest.importorskip("keystone")

# The hash of a password is not what is tested.
CHEAP = "[identity]\npassword_hash_rounds = 4\n"


def test_a_keystone_is_asked_and_left_as_it_was(tmp_path: Path) -> None:
    state = keystones.keystone_state(tmp_path / "state", extra=CHEAP)
    environment = {name: value for name, value in os.environ.items() if name[:3] != "OS_"}

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "keyfront", "bench", "cloud", "--users", "2", *words]

    with keystones.serve_as_is(state, "uwsgi") as served:
        url = served.url.removesuffix("/v3")
        admin = log_in(url, login("admin", served.password, "admin"))

        def there() -> dict[str, set[str]]:
            paths = ("/v3/domains", "/v3/users", PROJECTS, "/v3/role_assignments")
            found = {path: ask(url, "GET", path, admin) for path in paths}
            names = {path: path.rpartition("/")[2] for path in paths}
            return {path: set(map(json.dumps, found[path][names[path]])) for path in paths}

        def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
            done = subprocess.run(
                command("--services", "1", "--rounds", "1", *words),
                cwd=tmp_path, env={**environment, **more}, capture_output=True, text=True,
                check=False, timeout=300,
            )  # fmt: skip
            assert served.password not in done.stdout + done.stderr
            return done

        before = there()
        done = run("--state", str(state))
        assert done.returncode == 0, done.stderr
        result = results.read(tmp_path / "bench-results" / "comparison-cloud.json")
        good = {one["phase"]: one["good"] for one in result.samples}
        assert good == {"logins": 2, "first": 4, "repeated": 6, "re-scopes": 2}
        assert not any(one["failures"] for one in result.samples)
        # the server is ours: its processes are found
        assert sum(one["server_cpu"] for one in result.samples) > 0
        assert there() == before

        process = subprocess.Popen(
            command("--rounds", "1000", "--state", str(state)),
            cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("caches are filled"):
                break
        assert there() != before
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130
        assert "what was made" not in process.stderr.read()
        process.stderr.close()
        assert there() == before

        # who may not make users is told how else it goes
        user = {"name": "joe", "password": "of joe", "domain_id": "default"}
        made = ask(url, "POST", "/v3/users", admin, {"user": user})["user"]["id"]
        (role,) = ask(url, "GET", "/v3/roles?name=member", admin)["roles"]
        (project,) = ask(url, "GET", f"{PROJECTS}?name=admin", admin)["projects"]
        grant = f"{PROJECTS}/{project['id']}/users/{made}/roles/{role['id']}"
        ask(url, "PUT", grant, admin)
        one = {"username": "joe", "password": "of joe", "project_name": "admin"}
        who = {f"OS_{name.upper()}": value for name, value in one.items()}
        done = run(OS_AUTH_URL=f"{url}/v3", **who)
        assert done.returncode == 2
        assert "Keystone answers 403" in done.stderr and "--users-file" in done.stderr
        file = tmp_path / "users.json"
        file.write_text(json.dumps({"users": [one]}))
        file.chmod(0o600)
        done = run("--users-file", str(file), "--state", str(state))
        assert done.returncode == 0, done.stderr
        ask(url, "DELETE", f"/v3/users/{made}", admin)
        assert there() == before

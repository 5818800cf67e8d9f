"""The entrypoints under their servers: other services, other servers, and loads that fail."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import APPS
from support.served import PATIENCE, free_port, serve, wait_for

GLANCE_PASTE = Path(sys.prefix, "etc", "glance", "glance-api-paste.ini")


def _get(port: int, path: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("server", ("uwsgi", "mod_wsgi"))
def test_serves_glance_with_its_own_paste_file(
    keystone_state: tuple[Path, int], tmp_path: Path, server: str
) -> None:
    state, port = keystone_state
    images = tmp_path / "images"
    images.mkdir()
    config = tmp_path / "glance-api.conf"
    config.write_text(
        "[DEFAULT]\n"
        "enabled_backends = files:file\n"
        "[glance_store]\n"
        "default_backend = files\n"
        f"[files]\nfilesystem_store_datadir = {images}\n"
        f"[os_glance_staging_store]\nfilesystem_store_datadir = {tmp_path / 'staging'}\n"
        f"[os_glance_tasks_store]\nfilesystem_store_datadir = {tmp_path / 'tasks'}\n"
        f"[database]\nconnection = sqlite:///{tmp_path / 'glance.sqlite'}\n"
        f"[paste_deploy]\nconfig_file = {GLANCE_PASTE}\n"
    )
    environment = {
        "KEYFRONT_APP": "glance.wsgi.api:application",
        "OS_GLANCE_CONFIG_DIR": str(tmp_path),
    }
    with serve(state, server, port=port, environment=environment) as served:
        status, _, body = _get(served.port, "/versions")
    assert status == 200
    assert {version["status"] for version in json.loads(body)["versions"]} >= {"CURRENT"}


def test_gunicorn_with_a_command_line_of_its_own(keystone_state: tuple[Path, int]) -> None:
    """Keystone alone ends the server over these arguments; behind keyfront it does not see them."""
    state, _ = keystone_state
    port = free_port()
    environment = {**os.environ, "OS_KEYSTONE_CONFIG_DIR": str(state)}

    def command(module: str) -> list[str]:
        bind = ["--bind", f"127.0.0.1:{port}", "--workers", "1", "--no-control-socket"]
        return [sys.executable, "-m", "gunicorn", *bind, module]

    # gunicorn itself goes on and starts the worker again and again
    stock = subprocess.Popen(
        command("keystone.wsgi.api:application"),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert stock.stderr is not None
        assert any("unrecognized arguments: --bind" in line for line in stock.stderr)
    finally:
        stock.terminate()
        stock.communicate(timeout=PATIENCE)
    ours = subprocess.Popen(
        command("keyfront.gateway.wsgi:application"),
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:

        def answers() -> bool:
            assert ours.poll() is None
            try:
                return _get(port, "/v3")[0] == 200
            except OSError:
                return False

        wait_for(answers, "gunicorn answers")
    finally:
        ours.send_signal(signal.SIGTERM)
        ours.wait(PATIENCE)


@pytest.fixture
def no_keys(keystone_state: tuple[Path, int]):  # type: ignore[no-untyped-def]
    """The state without its key repository, which stock Keystone reports only once."""
    state, port = keystone_state
    keys = state / "fernet-keys"
    away = state / "fernet-keys.away"
    keys.rename(away)
    yield state, port, lambda: away.rename(keys)
    if away.exists():
        away.rename(keys)


def test_uwsgi_does_not_start_on_a_failed_load(no_keys) -> None:  # type: ignore[no-untyped-def]
    state, port, _ = no_keys
    done = subprocess.run(
        [sys.executable, "-m", "keyfront", "serve", "--state", str(state),
         "--listen", f"127.0.0.1:{port}"],
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "uwsgi ended with exit status" in line
    assert str(state / "fernet-keys") in line
    assert "arguments already parsed" not in (state / "log" / "uwsgi.log").read_text()


@pytest.mark.slow
def test_mod_wsgi_repeats_the_first_error_and_heals(no_keys) -> None:  # type: ignore[no-untyped-def]
    state, port, repair = no_keys
    log = state / "log" / "apache.error.log"
    log.unlink(missing_ok=True)
    # its own readiness never comes, since everything is 503
    with serve(state, "mod_wsgi", port=port, until=b"start of apache") as served:

        def status() -> int:
            try:
                return _get(served.port, "/v3")[0]
            except OSError:
                return 0

        wait_for(lambda: status() == 503, "Apache answers")
        for _ in range(3):
            code, headers, body = _get(served.port, "/v3")
            assert code == 503
            assert headers["Retry-After"] == "10"
            assert b"fernet" not in body
        text = log.read_text()
        assert "arguments already parsed" not in text
        lines = [line for line in text.splitlines() if "503, the application did not load" in line]
        assert len(lines) >= 4
        assert all(str(state / "fernet-keys") in line for line in lines)
        repair()
        wait_for(lambda: status() == 200, "a fresh process serves")


@pytest.mark.parametrize("server", ("uwsgi", "nginx+uwsgi"))
def test_an_application_that_raises_is_answered_500(
    keystone_state: tuple[Path, int], server: str
) -> None:
    """uWSGI alone closes the connection without a byte, and nginx in front says 502."""
    state, port = keystone_state
    environment = {
        "KEYFRONT_APP": "raising_app:application",
        "PYTHONPATH": str(APPS),
    }
    with serve(state, server, port=port, environment=environment) as served:
        status, _, body = _get(served.port, "/raise")
        assert (status, json.loads(body)["error"]["code"]) == (500, 500)
        assert b"database" not in body
        assert _get(served.port, "/")[0] == 200
        log = (state / "log" / "uwsgi.log").read_text()
        assert "RuntimeError: what the database said" in log


@pytest.mark.parametrize("server", ("uwsgi", "gevent", "nginx+uwsgi"))
def test_a_worker_that_grew_is_replaced_and_loses_nothing(
    keystone_state: tuple[Path, int], server: str
) -> None:
    state, port = keystone_state
    environment = {
        "KEYFRONT_APP": "growing_app:application",
        "KEYFRONT_RELOAD_ON_RSS": "150",
        "PYTHONPATH": str(APPS),
    }
    with serve(state, server, port=port, environment=environment) as served:
        workers: set[bytes] = set()

        def another() -> bool:
            status, _, body = _get(served.port, "/")
            assert status == 200
            workers.add(body)
            return len(workers) >= 4

        wait_for(another, "both workers have been replaced")
    log = (state / "log" / "uwsgi.log").read_text()
    assert log.count("is replaced after its requests (KEYFRONT_RELOAD_ON_RSS = 150)") >= 2


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("KEYFRONT_RELOAD_ON_RSS", "250M", "an integer of MiB, 1 to 1048576, or 0 for no limit"),
        ("KEYFRONT_QUEUE_TIMEOUT", "soon", "a number of seconds, 0.1 to 3600, or 0 for no limit"),
    ],
)
def test_a_limit_that_makes_no_sense_ends_the_start(
    keystone_state: tuple[Path, int], variable: str, value: str, allowed: str
) -> None:
    state, port = keystone_state
    done = subprocess.run(
        [sys.executable, "-m", "keyfront", "serve", "--state", str(state),
         "--listen", f"127.0.0.1:{port}"],
        env={**os.environ, variable: value},
        capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"{variable} = {value}: must be {allowed}" in line


def test_a_paste_file_with_a_name(keystone_state: tuple[Path, int], tmp_path: Path) -> None:
    """A paste file of the operator's, with a name, named by KEYFRONT_APP."""
    state, port = keystone_state
    paste = tmp_path / "pipelines.ini"
    paste.write_text(
        "[pipeline:public]\npipeline = good\n"
        "[app:good]\npaste.app_factory = raising_app:app_factory\n"
    )
    environment = {"KEYFRONT_APP": f"config:{paste}#public", "PYTHONPATH": str(APPS)}
    with serve(state, "uwsgi", port=port, environment=environment) as served:
        status, _, body = _get(served.port, "/")
    assert (status, body) == (200, b"good")

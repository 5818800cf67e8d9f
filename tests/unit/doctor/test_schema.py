"""Who waits for the database's answer goes on as soon as it is there, and puts nothing off."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from keyfront.gateway.doctor import schema
from support.doctor.deployments import LOOPBACK
from support.served import PATIENCE

_CONF = "/etc/keystone/keystone.conf"
_KNOWN = "mysql+pymysql://keystone:secret@192.0.2.10/keystone?ssl_ca=/etc/ssl/ca.pem"
MACHINE = LOOPBACK.swap(_CONF, _KNOWN, "sqlite:////var/keystone.sqlite")


def test_an_answer_is_not_waited_for_once_it_is_there(tmp_path: Path) -> None:
    """Also if eventlet is imported for it, as Keystone's models do: it imports a threading of its
    own, after which the thread is never seen to end."""
    MACHINE.make(tmp_path)
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from keyfront.gateway.doctor import config_files, schema\n"
        "def asked(found, url):\n"
        "    from eventlet import patcher\n"
        "    assert patcher.original('threading') is not threading\n"
        "    return schema.Schema(host='answered')\n"
        "schema._asked = asked\n"
        "print(schema.look(config_files.look(Path(sys.argv[1])), patience=3600).host)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "answered\n"), done.stderr


def test_a_database_that_is_given_up_changes_no_filters_of_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def wait(*_: Any) -> Any:
        asked.set()
        go_on.wait(PATIENCE)
        raise FileNotFoundError

    def ask(*words: Any, known: Any = schema._asked) -> Any:
        try:
            return known(*words)
        finally:
            over.set()

    monkeypatch.setattr(schema, "_for_reading", wait)
    monkeypatch.setattr(schema, "_asked", ask)
    found = MACHINE.found(tmp_path)
    before = list(warnings.filters)
    assert schema.look(found, patience=0.1) is None
    assert asked.wait(PATIENCE)
    assert warnings.filters == before
    with warnings.catch_warnings(action="error"):
        within = list(warnings.filters)
        go_on.set()
        assert over.wait(PATIENCE)
        assert warnings.filters == within

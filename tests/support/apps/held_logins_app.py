"""Logins that last until ``HELD_LOGINS/go`` is there; each answer names the worker that gave it."""

import json
import os
import tempfile
import time
from pathlib import Path

import uwsgi

FOLDER = Path(os.environ["HELD_LOGINS"])


def application(environ, start_response):
    if environ["REQUEST_METHOD"] == "POST":
        environ["wsgi.input"].read()
        tempfile.mkstemp(prefix="begun-", dir=FOLDER)
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({"worker": uwsgi.worker_id(), "pid": os.getpid()}).encode()]

"""Logins that last until ``HELD_LOGINS/go`` is there; each answer names the worker that gave it."""

import json
import os
import tempfile
import time
from pathlib import Path

try:
    import uwsgi
except ImportError:
    uwsgi = None

FOLDER = Path(os.environ["HELD_LOGINS"])


def application(environ, start_response):
    if environ["REQUEST_METHOD"] == "POST":
        environ["wsgi.input"].read()
        tempfile.mkstemp(prefix="begun-", dir=FOLDER)
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
    start_response("200 OK", [("Content-Type", "application/json")])
    told = {
        "worker": uwsgi.worker_id() if uwsgi else environ["mod_wsgi.process_group"],
        "pid": os.getpid(),
        "method": environ["REQUEST_METHOD"],
        "path": environ["PATH_INFO"],
        "query": environ.get("QUERY_STRING", ""),
    }
    return [json.dumps(told).encode()]

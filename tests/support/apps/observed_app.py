"""Keystone behind keyfront, and beside it what a test wants to see of a server's own doing.

``/observed/environ`` answers with the text values of the request's environ as JSON, and the length
of its body; ``/observed/sleep/SECONDS`` holds its thread that long. The rest is the application
that ``OBSERVED_APP`` names.

Loading it tells so by a file of its process number in the folder ``OBSERVED_LOADS``, and waits for
``NUMBER.go`` beside it, as long as there is such a folder.
"""

import json
import os
import time
from pathlib import Path

from keyfront.gateway.application import load

LOADS = Path(os.environ.get("OBSERVED_LOADS", "/nowhere"))

if LOADS.is_dir():
    (LOADS / str(os.getpid())).touch()
    while LOADS.is_dir() and not (LOADS / f"{os.getpid()}.go").exists():
        time.sleep(0.02)

behind = load(os.environ["OBSERVED_APP"])


def application(environ, start_response):
    path = environ["PATH_INFO"]
    if not path.startswith("/observed/"):
        return behind(environ, start_response)
    length = len(environ["wsgi.input"].read())
    if path.startswith("/observed/sleep/"):
        time.sleep(float(path.rpartition("/")[2]))
    seen = {name: value for name, value in environ.items() if isinstance(value, str)}
    body = json.dumps({"body": length, "pid": os.getpid(), "environ": seen}).encode()
    method = environ["REQUEST_METHOD"]
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    # of an answer to HEAD there is nothing else to see
    start_response("200 OK", [*headers, ("X-Observed-Method", method)])
    return [] if method == "HEAD" else [body]

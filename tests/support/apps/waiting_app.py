"""A WSGI application whose requests end when the test says so.

``/hold/NAME`` tells that it runs by making the file ``NAME.held`` in ``HOLD_FOLDER``, and answers
once ``NAME.go`` is there; without ``NAME.go`` it never answers. Anything else answers at once.
With ``HOLD_LOAD`` set, loading itself tells so by ``load-PID``, waits for ``load.go`` or
``load-PID.go``, and fails over ``load.fail``.
"""

import os
import time
from pathlib import Path

FOLDER = Path(os.environ.get("HOLD_FOLDER", "."))

if "HOLD_LOAD" in os.environ:
    (FOLDER / f"load-{os.getpid()}").touch()
    while not any((FOLDER / name).exists() for name in ("load.go", f"load-{os.getpid()}.go")):
        if (FOLDER / "load.fail").exists():
            raise RuntimeError("load.fail is there")
        time.sleep(0.02)


def application(environ, start_response):
    path = environ["PATH_INFO"]
    if path.startswith("/hold/"):
        name = path.removeprefix("/hold/")
        (FOLDER / f"{name}.held").touch()
        while not (FOLDER / f"{name}.go").exists():
            time.sleep(0.02)
    body = str(os.getpid()).encode()
    start_response(
        "200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))]
    )
    return [body]

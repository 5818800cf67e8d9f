"""Makes what a process makes at its first request while Keystone is loaded.

uWSGI forks its workers from the process that has loaded Keystone: what is there by then none of
them makes anew, and who asks a fresh worker does not wait for it. Nothing here connects to the
database or reads of it, which need not be there yet.
"""

from __future__ import annotations

import logging
import wsgiref.util
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

LOG = logging.getLogger(__name__)

# The plugin of SQLAlchemy's URLs, as the entry point of our distribution has it.
PLUGIN = ("keyfront", "keyfront.gateway.keystone.sqlite", "Plugin")


def load_driver(connection: str | None) -> None:
    """Load what an engine of a database is made with. What is missing the engine will say.

    :param connection: the database's URL
    """
    with suppress(Exception):
        from sqlalchemy.dialects import plugins
        from sqlalchemy.engine import make_url

        # SQLAlchemy would look for it in what each installed distribution says of itself.
        plugins.register(*PLUGIN)
        if connection:
            make_url(connection).get_dialect().import_dbapi()


def answer_one(application: Callable[..., Iterable[bytes]]) -> None:
    """Have Keystone answer a request that needs nothing: what it is, for which no log has a line.

    :param application: Keystone's WSGI application, middleware included
    """
    environ: dict[str, Any] = {"PATH_INFO": "/v3", "REMOTE_ADDR": "127.0.0.1", "QUERY_STRING": ""}
    wsgiref.util.setup_testing_defaults(environ)
    try:
        body = application(environ, lambda *answer: lambda written: None)
        close = getattr(body, "close", None)
        if close is not None:
            close()
    except Exception as error:
        # Whoever asks is told by Keystone.
        LOG.debug("Keystone does not tell its version: %s", error)

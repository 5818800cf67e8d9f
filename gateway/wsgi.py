"""The entrypoint for servers without one of their own: gunicorn, granian, waitress.

``gunicorn keyfront.gateway.wsgi:application`` serves what ``KEYFRONT_APP`` names (see
:mod:`keyfront.gateway.application`); left out, Keystone behind the packaged pipeline. A failed
load is raised, since these servers report it and end.
"""

from __future__ import annotations

from keyfront.common.fork import registry

from . import slow_requests
from .application import keep_connections, load_or_fail, pin_argv
from .traces import installation as traces

pin_argv()
trace = traces.install(registry)
registry.install()
application = trace(
    slow_requests.tell_slow(
        load_or_fail(raising=True), seconds=slow_requests.from_environment()
    )
)
keep_connections()
# a server that preloads forks after this (os.register_at_fork starts its workers' handlers); in any
# other one this process is the worker
registry.prepare()
registry.reopen()

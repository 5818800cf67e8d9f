"""The mark of a request that came too late for its turn, for those before and behind it.

:mod:`keyfront.gateway.queue_limit` sets it on what a cache may know, and refuses the request where
the application would be asked. In between, nothing should be begun for it that others wait for.
"""

ENVIRON_KEY = "keyfront.late"
"""The WSGI variable; what it holds is the application that refuses the request."""

"""The mark of a request that has waited too long in the queue of its server.

:mod:`keyfront.gateway.queue_limit` marks requests that a cache may still answer, and refuses them
where Keystone would be asked. In between, no work should be begun for them for which other requests
would wait.
"""

ENVIRON_KEY = "keyfront.late"
"""The WSGI variable with the mark: the application that refuses the request."""

"""What a request and a process cost, as measured; every figure names where it comes from.

On faster cores everything is better than planned, on slower ones ``keyfront plan --measure`` tells.
"""

from __future__ import annotations

from typing import Final

# CPU seconds a request.
#: bcrypt with 12 rounds, [identity] password_hash_rounds' default, with bcrypt.hashpw alone.
PASSWORD_HASH: Final = 0.20
#: The rest of a login, whatever checks the password (docs/ldap.md, "of it CPU").
LOGIN: Final = 0.18
#: A validation that Keystone answers itself: 23 a second on two cores (README.md).
VALIDATION: Final = 0.087
#: One that the token cache answers, with nginx's share: 28100 a second on two cores without it.
CACHED_VALIDATION: Final = 0.0002
#: The part of the validations that the cache has to ask Keystone about: each token every 30 s.
MISSES: Final = 0.01
#: The part of the cores that may be busy on average; above it waiting grows out of proportion.
BUSY: Final = 0.7

# MiB; docs/gateway.md, "Loading before the fork": with 8 workers and their master 271 PSS and 1047
# RSS when loaded before the fork, 864 PSS when each loads by itself.
#: What all processes share that were forked from one that had loaded Keystone.
SHARED: Final = 97
#: What each of them has on top of it after some requests.
OWN: Final = 20
#: A process that loaded Keystone by itself.
ALONE: Final = 107
#: An nginx worker without connections.
NGINX_WORKER: Final = 6
#: A thread of Apache's event MPM, with its part of the process and a request's buffers.
APACHE_THREAD: Final = 0.35
#: A process of Apache's prefork MPM.
APACHE_PREFORK: Final = 10.0

# KiB
#: A client's connection in nginx or Apache with TLS: OpenSSL's state and a request's buffers.
CLIENT: Final = 30
#: A slot of worker_connections: connection and two events (src/core/ngx_connection.h).
SLOT: Final = 424 / 1024

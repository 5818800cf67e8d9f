"""The costs of a request and of a process, as measured; every figure names its origin.

On faster cores everything is better than planned, on slower ones ``keyfront plan --measure`` tells.
"""

from __future__ import annotations

from typing import Final

# CPU seconds a request.
#: bcrypt with 12 rounds, [identity] password_hash_rounds' default, with bcrypt.hashpw alone.
PASSWORD_HASH: Final = 0.20
#: The rest of a login, whatever checks the password (docs/ldap.md, "of it CPU").
LOGIN: Final = 0.18
#: A validation that Keystone answers itself: 23 a second on two cores (docs/plan.md).
VALIDATION: Final = 0.087
#: One that the token cache answers, with nginx's share: 28100 a second on two cores without it.
CACHED_VALIDATION: Final = 0.0002
#: One that it has to ask Keystone about, where Keystone's own reading is kept in memory: "asked of
#: Keystone" of python -m keyfront.benchmarks.compare.keystone_cpu, 1.5 ms on SQLite, 9 in a
#: fresh worker; without the server's part, so it is counted higher (docs/plan.md).
FIRST_VALIDATION: Final = 0.005
#: The part of the validations that are such ones, as keyfront tokens stats told it after the mix of
#: keyfront bench cloud: 28 misses of 1017. On several nodes it is more (docs/plan.md).
FIRST_SHARE: Final = 0.03
#: The part of the cores that may be busy on average; above it waiting grows out of proportion.
BUSY: Final = 0.7

# MiB; docs/gateway.md, "Loading before the fork": with 8 workers and their master 271 PSS and 1047
# RSS when loaded before the fork, 864 PSS when each loads by itself.
#: The memory that all processes share that were forked from one that had loaded Keystone.
SHARED: Final = 97
#: The memory that each of them has on top of it after some requests.
OWN: Final = 20
#: A process that loaded Keystone by itself.
ALONE: Final = 107
#: keyfront uwsgi, which keeps uWSGI's sockets over a reload: 12.8 of PSS (docs/plan.md).
MANAGER: Final = 13
# MiB; python -m keyfront.benchmarks.compare.memory front
#: nginx's master and what the libraries of its processes share; a worker without connections.
NGINX_MASTER: Final = 3
NGINX_WORKER: Final = 2
#: A thread of Apache's event MPM: its stack, and the pools of a request.
APACHE_THREAD: Final = 0.25
#: A process of Apache's prefork MPM: 0.7 with mod_ssl after a small request, and larger ones.
APACHE_PREFORK: Final = 2.0

# KiB
#: A client's connection in nginx: 16 measured for an idle one with TLS, 8 for the buffers of a
#: running request, 2 for slots of worker_connections (424 bytes each).
CLIENT: Final = 26
#: The same in Apache's event MPM, measured.
APACHE_CLIENT: Final = 75

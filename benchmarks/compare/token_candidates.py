"""What ``token_validation`` compares: what is served, and how Keystone is configured under it.

Stock Keystone and the bare application are served by their own entry, without a line of keyfront in
the process: no entrypoint, and no plugin in the database's URL.
"""

from __future__ import annotations

from dataclasses import dataclass

STOCK = "keystone.wsgi.api:application"
BARE = "bare:application"

# The database's URL without our plugin, which the state's own configuration has in it.
_UNTOUCHED = """\
[database]
connection = sqlite:///{database}
"""

# Where it is by default: in memory. Less than by default, since /dev/shm is small in containers.
# The one miss that ends every 30 s of hits is none of a run's hits: wrk, which corrects its
# latencies for requests it could not send meanwhile, makes it hundreds of slow answers.
_SHARED = """\
[keyfront_token_cache]
path = {shared}
node_memory = 8
ttl = 3600
"""

_MEMCACHED = """\
[cache]
enabled = true
backend = dogpile.cache.pymemcache
memcache_servers = {memcached}
"""

_NO_TOKEN_CACHING = """\
[token]
caching = false
"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """What one uWSGI serves.

    :param module: uWSGI's ``module``; ``None`` for keyfront's entrypoint and packaged pipeline
    :param memcached: whether Keystone's own caches are in a memcached
    :param token_caching: Keystone's ``[token] caching``
    :param kept: whether connections are kept
    """

    label: str
    module: str | None = None
    memcached: bool = False
    token_caching: bool = True
    kept: bool = False

    def configuration(self, values: dict[str, str]) -> str:
        """What is added to keystone.conf."""
        parts = (
            (_SHARED if self.module is None else _UNTOUCHED, True),
            (_MEMCACHED, self.memcached),
            (_NO_TOKEN_CACHING, not self.token_caching),
        )
        return "".join(part.format(**values) for part, wanted in parts if wanted)


CANDIDATES = {
    "keystone": Candidate(label="Keystone", module=STOCK),
    "memcached": Candidate(label="Keystone + memcached", module=STOCK, memcached=True),
    "bare": Candidate(label="bare WSGI application", module=BARE),
    "bare kept": Candidate(label="bare WSGI application", module=BARE, kept=True),
    "keyfront": Candidate(label="Keystone + keyfront"),
    "keyfront kept": Candidate(label="Keystone + keyfront", kept=True),
    "keyfront+memcached": Candidate(label="Keystone + memcached + keyfront", memcached=True),
    "keyfront+memcached-tokens": Candidate(
        label="the same, no token caching", memcached=True, token_caching=False
    ),
}

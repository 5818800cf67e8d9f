"""The experiments there are, in the order in which ``all`` runs them."""

from __future__ import annotations

from . import apache_mpm, keystone_frontends, ldap_pool, live_replay, small_nginx

EXPERIMENTS = {
    one.name: one
    for one in (
        keystone_frontends.EXPERIMENT,
        apache_mpm.EXPERIMENT,
        ldap_pool.EXPERIMENT,
        small_nginx.EXPERIMENT,
        live_replay.EXPERIMENT,
    )
}
NAMES = tuple(EXPERIMENTS)

"""Ten clean deployments: no false alarm, and the layers of each were really read."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.doctor.deployments import CLEAN

# What is read of each, so that silence does not come from having found nothing.
_LAYERS = {
    "debian-nginx": ("keystone", "uwsgi", "nginx", "systemd", "keys"),
    "devstack": ("keystone", "uwsgi", "apache", "systemd"),
    "kolla": ("keystone", "uwsgi", "haproxy"),
    "osa": ("keystone", "uwsgi", "apache"),
    "rdo-puppet": ("keystone", "apache"),
    "openstack-helm": ("keystone", "apache"),
    "charm": ("keystone", "apache", "haproxy"),
    "converged-cloud": ("keystone", "uwsgi"),
    "ldap-galera": ("keystone", "apache", "ldap", "mysql", "memcached"),
    "loopback": ("keystone", "uwsgi"),
    "devstack-whole": ("keystone", "uwsgi", "pass"),
    "nginx-cohosted": ("keystone", "uwsgi", "location"),
    "puppet-cohosted": ("keystone", "mod_wsgi"),
    "kolla-host": ("keystone", "uwsgi", "backend", "systemd"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_no_false_alarm(name: str, tmp_path: Path) -> None:
    found = CLEAN[name].diagnosis(tmp_path)
    kept = [(x.level, x.check.code, x.finding.what) for x in found.results]
    assert kept == []


@pytest.mark.parametrize("name", CLEAN)
def test_what_is_there_is_read(name: str, tmp_path: Path) -> None:
    found = CLEAN[name].found(tmp_path)
    assert [x for x in _LAYERS[name] if not found.has(x)] == []
    assert found.malformed == []

"""The OpenStack series that a release of Keystone belongs to."""

from __future__ import annotations

import importlib.metadata

# https://releases.openstack.org; a test holds it against tests/series/series.toml.
SERIES = {27: "2025.1", 28: "2025.2", 29: "2026.1", 30: "2026.2"}
"""By Keystone's major version: those that keyfront is tested with."""


def described(version: str) -> str:
    """Return a version of Keystone with its series: ``30.0.0 (OpenStack 2026.2)``.

    :param version: the version of the package
    :returns: a text, with ``no tested series`` for a Keystone that no test is run with
    """
    major = version.partition(".")[0]
    series = SERIES.get(int(major)) if major.isdigit() else None
    return f"{version} ({f'OpenStack {series}' if series else 'of no tested series'})"


def installed() -> str:
    """Return the Keystone of this environment, as :func:`described`.

    :raises importlib.metadata.PackageNotFoundError: Keystone is not installed
    """
    return described(importlib.metadata.version("keystone"))

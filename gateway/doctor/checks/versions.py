"""Checks of what is installed (V), by the list of advisories that keyfront has with it."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

from ..found import Found
from ..registry import ERROR, WARNING, Finding, check


def advisories() -> dict[str, Any]:
    """Return the list: ``date``, and ``advisories`` with id, project, title, source and ranges."""
    file = importlib.resources.files("keyfront.gateway.doctor") / "advisories.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


@check(
    "V01",
    ERROR,
    "versions",
    holds="No published advisory is about the installed Keystone and keystonemiddleware",
    harm="What the advisory says can be done to this cloud.",
    source="https://security.openstack.org/ossalist.html and cve.org, in "
    "gateway/doctor/advisories.json",
)
def published(found: Found) -> Iterator[Finding]:
    """The list is dated and comes with keyfront. Distributions mend without a new number: tell what
    theirs amounts to with --assume keystone=VERSION."""
    # keystonemiddleware is of the services; a machine with Keystone alone may have none.
    for project in ("keystone", "keystonemiddleware"):
        version = found.versions.get(project)
        if version is None:
            continue
        known = [one for one in advisories()["advisories"] if one["project"] == project]
        fixed = {end for one in known for _, end in one["ranges"]}
        clean = [
            text
            for text in sorted(fixed, key=_numbers)
            if _numbers(text) > version and not any(_is_about(one, _numbers(text)) for one in known)
        ]
        for one in known:
            if _is_about(one, version):
                yield Finding(
                    what=f"{project} {'.'.join(map(str, version))}: {one['id']}, {one['title']}; "
                    f"{one['source']}",
                    lines=(f"pip install --upgrade '{project}>={clean[0]}'",) if clean else (),
                )
    # keystonemiddleware is of the services: a machine with Keystone alone may have none.
    found.version("keystone")


def _is_about(advisory: dict[str, Any], version: tuple[int, ...]) -> bool:
    """Return whether an advisory is about a version, from the first to before the mended one."""
    return any(_numbers(first) <= version < _numbers(fixed) for first, fixed in advisory["ranges"])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


@check(
    "V02",
    WARNING,
    "uwsgi",
    holds="uWSGI is a release whose stop and reload work",
    harm="Stops hang or answer nothing, or a reload does not come about.",
    source="uWSGI, Changelog: #2653, #2656, #2681, fixed in 2.0.27 and 2.0.28",
)
def uwsgi_release(found: Found) -> Iterator[Finding]:
    """Each is about one way of running it; 2.0.31 has none of them."""
    version = found.version("uwsgi")
    touches = [
        x for conf in found.uwsgi for x in conf.settings.all("touch-reload", "reload-on-touch")
    ]
    if version == (2, 0, 27) and touches:
        yield Finding(
            what="uWSGI 2.0.27 does not reload on touch",
            where=(touches[0].place,),
            lines=("pip install --upgrade 'uwsgi>=2.0.28'",),
        )
    python = [
        x
        for conf in found.uwsgi
        for x in conf.settings.all("max-requests")
        if conf.threads > 1 and (x.number or 0) > 0
    ]
    if python and version < (2, 0, 27):
        yield Finding(
            what=f"max-requests with threads hangs in uWSGI {'.'.join(map(str, version))}",
            where=(python[0].place,),
            lines=("pip install --upgrade 'uwsgi>=2.0.31'",),
        )

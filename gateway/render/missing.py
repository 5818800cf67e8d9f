"""Finds the files that rendered files name and that are not on this machine.

A server that finds one missing does not start, or, where a daemon of mod_wsgi does not, answers 504
after a minute. What belongs to a server that is assumed is on another machine and not looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .settings import Settings
from .versions import Versions
from .writer import File

# What brings a server's files.
_BRINGS = {
    "uwsgi": "{pip} install 'keyfront[uwsgi]'",
    "mod_wsgi": "apt install apache2-dev gcc, then {pip} install 'keyfront[mod-wsgi]'",
    "nginx": "apt install nginx",
    "apache": "apt install apache2-bin",
    "haproxy": "apt install haproxy",
}
_LOAD_MODULE = re.compile(r'^LoadModule (\w+) "?(/[^"\n]+?)"?$', re.MULTILINE)
_EXEC_START = re.compile(r'^ExecStart(?:Pre)?=\+?"?(/[^" \n]+)', re.MULTILINE)
_PROGRAM = re.compile(r'^ExecStart=.* --program "?(/[^" \n]+)', re.MULTILINE)
# The server that the program of a unit belongs to; of others, Apache.
_SERVERS = {"nginx": "nginx", "uwsgi": "uwsgi", "keyfront": "uwsgi", "install": ""}


class Missing(NamedTuple):
    """A file that is not there: its path, the rendered file that names it, and what to do."""

    path: Path
    named_in: str
    remedy: str


def missing(files: Sequence[File], settings: Settings, versions: Versions) -> list[Missing]:
    """Return the files that are named and are not here, each once.

    With HAProxy's file only its own are looked for, since the others are for the nodes.

    :param files: the rendered files
    :param settings: the settings that they were rendered from
    :param versions: the versions of this machine's servers
    """
    pip = settings.virtualenv / "bin" / "pip"
    found: dict[Path, Missing] = {}
    for path, named_in, server in _named(files, settings):
        if server and versions[server].how == "assumed":
            continue
        remedy = "put it there before the start"
        if server:
            told = f"; or tell with --assume {server}=VERSION what another machine has"
            remedy = f"run {_BRINGS[server].format(pip=pip)}{told}"
        if not path.exists():
            found.setdefault(path, Missing(path, named_in, remedy))
    return list(found.values())


def _named(files: Sequence[File], settings: Settings) -> Iterator[tuple[Path, str, str]]:
    """Give the files that are named, by which rendered file, and the server they belong to."""
    front = "haproxy.cfg" if settings.haproxy else f"the files of {settings.server}"
    for named in (settings.certificate, settings.key, settings.node_ca):
        if named is not None:
            yield named, front, ""
    if settings.haproxy:
        yield Path("/usr/sbin/haproxy"), front, "haproxy"
        return
    for file in files:
        for module, path in _LOAD_MODULE.findall(file.text):
            yield Path(path), file.path, "mod_wsgi" if module == "wsgi_module" else "apache"
        for path in _EXEC_START.findall(file.text) + _PROGRAM.findall(file.text):
            yield Path(path), file.path, _SERVERS.get(Path(path).name, "apache")
    target = settings.target.removeprefix("config:").partition("#")[0]
    written = {settings.folder / file.path for file in files}
    if settings.target.startswith("config:/") and Path(target) not in written:
        yield Path(target), "--app", ""

"""What ``keyfront render`` has to be told to reach what the doctor asks for, and its diff."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..render.writer import File
from .found import Found

#: The folder that is proposed where keyfront rendered none yet.
FOLDER = "/etc/keyfront"


def words(found: Found) -> list[str]:
    """Return the words of a ``keyfront render`` that fits what was found: folder and options.

    A folder that was rendered keeps its command; else the line-up, the address, the certificate
    and the places are those of the configuration.
    """
    for one in found.rendered:
        if len(one.command) > 2:
            return list(one.command[2:])
    options = [FOLDER, "--server", _lineup(found)]
    listen = _listen(found)
    if listen:
        options += ["--listen", listen]
    for option, names in (
        ("--tls-certificate", ("ssl_certificate", "sslcertificatefile")),
        ("--tls-key", ("ssl_certificate_key", "sslcertificatekeyfile")),
    ):
        trees = [tree for tree in (found.nginx, found.apache) if tree is not None]
        known = next((x for tree in trees for x in tree.all(*names)), None)
        if known is not None and known.value.startswith("/"):
            options += [option, known.value]
    conf = found.keystone
    if conf is not None:
        folder = str(Path(conf.path).parent)
        if folder != "/etc/keystone":
            options += ["--config", folder]
        endpoint = conf.text("default", "public_endpoint").rstrip("/").removesuffix("/v3")
        if endpoint:
            options += ["--public-endpoint", endpoint]
        servers = conf.text("cache", "memcache_servers")
        if found.uses_memcached and servers:
            options += ["--memcached", servers.replace(" ", "")]
    for conf_ in found.uwsgi:
        home = conf_.settings.last("virtualenv")
        if home is not None:
            options += ["--virtualenv", home.value]
            break
    return options


def _lineup(found: Found) -> str:
    if found.nginx is not None and found.nginx.all("uwsgi_pass", "proxy_pass"):
        unix = any(True for _ in found.unix_upstreams())
        return "nginx+uwsgi" if unix else "nginx+uwsgi-tcp"
    if found.apache is not None:
        if found.apache.all("wsgiscriptalias"):
            return "mod_wsgi"
        if found.apache.all("proxypass", "proxypassmatch"):
            return "apache+uwsgi"
    return "nginx+uwsgi"


def _listen(found: Found) -> str:
    """Return where the foremost server listens, as ``--listen`` has it."""
    trees = [tree for tree in (found.nginx, found.apache) if tree is not None]
    for tree in trees:
        for directive in tree.all("listen"):
            address = directive.args[0] if directive.args else ""
            if address.isdigit():
                address = f"*:{address}"
            address = address.replace("0.0.0.0:", "*:").replace("[::]:", "*:")
            if address.rpartition(":")[2] in ("5000", "443", "35357"):
                return address
    return ""


def diff(files: Sequence[File], folder: Path, found: Found) -> Iterator[str]:
    """Give the lines of a unified diff from what was found to what would be rendered.

    A rendered file is compared with the one of its kind that was found, if it is not there itself.
    """
    for file in files:
        here = file.goes_to or str(folder / file.path)
        path = here if found.files.exists(here) else _like(file, found)
        there = (found.files.text(path) or "") if path else ""
        if there == file.text:
            continue
        yield from difflib.unified_diff(
            there.splitlines(keepends=True),
            file.text.splitlines(keepends=True),
            path or "/dev/null",
            here,
        )


def _like(file: File, found: Found) -> str:
    """Return the file that a rendered one would take the place of; empty if there is none."""
    trees = {"nginx.conf": found.nginx, "apache.conf": found.apache, "haproxy.cfg": found.haproxy}
    tree = trees.get(file.path)
    if tree is not None:
        return tree.path
    if file.path == "uwsgi.ini" and found.uwsgi:
        return found.uwsgi[0].path
    return ""


def command(options: Sequence[str]) -> str:
    """Return the command that would write it."""
    return shlex.join(["keyfront", "render", *options])

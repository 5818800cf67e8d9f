"""The options of ``keyfront render`` that mend what the doctor has found, and their diff."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..render.writer import File
from . import routes
from .found import Found
from .machine_state import memcached_address
from .redaction import masked

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
    certificate, key = _certificate(found)
    if certificate:
        # One file may hold both.
        options += ["--tls-certificate", certificate, "--tls-key", key or certificate]
    conf = found.keystone
    if conf is not None:
        folder = str(Path(conf.path).parent)
        if folder != "/etc/keystone":
            options += ["--config", folder]
        endpoint = conf.text("default", "public_endpoint").rstrip("/").removesuffix("/v3")
        if endpoint:
            options += ["--public-endpoint", endpoint]
        servers = [
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            for host, port in map(
                memcached_address, conf.text("cache", "memcache_servers").split(",")
            )
            if host
        ]
        if found.uses_memcached and servers:
            options += ["--memcached", ",".join(servers)]
    for conf_ in found.uwsgi:
        home = conf_.settings.last("virtualenv")
        if home is not None:
            options += ["--virtualenv", home.value]
            break
    return options


def _certificate(found: Found) -> tuple[str, str]:
    """Return the certificate and the key of the server that leads to Keystone; empty if none."""
    fallback = ("", "")
    for tree, names, handed in (
        (found.nginx, ("ssl_certificate", "ssl_certificate_key"), routes.nginx_passes(found)),
        (
            found.apache,
            ("sslcertificatefile", "sslcertificatekeyfile"),
            [*routes.apache_passes(found), *routes.aliases(found)],
        ),
    ):
        if tree is None:
            continue
        for directive in handed:
            block = directive.around[-1] if directive.around else None
            found_ = [
                tree.effective(block, name) if block is not None else tree.last(name)
                for name in names
            ]
            if found_[0] is not None and found_[0].value.startswith("/"):
                return found_[0].value, found_[1].value if found_[1] else ""
    return fallback


def _lineup(found: Found) -> str:
    if routes.nginx_passes(found):
        unix = any(True for _ in found.unix_upstreams())
        return "nginx+uwsgi" if unix else "nginx+uwsgi-tcp"
    if found.apache is not None:
        if routes.aliases(found):
            return "mod_wsgi"
        if routes.apache_passes(found):
            return "apache+uwsgi"
    return "nginx+uwsgi"


def _listen(found: Found) -> str:
    """Return the address at which the foremost server listens, as ``--listen`` has it."""
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
    Lines that come are whole: what is taken over has to be what keyfront render writes. Of lines
    that go, values are shown only of directives that the rendered file has as well, and only such
    as are no secret; for others stands ``***``.
    """
    for file in files:
        here = file.goes_to or str(folder / file.path)
        path = here if found.files.exists(here) else _like(file, found)
        there = (found.files.text(path) or "") if path else ""
        if there == file.text:
            continue
        known = _Known(file.text)
        for line in difflib.unified_diff(
            there.splitlines(keepends=True),
            file.text.splitlines(keepends=True),
            path or "/dev/null",
            here,
        ):
            line = line.rstrip("\n")
            if line.startswith("-") and not line.startswith("--- "):
                line = f"-{known.of_a_stranger(line[1:])}"
            yield f"{masked(line, ours=known.is_ours(line[1:]))}\n"


# What is no secret by its form: numbers, times, sizes, switches, paths, variables, brackets.
_HARMLESS = re.compile(
    r"[\d.,:x%*-]+[a-zA-Z]{0,3};?|on;?|off;?|true|false|yes|no|auto;?|all|none|default;?|[{}<>();=]+"
    r"|/[\w./%*-]*[;>]?|[$%]\{?\w+\}?;?|[\w.+-]+\.(?:conf|ini|log|sock|socket|pid|pem|crt|key|so|py);?",
    re.IGNORECASE,
)
# Directives whose value is whatever somebody sends or wants to be sent.
_HEADERS = re.compile(
    r"(?i)(request)?header$|set_header$|add_header$|_param$|setenv|passenv|^env$|^http-re|^stats$"
    r"|^user$|^userlist$|^cookie$|^set$|logger|^acl$|^auth|^oidc|^mellon|^shib"
)


class _Known:
    """The words of a rendered file, by which lines of others may be shown.

    :param text: the rendered file's
    """

    def __init__(self, text: str) -> None:
        rows = [line.split() for line in text.splitlines()]
        self.names = {self.name(row[0]) for row in rows if row}
        self.words = {word for row in rows for word in row}
        self.lines = {" ".join(row) for row in rows}

    @staticmethod
    def name(word: str) -> str:
        return word.lower().lstrip("<").partition("=")[0].rstrip(";>")

    def is_ours(self, line: str) -> bool:
        """Return whether the rendered file has this line."""
        return " ".join(line.split()) in self.lines

    def of_a_stranger(self, line: str) -> str:
        """Return a line of somebody else's file with what may be shown of it; to be masked."""
        stripped = line.strip()
        if not stripped or self.is_ours(line):
            return line
        indent = line[: len(line) - len(line.lstrip())]
        if stripped[0] in "#;":
            return f"{indent}# ***"
        first, _, rest = stripped.replace("=", " = ", 1).partition(" ")
        name = self.name(first)
        if first.startswith(("[", "<", "</", "}")):
            return line
        if name not in self.names:
            return f"{indent}{first}{' ***' if rest.strip(' ;{') else ''}"
        spared = self.words if not _HEADERS.search(name) else frozenset[str]()
        plain = [
            word if word in spared or _HARMLESS.fullmatch(word) else "***" for word in rest.split()
        ]
        return f"{indent}{' '.join((first, *plain))}"


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

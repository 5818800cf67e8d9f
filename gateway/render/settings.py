"""The settings of a deployment, which the operator tells: names, folders, addresses, no numbers."""

from __future__ import annotations

import grp
import ipaddress
import pwd
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keyfront.common import unix_sockets
from keyfront.common.programs import parse_listen
from keyfront.errors import OptionError

#: Seconds; beyond two years browsers' lists of HSTS sites ask for no more.
HSTS_MAX = 63072000
# The users that distributions give to their web servers, Debian's first.
_WEB_USERS = ("www-data", "nginx", "apache")
_NAME = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_ENDPOINT = re.compile(r"https?://[\w.-]+(:[0-9]{1,5})?(/[\w./-]*)?(?<!/v3)/?", re.ASCII)
# Bytes; sockets' names are added, the longest of which is mod_wsgi's (wsgi.4194304.65.1.sock).
_RUN_LIMIT = 84
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one deployment.

    All paths are absolute. But for those of the Python environment and of a paste file, which are
    there already, they may not hold blanks or quotes.

    :param folder: the folder in which the files lie and are used
    :param server: a line-up of :mod:`.lineups`
    :param command: the command line that makes the files, for their headers
    :param target: the application, as in ``KEYFRONT_APP``; empty for the rendered paste file
    :param listen: ``HOST:PORT`` at which the foremost server listens; ``*`` for all addresses
    :param upstream: ``HOST:PORT`` at which uWSGI listens behind a web server over TCP
    :param login_upstream: the same for logins, where these have workers of their own
    :param public_host: the name clients use, and no other is served; empty if it does not matter
    :param other_hosts: further names that are served
    :param public_endpoint: the URL that links in Keystone's answers begin with; empty if it is not
        known, which is so behind a balancer unless it is told
    :param certificate: PEM file with the certificate and its chain; ``None`` without TLS
    :param key: PEM file with its key
    :param hsts: seconds for which browsers keep to TLS (``Strict-Transport-Security``), 0 for none
    :param redirect: true if port 80 redirects to TLS
    :param json_logs: access logs as one JSON object a line
    :param user: the user that runs the application
    :param group: the group of ``user``
    :param web_user: the user that runs the web server in front
    :param web_group: the group of ``web_user``, which may open uWSGI's socket
    :param run_directory: sockets; the web server's pid file lies beside it
    :param log_directory: access logs
    :param cache_directory: nginx's folder for bodies and answers that do not fit its buffers
    :param config: the folder of keystone.conf
    :param virtualenv: the Python environment with the application
    :param haproxy: ``HOST:PORT`` of the nodes behind HAProxy; empty without it
    :param node_ca: PEM file with the authority of the nodes' certificates, by which HAProxy knows
        them; ``None`` takes :attr:`certificate` itself, which is right for a self-signed one
    :param trusted_proxies: addresses or networks whose X-Forwarded-For is believed
    :param metrics: ``HOST:PORT`` or ``unix:/PATH`` at which Prometheus reads what the node counts
    :param memcached: ``HOST:PORT`` of the memcached servers for Keystone's caches
    """

    folder: Path
    server: str = "nginx+uwsgi"
    command: str = "keyfront render"
    target: str = ""
    listen: str = ""
    upstream: str = "127.0.0.1:35357"
    login_upstream: str = "127.0.0.1:35358"
    public_host: str = ""
    other_hosts: Sequence[str] = ()
    public_endpoint: str = ""
    certificate: Path | None = None
    key: Path | None = None
    hsts: int = 0
    redirect: bool = False
    json_logs: bool = False
    user: str = "keystone"
    group: str = ""
    web_user: str = ""
    web_group: str = ""
    run_directory: Path = Path("/run/keyfront")
    log_directory: Path = Path("/var/log/keyfront")
    cache_directory: Path = Path("/var/cache/keyfront")
    config: Path = Path("/etc/keystone")
    virtualenv: Path = field(default_factory=lambda: Path(sys.prefix))
    haproxy: Sequence[str] = ()
    node_ca: Path | None = None
    trusted_proxies: Sequence[str] = ()
    metrics: str = "127.0.0.1:9631"
    memcached: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Complete and check it.

        :raises OptionError: a value cannot be used; nothing was written
        """
        tls = self.certificate is not None
        put = object.__setattr__
        put(self, "target", self.target or f"config:{self.folder}/keystone.ini")
        # without TLS nobody but this machine should be able to send a password here
        put(self, "listen", self.listen or ("*:5000" if tls else "127.0.0.1:5000"))
        put(self, "group", self.group or self.user)
        put(self, "web_user", self.web_user or _web_user())
        put(self, "web_group", self.web_group or _group_of(self.web_user))
        if not self.trusted_proxies and self.haproxy:
            put(self, "trusted_proxies", _addresses(self.haproxy))
        self._check_words()
        self._check_addresses()
        if not self.public_endpoint and self.public_host and not self.trusted_proxies:
            put(self, "public_endpoint", self._own_endpoint())
        if tls != (self.key is not None):
            option = "--tls-key" if tls else "--tls-certificate"
            raise OptionError(option, "nothing", "given as well: a certificate has a key")
        for option, value in (("--hsts", self.hsts), ("--http-redirect", self.redirect)):
            if value and not tls:
                raise OptionError(option, value, "left out without --tls-certificate")
        if not 0 <= self.hsts <= HSTS_MAX:
            raise OptionError("--hsts", self.hsts, f"0 to {HSTS_MAX} seconds")

    def _check_words(self) -> None:
        names = {
            "--user": self.user,
            "--group": self.group,
            "--web-user": self.web_user,
            "--web-group": self.web_group,
        }
        for option, name in names.items():
            if not _NAME.fullmatch(name):
                raise OptionError(option, name, "the name of a user or group, e.g. keystone")
        paths = {
            "DIR": self.folder,
            "--run-directory": self.run_directory,
            "--log-directory": self.log_directory,
            "--cache-directory": self.cache_directory,
            "--config": self.config,
            "--tls-certificate": self.certificate,
            "--tls-key": self.key,
            "--node-ca": self.node_ca,
        }
        for option, path in paths.items():
            if path is not None and not re.fullmatch(r"/[\w@+,.:/-]*", str(path), re.ASCII):
                raise OptionError(
                    option, path, "an absolute path of letters, digits and @ + , . : _ / -"
                )
        if unix_sockets.length(self.run_directory) > _RUN_LIMIT:
            allowed = (
                f"a path of at most {_RUN_LIMIT} bytes, for those of the sockets in it have at "
                f"most {unix_sockets.LIMIT}"
            )
            raise OptionError("--run-directory", self.run_directory, allowed)
        if not re.fullmatch(r"/[ -~]*", str(self.virtualenv)):
            # uWSGI takes no others
            allowed = "an absolute path of ASCII characters; make a link to it (ln -s)"
            raise OptionError("--virtualenv", self.virtualenv, allowed)
        # a paste file may lie in a folder of any name
        if not re.fullmatch(r"config:/[^\0-\x1f\x7f]*|[\w@+,.:/#-]+", self.target, re.ASCII):
            raise OptionError("--app", self.target, "config:FILE, egg:NAME or MODULE:CALLABLE")
        for name in self.hosts:
            if not _HOST.fullmatch(name):
                allowed = "a host name or an address, several divided by commas"
                raise OptionError("--public-host", name or "nothing", allowed)
        if self.public_endpoint and not _ENDPOINT.fullmatch(self.public_endpoint):
            raise OptionError(
                "--public-endpoint",
                self.public_endpoint,
                "a URL without /v3, e.g. https://cloud.example.org:5000",
            )

    def _check_addresses(self) -> None:
        host, port = parse_listen(self.listen)
        if not port:
            raise OptionError("--listen", self.listen, "HOST:PORT with a port from 1 to 65535")
        if host != "*" and ":" not in host and not _HOST.fullmatch(host):
            raise OptionError("--listen", self.listen, "HOST:PORT, with * as HOST for all")
        _check_peer("--upstream", self.upstream)
        _check_peer("--login-upstream", self.login_upstream)
        if not re.fullmatch(r"unix:/[\w@+,./-]{1,100}", self.metrics, re.ASCII):
            _check_peer("--metrics", self.metrics)
        for option, values in (("--haproxy", self.haproxy), ("--memcached", self.memcached)):
            for value in values:
                _check_peer(option, value)
        for value in self.trusted_proxies:
            try:
                ipaddress.ip_network(value, strict=False)
            except ValueError:
                raise OptionError(
                    "--trusted-proxy", value, "an address or a network, e.g. 192.0.2.0/24"
                ) from None

    def _own_endpoint(self) -> str:
        """Return the URL of the foremost server of the line-up."""
        scheme, usual = ("https", 443) if self.tls else ("http", 80)
        port = "" if self.port == usual else f":{self.port}"
        return f"{scheme}://{self.public_host}{port}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """All names that are served; empty if any is."""
        return (self.public_host, *self.other_hosts) if self.public_host or self.other_hosts else ()

    @property
    def host(self) -> str:
        """The host part of :attr:`listen`, without brackets; ``*`` for all addresses."""
        return parse_listen(self.listen)[0]

    @property
    def port(self) -> int:
        """The port of :attr:`listen`."""
        return parse_listen(self.listen)[1]

    @property
    def tls(self) -> bool:
        """True if the foremost server speaks TLS."""
        return self.certificate is not None

    @property
    def socket(self) -> str:
        """The path or address at which uWSGI listens behind a web server."""
        if self.server.endswith("-tcp"):
            return self.upstream
        return f"{self.run_directory}/uwsgi.sock"

    @property
    def login_socket(self) -> str:
        """The path or address of uWSGI's for logins, where these have workers of their own."""
        if self.server.endswith("-tcp"):
            return self.login_upstream
        return f"{self.run_directory}/logins.sock"

    @property
    def node_directory(self) -> Path:
        """The folder of what the processes of this node count and share (``KEYFRONT_NODE``)."""
        return self.run_directory / "node"

    @property
    def pid_directory(self) -> Path:
        """Root's folder for the web server's pid file: not the run directory, the user's own."""
        return self.run_directory.parent


def _check_peer(option: str, text: str) -> None:
    allowed = "HOST:PORT with a port from 1 to 65535, several divided by commas"
    host, _, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        named = bool(ipaddress.IPv6Address(bare)) if bare != host else bool(_HOST.fullmatch(host))
    except ValueError:
        named = False
    if not named or not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise OptionError(option, text or "nothing", allowed)


def _addresses(nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses at which HAProxy may run: the nodes' and this machine's."""
    found = ["127.0.0.1", "::1"]
    for node in nodes:
        _check_peer("--haproxy", node)
        host = node.rpartition(":")[0].strip("[]")
        try:
            address = str(ipaddress.ip_address(host))
        except ValueError:
            raise OptionError(
                "--haproxy",
                node,
                "ADDRESS:PORT; or tell with --trusted-proxy ADDRESS where HAProxy runs, since "
                "only its X-Forwarded-For is believed",
            ) from None
        if address not in found:
            found.append(address)
    return tuple(found)


def _web_user() -> str:
    for name in _WEB_USERS:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    return _WEB_USERS[0]


def _group_of(user: str) -> str:
    try:
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    except KeyError:
        return user

"""Reads from a uWSGI ini file what its manager needs: sockets, statistics, the time to end.

uWSGI would open the sockets itself and remove them when it ends. The manager keeps them open over
all the uWSGIs that use them, so each of these gets the same file with descriptors in their places.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keyfront.common import unix_sockets
from keyfront.errors import OptionError, ServerError

_OPTION = re.compile(r"^(?P<name>[a-z0-9-]+)[ \t]*=[ \t]*(?P<value>.*?)[ \t]*$", re.MULTILINE)
_SOCKETS = ("socket", "uwsgi-socket", "http-socket", "http11-socket")
_PLAIN = "a path or ADDRESS:PORT without placeholders, under keyfront uwsgi"
# uWSGI's own defaults (core/init.c)
_LISTEN, _SOCKET_TIMEOUT, _MERCY = 100, 4, 60


@dataclass(frozen=True)
class IniFile:
    """A uWSGI ini file, as far as its manager has to know it.

    :param path: the file's path
    :param text: the file's whole text
    """

    path: Path
    text: str

    @property
    def addresses(self) -> list[str]:
        """The addresses that it listens at: paths and ``ADDRESS:PORT``, in their order.

        :raises OptionError: there is none, or one that only uWSGI understands
        """
        found = [
            self._plain(match["name"], match["value"])
            for match in _OPTION.finditer(self.text)
            if match["name"] in _SOCKETS
        ]
        if not found:
            raise OptionError("socket", f"none in {self.path}", _PLAIN)
        return found

    @property
    def stats(self) -> Path:
        """The path of the statistics socket, by which the manager sees workers accept.

        :raises OptionError: there is none, or it is no path
        """
        text = self._last("stats", "")
        if not text or ":" in text or text.startswith("@"):
            raise OptionError("stats", text or f"none in {self.path}", "the path of a socket")
        return Path(self._plain("stats", text)).absolute()

    @property
    def mercy(self) -> float:
        """The seconds that running requests get when it ends."""
        return self._number("worker-reload-mercy", _MERCY)

    def with_sockets(self, descriptors: list[int], stats: Path) -> str:
        """Return the text for a uWSGI that inherits its sockets.

        :param descriptors: a file descriptor for each of :attr:`addresses`
        :param stats: the socket of its own statistics
        """
        left = iter(descriptors)

        def replaced(match: re.Match[str]) -> str:
            name = match["name"]
            if name in _SOCKETS:
                return f"{name} = fd://{next(left)}"
            if name == "stats":
                return f"{name} = {str(stats).replace('%', '%%')}"
            return match[0]

        return _OPTION.sub(replaced, self.text)

    def open(self, address: str) -> socket.socket:
        """Listen at one of :attr:`addresses`, as uWSGI would.

        :raises ServerError: it cannot be listened at
        """
        try:
            return self._open_tcp(address) if ":" in address else self._open_unix(address)
        except (OSError, KeyError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ServerError(f"socket = {address}: cannot be listened at: {reason}") from None

    def _open_tcp(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family, _, _, _, where = socket.getaddrinfo(
            host or "0.0.0.0", int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, socket.SOCK_STREAM)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # a connection is accepted when its request comes
            opened.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT,
                int(self._number("socket-timeout", _SOCKET_TIMEOUT)),
            )  # fmt: skip
            opened.bind(where)
            opened.listen(int(self._number("listen", _LISTEN)))
        except BaseException:
            opened.close()
            raise
        return opened

    def _open_unix(self, address: str) -> socket.socket:
        path = Path(address)
        # a web server that connects to it has no other way there
        unix_sockets.check("socket", path)
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                path.unlink()
            opened.bind(str(path))
            user, _, group = self._last("chown-socket", "").partition(":")
            os.chown(
                path,
                pwd.getpwnam(user).pw_uid if user else -1,
                grp.getgrnam(group).gr_gid if group else -1,
            )
            mode = self._last("chmod-socket", "")
            if mode:
                path.chmod(int(mode, 8))
            opened.listen(int(self._number("listen", _LISTEN)))
        except BaseException:
            opened.close()
            raise
        return opened

    def _last(self, name: str, default: str) -> str:
        """Return the value of an option as uWSGI takes it: the last one."""
        found = [match["value"] for match in _OPTION.finditer(self.text) if match["name"] == name]
        return found[-1] if found else default

    def _number(self, name: str, default: int) -> float:
        text = self._last(name, str(default))
        try:
            return float(int(text))
        except ValueError:
            raise OptionError(name, text, f"a whole number, in {self.path}") from None

    @staticmethod
    def _plain(name: str, text: str) -> str:
        plain = text.replace("%%", "")
        if not text or "%" in plain or "$(" in plain or "@(" in plain or "://" in plain:
            raise OptionError(name, text, _PLAIN)
        return text.replace("%%", "%")


def read(path: Path) -> IniFile:
    """Read a uWSGI ini file, and find out that a manager can run it.

    :raises OptionError: it cannot be read, or has a value that a manager does not understand
    """
    try:
        found = IniFile(path.absolute(), path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise OptionError("FILE", path, f"a uWSGI ini file: {reason}") from None
    _ = found.addresses, found.stats, found.mercy
    return found

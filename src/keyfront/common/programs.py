"""Servers as programs of this machine: where they are, at which address and as which user they run,
how they are stopped with the process that started them, and why one ended.
"""

from __future__ import annotations

import atexit
import ctypes
import grp
import importlib.util
import os
import pwd
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from keyfront.errors import MissingPartError, OptionError, ServerError

_PR_SET_PDEATHSIG = 1  # prctl(2)
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Debian's and Red Hat's places for Apache's modules.
_APACHE_MODULES = ("/usr/lib/apache2/modules", "/usr/lib64/httpd/modules", "/etc/httpd/modules")


def require_module(module: str, extra: str) -> None:
    """Find out that a module is installed, without importing it.

    :param extra: the extra of keyfront that brings it
    :raises MissingPartError: it is not; names the pip command
    """
    if importlib.util.find_spec(module) is None:
        raise MissingPartError(f"{module} is not installed: run pip install 'keyfront[{extra}]'")


def is_script(program: Path) -> bool:
    """Return whether a program is a script, as pyuwsgi's ``uwsgi`` is: a Python that imports it."""
    try:
        with program.open("rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return False


def uwsgi_program() -> str:
    """Return the path of the uWSGI that belongs to this Python, from PyPI's uwsgi or pyuwsgi.

    :raises MissingPartError: there is none; names the pip command
    """
    from importlib import metadata  # as much to import as all else here, and often not needed

    for name in ("uWSGI", "pyuwsgi"):
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        program = Path(sys.prefix, "bin", "uwsgi")
        if program.exists():
            return str(program)
    raise MissingPartError(
        "uWSGI is not installed beside this Python: run pip install 'keyfront[uwsgi]', or without "
        "a C compiler pip install 'keyfront[pyuwsgi]'"
    )


@cache
def python_home() -> str:
    """Return a path of this Python environment that servers take, while this process runs.

    uWSGI takes ASCII only, whatever the locale: another path gets a link to it.
    """
    if sys.prefix.isascii():
        return sys.prefix
    folder = Path(tempfile.mkdtemp(prefix="keyfront-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # a server may run as another user
    folder.chmod(0o711)
    link = folder / "python"
    link.symlink_to(sys.prefix)
    return str(link)


def system_program(names: tuple[str, ...], packages: str) -> str:
    """Return the path of a program of the system.

    :param names: the names it may have, the most likely first
    :param packages: the Debian packages that bring it
    :raises MissingPartError: there is none; names the packages
    """
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
    for name in names:
        found = shutil.which(name, path=path)
        if found:
            return found
    raise MissingPartError(f"{names[0]} is not installed: run apt install {packages}")


def apache_modules(needed: str, packages: str) -> str:
    """Return the folder of Apache's modules.

    :param needed: the file name of a module that must be there
    :param packages: the Debian packages that bring it
    :raises MissingPartError: it is not there; names the packages
    """
    for folder in _APACHE_MODULES:
        if Path(folder, needed).exists():
            return folder
    raise MissingPartError(f"Apache's {needed} is not installed: run apt install {packages}")


def mod_wsgi_module() -> str:
    """Return the path of the Apache module that PyPI's mod_wsgi was built as for this Python.

    :raises MissingPartError: there is none; names the pip command
    """
    require_module("mod_wsgi", "mod-wsgi")
    spec = importlib.util.find_spec("mod_wsgi.server")
    for folder in (spec and spec.submodule_search_locations) or ():
        for module in Path(folder).glob("mod_wsgi-py*.so"):
            return str(module)
    raise MissingPartError(
        "mod_wsgi is not built for this Python: run pip install 'keyfront[mod-wsgi]'"
    )


def parse_listen(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; an IPv6 address stands in brackets.

    :returns: the host without brackets, and the port, 0 to 65535
    :raises OptionError: it is not of that form
    """
    host, _, port_text = text.rpartition(":")
    allowed = "HOST:PORT with a port from 0 to 65535 (0 takes a free one), e.g. 127.0.0.1:5000"
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or int(port_text) > 65535:
        raise OptionError("--listen", text, allowed)
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    if not bare or bracketed != (":" in bare):
        raise OptionError("--listen", text, allowed)
    return bare, int(port_text)


@contextmanager
def claim(text: str, host: str, port: int) -> Iterator[int]:
    """Keep an address for a server; gives the port, a free one for 0.

    While the block runs the kernel gives it to no client and to nobody who asks for a free one,
    whether the server listens there already, or is being started again.

    :param text: the option's value, for errors
    :raises ServerError: it is in use, not of this machine, or not permitted
    :raises OptionError: its host is no name or address
    """
    with _bound(text, host, port) as kept:
        bound: int = kept.getsockname()[1]
        yield bound


def _bound(text: str, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with ExitStack() as stack:
            kept = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # As the servers do: a port in TIME_WAIT is free, and so is one that is bound so by
            # somebody who does not listen, as this here.
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.bind((host, port))
            stack.pop_all()
            return kept
    except (socket.gaierror, UnicodeError):  # no such name, or no name at all
        raise OptionError("--listen", text, "an address of this machine") from None
    except PermissionError:
        raise ServerError(
            f"--listen = {text}: a port below 1024 needs root; choose a higher one"
        ) from None
    except OSError as error:
        raise ServerError(
            f"--listen = {text}: {(error.strerror or 'cannot be used').lower()}; stop what "
            "listens there or choose another, e.g. --listen 127.0.0.1:0 for a free port"
        ) from None


def front_user() -> tuple[str, str] | None:
    """Return the user and group that a web server started as root drops to; ``None`` if not root.

    :raises MissingPartError: root, and the machine has no such user
    """
    if os.geteuid() != 0:
        return None
    for name in ("www-data", "apache", "nginx", "nobody"):
        try:
            entry = pwd.getpwnam(name)
            return name, grp.getgrgid(entry.pw_gid).gr_name
        except KeyError:
            continue
    raise MissingPartError("a web server needs a user to drop to: there is no www-data or nobody")


def stop_with_parent() -> Callable[[], None]:
    """Return what a child runs before its program (``preexec_fn``), so that this process's end
    stops it: the kernel then sends it SIGTERM (prctl(2)).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare


def first_error(log: Path, start: int = 0) -> str:
    """Return the line of a server's log that says why it ended, as well as one can tell.

    :param start: bytes of earlier runs at the beginning of the log
    """
    try:
        with log.open("rb") as file:
            file.seek(start)
            for raw in file:
                # a server that goes on may have logged any number of requests meanwhile
                if raw.startswith(b"keyfront: "):
                    return raw.decode("utf-8", "replace").removeprefix("keyfront: ").strip()
            file.seek(max(start, file.tell() - 65536))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "its log cannot be read"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for word in ("[emerg]", "AH00", "rror", "nable to", "annot"):
        for line in lines:
            if word in line:
                return line
    return lines[-1] if lines else "it printed nothing"

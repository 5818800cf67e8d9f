"""What ``keyfront serve`` needs to know of the machine: programs, modules, addresses, users."""

from __future__ import annotations

import atexit
import grp
import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import socket
import sys
import tempfile
from functools import cache
from pathlib import Path

from keyfront.errors import MissingPartError, OptionError, ServerError

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Debian's and Red Hat's places for Apache's modules.
_APACHE_MODULES = ("/usr/lib/apache2/modules", "/usr/lib64/httpd/modules", "/etc/httpd/modules")


def require_module(module: str, extra: str) -> None:
    """:raises MissingPartError: the module is not installed; names the pip command."""
    if importlib.util.find_spec(module) is None:
        raise MissingPartError(f"{module} is not installed: run pip install 'keyfront[{extra}]'")


def uwsgi_program() -> str:
    """The uWSGI that belongs to this Python, from PyPI's uwsgi or pyuwsgi."""
    for name in ("uWSGI", "pyuwsgi"):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
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
    """This Python environment by a path that servers take, for as long as this process runs.

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
    """A program of the system, by its possible names.

    :param packages: the Debian packages that bring it
    """
    path = f"{os.environ.get('PATH', '')}:{_SYSTEM_PATH}"
    for name in names:
        found = shutil.which(name, path=path)
        if found:
            return found
    raise MissingPartError(f"{names[0]} is not installed: run apt install {packages}")


def apache_modules(needed: str, packages: str) -> str:
    """The folder of Apache's modules, where ``needed`` (a file name) is."""
    for folder in _APACHE_MODULES:
        if Path(folder, needed).exists():
            return folder
    raise MissingPartError(f"Apache's {needed} is not installed: run apt install {packages}")


def mod_wsgi_module() -> str:
    """The Apache module that PyPI's mod_wsgi was built with for this Python."""
    require_module("mod_wsgi", "mod_wsgi")
    spec = importlib.util.find_spec("mod_wsgi.server")
    for folder in (spec and spec.submodule_search_locations) or ():
        for module in Path(folder).glob("mod_wsgi-py*.so"):
            return str(module)
    raise MissingPartError(
        "mod_wsgi is not built for this Python: run pip install 'keyfront[mod_wsgi]'"
    )


def parse_listen(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; an IPv6 address stands in brackets.

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


def claim(text: str, host: str, port: int) -> int:
    """Find out that an address can be listened at; returns the port, a free one for 0.

    :raises ServerError: it is in use, not of this machine, or not permitted
    :raises OptionError: its host is no name or address
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # as the servers do: a port in TIME_WAIT is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
            bound: int = probe.getsockname()[1]
            return bound
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
    """User and group that a web server started as root drops to; ``None`` when not root.

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

"""The versions of the servers on this machine, which are asked: options come and go with versions.

A server that is not installed is taken for the newest stable release, and the files say so; so
files can be made on one machine for another. ``--assume nginx=1.22.1`` says what runs there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keyfront.common.programs import is_script
from keyfront.errors import OptionError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The newest stable release of each when this was written, for a server that is not here.
NEWEST = {
    "uwsgi": "2.0.31",
    "nginx": "1.30.0",
    "apache": "2.4.71",
    "haproxy": "3.2.0",
    "mod_wsgi": "6.1.1",
}
# The features of a server that cannot be asked: those that distributions build in.
_USUAL = {
    "uwsgi": frozenset({"https-socket", "route-run"}),
    "nginx": frozenset({"http_ssl_module", "http_v2_module", "http_realip_module"}),
}
#: A feature of a server whose OpenSSL has this group, and may be told to do without (``?``). A
#: server does not start with a group that its OpenSSL has never heard of.
HYBRID = "X25519MLKEM768"
_HYBRID_SINCE = (3, 5)  # of OpenSSL
_PATIENCE = 10  # seconds for a program to tell its version


@dataclass(frozen=True, kw_only=True)
class Version:
    """The version of a server.

    :param name: ``uwsgi``, ``nginx``, ``apache``, ``haproxy`` or ``mod_wsgi``
    :param text: the version in the server's words, for example ``2.0.31``
    :param how: ``found`` on this machine, ``assumed`` by the operator, or ``newest``: not here, so
        the newest stable release is taken
    :param features: the parts that were built in: nginx's modules, uWSGI's options, and
        ``X25519MLKEM768`` where OpenSSL has it
    :param program: the program that was asked, or Apache's module; ``None`` unless found
    """

    name: str
    text: str
    how: str
    features: frozenset[str] = frozenset()
    program: Path | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version for comparing: ``(2, 0, 31)``."""
        return tuple(int(part) for part in re.findall(r"\d+", self.text)[:3])

    def at_least(self, *numbers: int) -> bool:
        """Return whether it is a release or a later one.

        :param numbers: the release, such as ``1, 22``
        """
        return self.numbers >= numbers

    def has(self, feature: str) -> bool:
        """Return whether it was built with a module, or knows an option.

        :param feature: the name of the module or option
        """
        return feature in self.features

    def knows(self, option: str, *since: int) -> bool:
        """Return whether it has an option, by asking it or by the release that brought the option.

        :param option: the option's name
        :param since: the release that brought it, such as ``2, 0, 19``
        """
        return self.has(option) if self.how == "found" else self.at_least(*since)

    def __str__(self) -> str:
        words = {
            "found": "as found on this machine",
            "assumed": "as told by --assume",
            "newest": "the newest stable release, as none was found on this machine",
        }
        return f"{self.name} {self.text}, {words[self.how]}"


@dataclass(frozen=True, kw_only=True)
class Versions:
    """The versions to render for, by server.

    :param by_name: the versions, by the names of :attr:`Version.name`
    """

    by_name: Mapping[str, Version] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Version:
        return self.by_name[name]


def parse_assumed(texts: Iterable[str]) -> dict[str, str]:
    """Read ``SERVER=VERSION`` words.

    :raises OptionError: one is not of that form, or the server is none of ours
    """
    assumed = {}
    allowed = f"SERVER=VERSION, e.g. nginx=1.22.1, with {', '.join(NEWEST)} as SERVER"
    for text in texts:
        name, _, version = text.partition("=")
        if name not in NEWEST or not re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,3}", version):
            raise OptionError("--assume", text, allowed)
        assumed[name] = version
    return assumed


def find(virtualenv: Path, assumed: Mapping[str, str] | None = None) -> Versions:
    """Ask the servers of this machine.

    :param virtualenv: the Python environment in which uWSGI and mod_wsgi are looked for
    :param assumed: versions that the operator knows better, by server
    """
    assumed = assumed or {}
    return Versions(by_name={name: _one(name, virtualenv, assumed.get(name)) for name in NEWEST})


def _one(name: str, virtualenv: Path, assumed: str | None) -> Version:
    found = None if assumed else _ASKED[name](virtualenv)
    if found is not None:
        return found
    return Version(
        name=name,
        text=assumed or NEWEST[name],
        how="assumed" if assumed else "newest",
        features=_USUAL.get(name, frozenset()),
    )


def _say(program: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [str(program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def _system_program(*names: str) -> Path | None:
    for name in names:
        found = shutil.which(name, path=SYSTEM_PATH)
        if found:
            return Path(found)
    return None


def _version(
    name: str, program: Path, said: str, pattern: str, features: Iterable[str] = ()
) -> Version | None:
    match = re.search(pattern, said)
    if match is None:
        return None
    return Version(
        name=name, text=match[1], how="found", features=frozenset(features), program=program
    )


def _hybrid(said: str, *words: str) -> list[str]:
    """Return the feature if what a program said tells of an OpenSSL that has the group.

    :param said: the program's output
    :param words: words that stand before OpenSSL's version, the best one first: a program may run
        with another version than it was built with
    """
    for word in words:
        match = re.search(rf"{word} *OpenSSL (\d+)\.(\d+)", said)
        if match is not None:
            return [HYBRID] if (int(match[1]), int(match[2])) >= _HYBRID_SINCE else []
    return []


def _uwsgi(virtualenv: Path) -> Version | None:
    beside = virtualenv / "bin" / "uwsgi"
    program = beside if beside.exists() else _system_program("uwsgi")
    if program is None:
        return None
    # its list of options is the only word on what the build host had (SSL, PCRE)
    options = re.findall(r"--([a-z0-9][\w-]*)", _say(program, "--help"))
    # As pyuwsgi's is: a reload has to be told which Python runs it.
    features = [*options, *(["script"] if is_script(program) else [])]
    return _version("uwsgi", program, _say(program, "--version"), r"(\d+\.\d+[\d.]*)", features)


def _nginx(_: Path) -> Version | None:
    program = _system_program("nginx")
    if program is None:
        return None
    said = _say(program, "-V")
    modules = re.findall(r"--with-(\w+_module)\b", said)
    # It says the latter only if they differ.
    hybrid = _hybrid(said, "running with", "built with")
    return _version("nginx", program, said, r"nginx/(\d+\.\d+\.\d+)", [*modules, *hybrid])


def _apache(_: Path) -> Version | None:
    program = _system_program("apache2", "httpd")
    if program is None:
        return None
    # It does not tell what mod_ssl is linked with. A distribution's has that of the distribution's
    # own openssl, which lies in the bin beside sbin; another one says nothing about it.
    beside = program.parent.parent / "bin" / "openssl"
    hybrid = _hybrid(_say(beside, "version"), "Library:") if beside.exists() else []
    return _version("apache", program, _say(program, "-v"), r"Apache/(\d+\.\d+\.\d+)", hybrid)


def _haproxy(_: Path) -> Version | None:
    program = _system_program("haproxy")
    if program is None:
        return None
    said = _say(program, "-vv")
    hybrid = _hybrid(said, "Running on OpenSSL version :")
    return _version("haproxy", program, said, r"version (\d+\.\d+\.\d+)", hybrid)


def _mod_wsgi(virtualenv: Path) -> Version | None:
    for folder in sorted(virtualenv.glob("lib/python3*/site-packages")):
        # pip before 23.1 leaves an egg-info where the package wheel is not installed.
        infos = [*folder.glob("mod_wsgi-*.dist-info"), *folder.glob("mod_wsgi-*.egg-info")]
        for metadata in sorted(infos):
            version = re.match(r"mod_wsgi-(\d+\.\d+(?:\.\d+)?)", metadata.name)
            modules = sorted(folder.glob("mod_wsgi/server/mod_wsgi-py*.so"))
            if version and modules:
                return Version(name="mod_wsgi", text=version[1], how="found", program=modules[0])
    return None


_ASKED: dict[str, Callable[[Path], Version | None]] = {
    "uwsgi": _uwsgi,
    "nginx": _nginx,
    "apache": _apache,
    "haproxy": _haproxy,
    "mod_wsgi": _mod_wsgi,
}

"""Checks of the kernel's settings, of units and of files (S, F, R)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from ...render.lineups import PATHS
from ...render.writer import SYSTEM
from .. import rendered, routes
from ..found import Found
from ..readers.files import Unread
from ..registry import ERROR, INFO, WARNING, Finding, UnknownError, check
from ..settings import Place, Setting

_DAYS = 14
# What was once copied from page to page, and what it does today.
_SYSCTL: dict[str, tuple[Callable[[Setting], bool], str]] = {
    "net.ipv4.tcp_tw_recycle": (
        lambda _: True,
        "gone since Linux 4.12: sysctl reports an error",
    ),
    "net.ipv4.tcp_tw_reuse": (
        lambda x: x.number == 1,
        "2, the default, is for loopback; 1 needs knowledge of all peers",
    ),
    "net.ipv4.tcp_syncookies": (
        lambda x: x.number == 0,
        "without it a flood of SYNs keeps everybody out",
    ),
    "net.ipv4.tcp_no_metrics_save": (
        lambda x: x.number == 1,
        "what was learned of a path is thrown away",
    ),
    "net.ipv4.tcp_fin_timeout": (
        lambda x: 0 < (x.number or 60) <= 10,
        "it is about orphaned connections, not about TIME_WAIT",
    ),
    "net.ipv4.tcp_max_tw_buckets": (
        lambda x: 0 < (x.number or 1 << 30) <= 20000,
        "the kernel's documents say never to lower it",
    ),
    "net.ipv4.tcp_mem": (
        lambda _: True,
        "counted in pages, not in bytes; the kernel sizes it from the memory at boot",
    ),
    "net.ipv4.tcp_max_orphans": (
        lambda x: (x.number or 0) >= 65536,
        "each may hold 64 KiB that cannot be swapped; the kernel sizes it at boot",
    ),
    "net.core.somaxconn": (
        lambda x: (x.number or 0) > 65535 or 0 < (x.number or 4096) < 1024,
        "4096 is Linux' own; what waits longer than that is answered to nobody",
    ),
    "net.ipv4.tcp_max_syn_backlog": (
        lambda x: (x.number or 0) > 65536,
        "each waits for its handshake; it goes with somaxconn",
    ),
}
# Keystone's ports, which a client's own connection may take where the range has them.
_API_PORTS = (5000, 35357)


@check(
    "S01",
    WARNING,
    "kernel",
    holds="No setting of the kernel is from an old page on the network",
    harm="Connections are cut or lost, or all settings after it are not read.",
    source="Linux, Documentation/networking/ip-sysctl.rst; docs/plan.md, what is not copied",
)
def old_sysctl(found: Found) -> Iterator[Finding]:
    """Lines that were right, or thought to be, for Linux 2.6."""
    if found.sysctl is None:
        raise UnknownError("files of sysctl.d: none is here")
    for setting in found.sysctl.settings:
        wrong, why = _SYSCTL.get(setting.name, (lambda _: False, ""))
        if setting.value and wrong(setting):
            yield Finding(
                what=f"{setting.name} = {setting.value}: {why}",
                where=(setting.place,),
                lines=(f"# {setting.name} = {setting.value}",),
            )
    known = found.sysctl.last("net.ipv4.ip_local_port_range")
    ends = known.value.replace("-", " ").split() if known else []
    if known is not None and len(ends) == 2 and all(re.fullmatch(r"\d{1,5}", x) for x in ends):
        reserved = found.sysctl.last("net.ipv4.ip_local_reserved_ports")
        kept = _ports(reserved.value if reserved else "")
        open_ = [x for x in _API_PORTS if int(ends[0]) <= x <= int(ends[1]) and x not in kept]
        if int(ends[0]) < 32768 and open_:
            also = f",{reserved.value}" if reserved else ""
            yield Finding(
                what=f"ip_local_port_range {known.value} has Keystone's ports "
                f"{', '.join(map(str, open_))}: a connection may take one before Keystone starts",
                where=(known.place,),
                lines=(f"net.ipv4.ip_local_reserved_ports = {','.join(map(str, open_))}{also}",),
                harm="Keystone does not start: Address already in use, now and then.",
            )


def _ports(text: str) -> set[int]:
    """Return the ports of ``1,3-5``."""
    found: set[int] = set()
    for low, high in re.findall(r"(\d{1,5})(?:-(\d{1,5}))?", text):
        found.update(range(int(low), int(high or low) + 1))
    return found


@check(
    "S02",
    WARNING,
    "systemd",
    holds="Limits of services are in their units, not in limits.conf",
    harm="The limit that seems to be set does not hold, and files run out under load.",
    source="pam_limits(8): sessions only; systemd.exec(5), LimitNOFILE",
)
def limits_conf(found: Found) -> Iterator[Finding]:
    """limits.conf is read by PAM at a login; services of systemd never see it."""
    if found.limits is None:
        raise UnknownError("limits.conf: it is not here")
    without = [
        unit.name
        for unit in found.units.values()
        if unit.name.endswith(".service") and unit.command and not unit.service.last("LimitNOFILE")
    ]
    for setting in found.limits.settings:
        words = setting.value.split()
        who = setting.name.lstrip("@")
        service = who in ("keystone", "nginx", "www-data", "apache", "uwsgi", "haproxy")
        if "nofile" not in words or not (service or (who == "*" and without)):
            continue
        name = without[0] if without else "SERVICE.service"
        yield Finding(
            what=f"{setting.name} {setting.value}: a service does not go through PAM"
            + (f", and {without[0]} has no LimitNOFILE" if without else ""),
            where=(setting.place,),
            lines=("[Service]", f"LimitNOFILE={words[-1]}"),
            file=f"/etc/systemd/system/{name}.d/limits.conf",
        )


@check(
    "S03",
    WARNING,
    "systemd",
    holds="systemd starts the service again where it ends",
    harm="Keystone is away until somebody notices.",
    source="systemd.service(5), Restart=no is the default",
)
def restart(found: Found) -> Iterator[Finding]:
    """Restart=always, or on-failure, with some seconds between."""
    for unit in found.units.values():
        known = unit.service.last("Restart")
        kind = unit.service.last("Type")
        oneshot = kind is not None and kind.value == "oneshot"
        if (
            re.search(r"uwsgi|keyfront", unit.command.partition(" ")[0])
            and not oneshot
            and (known is None or known.value == "no")
        ):
            yield Finding(
                what=f"{unit.name} is not started again",
                where=(known.place if known else Place(unit.path),),
                lines=("[Service]", "Restart=always", "RestartSec=2"),
            )


@check(
    "S04",
    ERROR,
    "systemd",
    holds="The programs and folders that units name are there",
    harm="The service does not start.",
    source="systemd.exec(5): 203/EXEC, 200/CHDIR",
)
def programs(found: Found) -> Iterator[Finding]:
    """A venv that was moved or removed, a home folder that was never made."""
    for unit in found.units.values():
        for name in ("ExecStart", "ExecStartPre", "WorkingDirectory"):
            for setting in unit.service.all(name):
                if setting.value.startswith("-"):
                    continue
                path = setting.value.lstrip("@:+!").split()[0].strip('"')
                if path.startswith("/") and "%" not in path and found.files.lacks(path):
                    yield Finding(
                        what=f"{name}: {path} is not there",
                        where=(setting.place,),
                        lines=(f"(install {path}, or correct {name}= of {unit.name})",),
                    )


@check(
    "S05",
    WARNING,
    "systemd",
    holds="Units of uWSGI that say notify are told by uWSGI",
    harm="systemd takes the service for up before Keystone is loaded, or kills it after 90 s.",
    source="systemd.service(5), Type; devstack: Type=notify; uWSGI notifies where it has a master",
)
def unit_type(found: Found) -> Iterator[Finding]:
    """With Type=simple a restart of all nodes in turn goes on while the first is not up yet."""
    for unit in found.units.values():
        known = unit.service.last("Type")
        if (
            re.search(r"/uwsgi$", unit.command.partition(" ")[0])
            and (known is None or known.value in ("simple", "exec"))
            and "emperor" not in unit.command
        ):
            yield Finding(
                what=f"{unit.name} has Type={known.value if known else 'simple'}",
                where=(known.place if known else Place(unit.path),),
                level=INFO,
                lines=("[Service]", "Type=notify", "NotifyAccess=all"),
            )


@check(
    "F01",
    ERROR,
    "files",
    holds="All configuration files can be read as what they are",
    harm="The server does not start again after its next stop.",
    source="the server's own syntax",
)
def malformed(found: Found) -> Iterator[Finding]:
    """The other layers are looked at all the same."""
    for one in found.malformed:
        yield Finding(what=f"expected {one.expected}", where=(one.place,))


def _certificates(found: Found) -> Iterator[tuple[str, Place]]:
    """Give the files of certificates that servers name for Keystone."""
    for directive in found.nginx.all("ssl_certificate") if found.nginx else ():
        if routes.concerns(found, directive):
            yield directive.value, directive.place
    for directive in found.apache.all("sslcertificatefile") if found.apache else ():
        if routes.concerns(found, directive):
            yield directive.value, directive.place
    for directive in found.haproxy.all("bind") if found.haproxy else ():
        if routes.concerns(found, directive) and "crt" in directive.args[:-1]:
            named = directive.args[directive.args.index("crt") + 1]
            inside = found.files.glob(f"{named.rstrip('/')}/*") if named.startswith("/") else []
            yield from ((path, directive.place) for path in inside or [named])


def _keys(found: Found) -> Iterator[tuple[str, Place]]:
    for directive in found.nginx.all("ssl_certificate_key") if found.nginx else ():
        if routes.concerns(found, directive):
            yield directive.value, directive.place
    for directive in found.apache.all("sslcertificatekeyfile") if found.apache else ():
        if routes.concerns(found, directive):
            yield directive.value, directive.place


@check(
    "F02",
    ERROR,
    "files",
    holds="Certificates are there, and good for two weeks",
    harm="Every client refuses to connect from that minute on.",
    source="RFC 5280, 4.1.2.5",
)
def certificates(found: Found) -> Iterator[Finding]:
    """Servers read certificates when they start: after a renewal they have to be reloaded. Paths
    in files of a container's that lie on its host (/etc/kolla) are the container's, and not looked
    at there."""
    named = dict(_certificates(found))
    if not (found.nginx or found.apache or found.haproxy):
        raise UnknownError("no web server's or balancer's configuration was read")
    unread: list[str] = []
    for path, place in named.items():
        if "$" in path or not path.startswith("/"):
            continue
        if found.is_of_a_container(place.path):
            unread.append(f"{path} is of a container: give the doctor its files by --root")
            continue
        if found.files.lacks(path):
            yield Finding(
                what=f"{path} is not there", where=(place,), lines=(f"ls -l {Path(path).parent}",)
            )
        if not found.files.exists(path):
            continue
        ends = _ends(found, path)
        if ends is None:
            unread.append(f"{path} could not be read")
        elif (ends - found.now) / 86400 < _DAYS:
            days = (ends - found.now) / 86400
            said = f"ended {-days:.0f} days ago" if days < 0 else f"ends in {days:.0f} days"
            yield Finding(
                what=f"{path} {said}",
                where=(Place(path), place),
                level="" if days < 3 else WARNING,
                lines=(f"(renew {path})",),
            )
    unread += [f"{x.what} may not be read" for x in _denied(found)]
    if unread:
        raise UnknownError("; ".join(dict.fromkeys(unread)))


def _denied(found: Found) -> list[Unread]:
    """Return the files of servers that another user may read."""
    servers = ("/nginx", "/apache2", "/httpd", "/haproxy")
    return [x for x in found.unread if x.denied and any(y in x.what for y in servers)]


def _ends(found: Found, path: str) -> float | None:
    """Return the end of a certificate, in seconds since 1970."""
    text = found.files.text(path)
    try:
        from cryptography import x509
    except ImportError:
        found.unread.append(
            Unread(path, "cryptography is not installed: pip install 'keyfront[doctor]'")
        )
        return None
    if text is None:
        return None
    try:
        certificate = x509.load_pem_x509_certificate(text.encode())
        ends: datetime = certificate.not_valid_after_utc
        return ends.timestamp()
    except ValueError:
        found.files.broken(Place(path), "a certificate in PEM")
        return None


@check(
    "F03",
    ERROR,
    "files",
    holds="Secrets are readable by their services only",
    harm="Every user of the machine reads the keys or the database's password.",
    source="keystone-manage doctor: symptoms for key repositories; docs/deploy.md",
)
def readable_secrets(found: Found) -> Iterator[Finding]:
    """keystone.conf has the database's password, domain files the directory's; a key of TLS is the
    server itself."""
    if not found.identities and not dict(_keys(found)):
        denied = found.denied.get("keystone") or next((x.what for x in _denied(found)), "")
        raise UnknownError(
            f"{denied} may not be read" if denied else "neither keystone.conf nor a key of TLS"
        )
    paths = dict.fromkeys(x for conf in found.identities for x in conf.paths)
    secret = [(path, Place(path), WARNING) for path in paths if _has_password(found, path)]
    secret += [(path, place, ERROR) for path, place in _keys(found)]
    for path, place, level in secret:
        if place.path != path and found.is_of_a_container(place.path):
            continue
        try:
            mode = found.files.resolved(path).stat().st_mode
        except OSError:
            continue
        if mode & 0o004:
            yield Finding(
                what=f"{path} is readable by everybody",
                where=(place,),
                level=level,
                lines=(f"chmod o-rwx {path}",),
            )
    if "keystone" in found.denied:
        raise UnknownError(f"{found.denied['keystone']} may not be read")


def _has_password(found: Found, path: str) -> bool:
    text = found.files.text(path, wanted=False) or ""
    return bool(
        re.search(
            r"^\s*(connection|transport_url)\s*=\s*\S+://[^:/@\s]*:[^@\s]+@|^\s*password\s*=\s*\S",
            text,
            re.MULTILINE,
        )
    )


@check(
    "R01",
    WARNING,
    "rendered",
    holds="Files of keyfront render are as they were rendered",
    harm="The next keyfront render keeps them, and what it would have mended stays.",
    source="docs/render.md, changing something",
)
def changed_by_hand(found: Found) -> Iterator[Finding]:
    """Tell the command rather than the file: the whole of it is in each file's header."""
    for one in found.rendered:
        if not one.untouched:
            command = " ".join(one.command) or "keyfront render DIR"
            yield Finding(
                what="changed by hand since it was rendered",
                where=(Place(one.path),),
                lines=(f"{command} --diff",),
            )


@check(
    "R02",
    WARNING,
    "rendered",
    holds="What was rendered for other folders is installed there, as it was rendered",
    harm="systemd, the kernel and logrotate go by other numbers than the servers, or by none.",
    source="docs/render.md: cp -r DIR/system/. /",
)
def in_their_places(found: Found) -> Iterator[Finding]:
    """system/ of the folder mirrors the root and is copied there by hand."""
    for folder in rendered.folders(found.rendered):
        for path in found.files.glob(f"{folder}/system/etc/**/*"):
            place = rendered.in_place(str(folder), path)
            if not place or os.path.isdir(found.files.resolved(path)):
                continue
            here, there = (found.files.text(x, wanted=False) for x in (path, place))
            if here is not None and here != there:
                said = "is not there" if there is None else "is another than was rendered"
                yield Finding(
                    what=f"{place} {said}",
                    where=(Place(str(path)),),
                    # makes the folders of drop-ins as well
                    lines=(f"install -D -m 644 {path} \\", f"    {place}"),
                )


@check(
    "R03",
    WARNING,
    "rendered",
    holds="No files of another line-up are left",
    harm="A unit or a drop-in of the former line-up starts the wrong server.",
    source="docs/render.md, files of a line-up you no longer use",
)
def left_over(found: Found) -> Iterator[Finding]:
    """keyfront render names them and leaves them alone, also where they were copied to."""
    by_folder: dict[str, set[str]] = {}
    for one in found.rendered:
        by_folder.setdefault(one.folder, set()).add(" ".join(one.command))
    for folder, commands in by_folder.items():
        if not folder or len(commands) < 2:
            continue
        newest = max(
            commands, key=lambda words: sum(" ".join(x.command) == words for x in found.rendered)
        )
        for one in found.rendered:
            below = one.path.removeprefix(folder).lstrip("/")
            known = below if below in PATHS else f"{SYSTEM}{below}"
            if " ".join(one.command) != newest and known in PATHS:
                yield Finding(
                    what=f"made by another command than the rest of {folder}",
                    where=(Place(one.path),),
                    lines=(f"rm {one.path}", newest),
                )

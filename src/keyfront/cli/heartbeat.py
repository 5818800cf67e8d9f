"""``keyfront heartbeat status``: what the heartbeat did in each process of this machine."""

from __future__ import annotations

import argparse
import glob
import json
import os
import pwd
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from keyfront.errors import HeartbeatError

_WIDTH: Final = 80

#: The columns of the table: title, width.
_COLUMNS: Final = (
    ("PID", 7),
    ("SERVICE", 11),
    ("SERVER", 17),
    ("CONN", 5),
    ("BEATS", 6),
    ("FLOWING", 7),
    ("LATE", 8),
    ("DEAD", 5),
    ("RECONN", 6),
)
_TEXTS: Final = ("SERVICE", "SERVER")

#: The sums that are printed below the table, in this order: name, label, meaning.
_LINES: Final = (
    ("connections", "connections", "kept alive now"),
    ("opened", "opened", "connections kept alive in all"),
    ("beats", "beats", "heartbeats sent"),
    ("flowing", "flowing", "heartbeats not needed, as bytes were flowing"),
    ("full", "full", "heartbeats not sent, as the send buffer was full"),
    ("stopped", "stopped", "connections given up after an interrupted write"),
    ("dead_peers", "dead peers", "found gone or silent"),
    ("reconnections", "reconnections", "connections that were replaced"),
    ("expired", "expired", "hung up after they lay in a pool for too long"),
    ("failures", "failures", "the thread could not start, ended, or lost a beat"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of the command to its parser."""
    parser.description = "Look at the AMQP connections that are kept alive on this machine."
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    part = actions.add_parser(
        "status",
        help="print what the heartbeat did in each process",
        description="Print what the heartbeat did in each process, and which of them combine "
        "what cannot work together. Root sees the processes of all users.",
    )
    part.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        help="the folder of the counts, as the option path (default: those in /dev/shm)",
    )
    part.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> int:
    """Print what the heartbeat did; returns the exit status.

    :raises HeartbeatError: see :func:`status`
    """
    return status(arguments.path, out, as_json=arguments.json)


def folders(path: Path | None) -> list[Path]:
    """Return the folders of counts to look at: the one given, or those of all users.

    :raises HeartbeatError: the one given cannot be read
    """
    from keyfront.gateway.heartbeat.counters import PREFIX, default_folder

    if path is not None:
        try:
            os.listdir(path)
        except OSError as error:
            raise HeartbeatError(f"{path}: {error.strerror}") from None
        return [path.resolve()]
    own = default_folder()
    found = [Path(name) for name in sorted(glob.glob(f"/dev/shm/{PREFIX}*"))]
    return found if own in found else [*found, own]


def status(path: Path | None, out: TextIO, *, as_json: bool = False) -> int:
    """Print what the heartbeat did in each process; returns 0.

    :param path: the folder of the counts; ``None`` for those of all users
    :raises HeartbeatError: there is no process, or the folder cannot be read
    """
    from keyfront.gateway.heartbeat.counters import read_all

    looked_at = folders(path)
    processes = [{**process, "user": _user(process["uid"])} for process in read_all(looked_at)]
    if not processes:
        raise _none(path, looked_at)
    sums = {name: sum(process[name] for process in processes) for name, _, _ in _LINES}
    for name in ("lateness_worst", "lateness_p99"):
        sums[name] = max(process[name] for process in processes)
    unsafe = _unsafe(processes)
    if as_json:
        found = {"processes": processes, "sums": sums, "unsafe": unsafe}
        out.write(json.dumps(found, indent=2) + "\n")
        return 0
    for line in _table(processes) + _totals(sums, len(processes)) + _warnings(unsafe):
        out.write(line + "\n")
    return 0


def _none(path: Path | None, looked_at: Sequence[Path]) -> HeartbeatError:
    advice = "is the service running, with [keyfront_heartbeat] enabled or the filter heartbeat?"
    if path is not None:
        return HeartbeatError(f"{path}: no running process counts its heartbeats here; {advice}")
    advice += " If its option path names another folder, give it with --path"
    hidden = [folder for folder in looked_at if folder.is_dir() and not os.access(folder, os.R_OK)]
    if hidden:
        advice += f"; only root can read {', '.join(map(str, hidden))}"
    return HeartbeatError(f"no running process of this machine counts its heartbeats; {advice}")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _unsafe(processes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each combination that cannot work once, with the processes that have it."""
    found: dict[str, list[int]] = {}
    for process in processes:
        for text in dict.fromkeys(process["unsafe"]):
            found.setdefault(text, []).append(process["pid"])
    return [{"text": text, "pids": pids} for text, pids in found.items()]


def _table(processes: Sequence[dict[str, Any]]) -> list[str]:
    lines = [_row([title for title, _ in _COLUMNS])]
    users = {process["user"] for process in processes}
    user = None
    for process in processes:
        if len(users) > 1 and process["user"] != user:
            lines.append(f"user {_plain(process['user'])[: _WIDTH - 6]}:")
        user = process["user"]
        lines.append(
            _row(
                [
                    str(process["pid"]),
                    process.get("command") or process["user"],
                    process.get("server") or "-",
                    *(_short(process[name]) for name in ("connections", "beats", "flowing")),
                    _span(process["lateness_worst"]),
                    *(_short(process[name]) for name in ("dead_peers", "reconnections")),
                ]
            )
        )
    return [*lines, ""]


def _row(cells: Sequence[Any]) -> str:
    made = []
    for (title, width), cell in zip(_COLUMNS, cells, strict=True):
        text = _plain(cell)
        if title in _TEXTS:
            made.append((text if len(text) <= width else text[: width - 2] + "..").ljust(width))
        else:
            made.append(text.rjust(width))
    return " ".join(made)


def _totals(sums: dict[str, Any], processes: int) -> list[str]:
    lines = [f"{'processes':<14}{processes:>12}  that live and have a heartbeat"]
    lines += [f"{label:<14}{_short(sums[name]):>12}  {meaning}" for name, label, meaning in _LINES]
    p99 = _span(sums["lateness_p99"])
    worst = f"{'late':<14}{_span(sums['lateness_worst']):>12}  "
    return [*lines, f"{worst}at worst; 99 of 100 in each process within {p99}"]


def _warnings(unsafe: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for one in unsafe:
        whose = "process" if len(one["pids"]) == 1 else "processes"
        text = f"{_plain(one['text'])} ({whose} {', '.join(map(str, one['pids']))})"
        lines += ["", *textwrap.wrap("unsafe: " + text, _WIDTH, subsequent_indent=" " * 8)]
    return lines


def _plain(text: object) -> str:
    """Return a text with a question mark for what not every terminal shows in one column."""
    return "".join(x if x.isascii() and x.isprintable() else "?" for x in str(text))


def _short(number: int) -> str:
    """Return a number in at most five columns."""
    if number < 100_000:
        return str(number)
    power = (len(str(number)) - 1) // 3
    tenths = number // 10 ** (3 * power - 1)
    text = str(tenths // 10) if tenths >= 1000 else f"{tenths / 10:.1f}"
    return text + "kMGTPE"[power - 1]


def _span(seconds: float) -> str:
    """Return a number of seconds in at most eight columns."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us" if seconds else "0"
    if seconds < 1:
        return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"
    return f"{seconds:.1f} s" if seconds < 1000 else f"{_short(int(seconds))} s"

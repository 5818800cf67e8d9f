"""The passwords of a service that a directory refused, known to all processes of the node.

Each process that offered a refused password on its own account would soon have the service locked
out. A refusal is kept for a while in a file that only this user can read, of the password only a
salted digest that takes long to make (scrypt), so that it is of no use to find the password. While
no such file can be had, a process keeps what it learns for itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keyfront.common import json_text
from keyfront.common.file_lock import FileLock
from keyfront.errors import CoordinatorError, CredentialsError, Verdict

LOG = logging.getLogger(__name__)

#: Seconds for which a refused password is not offered again. They double with each refusal.
HOLD_SECONDS = 10.0
MAX_HOLD_SECONDS = 300.0
#: The folder that root has made for the service's user; in /dev/shm anybody could make it first.
PLACE = Path("/run/keyfront")

# Seconds after which a refusal does not count towards the next one.
_FORGOTTEN = 3600.0
# Seconds after which a file is of no use.
_OLD = 86_400.0
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST = 65536
_POLL_SECONDS = 0.002
# Memory 16 MiB, about 50 ms; made only when something was refused.
_COST = {"n": 2**14, "r": 8, "p": 1}

#: Seconds for which a process keeps its refusals for itself, after it could not tell the others.
ALONE_SECONDS = 10.0

_ANY = "*"
# Locks for those who offer a password: whoever waits for one for so many seconds takes the next, as
# the process that holds it may be stopped.
_TURNS = 4
_TURN_SECONDS = 1.0
# So many servers that refuse a password count for all, though another one took it.
_ENOUGH = 3


class ServiceRefusals:
    """The refusals of one account, by password and server.

    A server is whatever tells it from others: its address, too, where a name stands for several. A
    password that one server refuses may not have come to that one yet. It is held back from all
    when a second one refuses it and none has taken it meanwhile, or when a third one does; and
    then, when it is offered again, a server is asked that has not refused it, if there is one.

    :param account: the texts that tell the account from others; ``None`` to share with nobody
    """

    def __init__(self, account: Sequence[str] | None = None) -> None:
        self._path: Path | None = None
        self._lock: FileLock | None = None
        self._turns: list[FileLock] = []
        # What could not be put into the file.
        self._memory = _empty()
        self._alone_until = 0.0
        # By salt, the password and digest that was made last.
        self._made: dict[str, tuple[bytes, str]] = {}
        folder = None if account is None else shared_folder()
        if folder is not None:
            name = hashlib.blake2b(repr(account).encode(), digest_size=12).hexdigest()
            self._path = folder / f"{name}.json"
            self._lock = FileLock(folder / f"{name}.lock", seconds=1.0)
            self._turns = [FileLock(folder / f"{name}.turn{x or ''}") for x in range(_TURNS)]

    @property
    def shared(self) -> bool:
        """True if other processes know of it."""
        return self._path is not None and time.monotonic() >= self._alone_until

    def held(self, secret: bytes, server: str | None = None) -> CredentialsError | None:
        """Return the reason why a password is not to be offered now; ``None`` if it may be.

        :param server: the server that it would be offered to; ``None`` to ask of all of them
        """
        for state in (self._read(), self._memory):
            if not state["refused"]:
                continue
            digest = self._digest(state["salt"], secret)
            now = time.monotonic()
            for place in (_ANY,) if server is None else (_ANY, server):
                entry = state["refused"].get(f"{digest} {place}")
                if entry is not None and _is_on(entry, now):
                    return _error(entry["error"], entry["until"] - now)
        return None

    def note(self, secret: bytes, error: CredentialsError, server: str | None = None) -> None:
        """Note a refusal: for a while nobody offers this password again.

        :param server: the one server that refused it; ``None`` if it counts for all
        """

        def change(state: dict[str, Any]) -> None:
            now = time.monotonic()
            refused, accepted = state["refused"], state["accepted"]
            for key in [k for k, v in refused.items() if now - v["until"] > _FORGOTTEN]:
                del refused[key]
            for key in [k for k, at in accepted.items() if not 0 <= now - at < _FORGOTTEN]:
                del accepted[key]
            digest = self._digest(state["salt"], secret)
            accepted.pop(f"{digest} {server}", None)

            def hold(place: str, longer: float = 0.0) -> float:
                key = f"{digest} {place}"
                before = refused.get(key, {"hold": 0.0, "until": 0.0})
                if longer == 0.0 and _is_on(before, now):
                    return 0.0
                seconds = longer or min(before["hold"] * 2 or HOLD_SECONDS, MAX_HOLD_SECONDS)
                told = before["error"] if longer else _parts(error)
                refused[key] = {"hold": seconds, "until": now + seconds, "error": told}
                return seconds

            if server is None:
                hold(_ANY)
                return
            hold(server)
            own = [k.partition(" ")[2] for k in refused if k.startswith(f"{digest} ")]
            those = [x for x in own if x != _ANY and _is_on(refused[f"{digest} {x}"], now)]
            doubted = any(key.startswith(f"{digest} ") for key in accepted)
            if _ANY in own or len(those) >= (_ENOUGH if doubted else 2):
                seconds = hold(_ANY)
                for each in those if seconds else ():
                    # So that one that has not refused it is asked first, when all may be again.
                    hold(each, min(seconds * 2, MAX_HOLD_SECONDS))

        self._update(change)

    def forget(self, secret: bytes, server: str) -> None:
        """Note that a server took a password.

        :param secret: the password
        :param server: the server, with its address; empty if it has been noted already
        """
        if not (self._read()["refused"] or self._memory["refused"]):
            return

        def change(state: dict[str, Any]) -> None:
            digest = self._digest(state["salt"], secret)
            for place in (_ANY, server):
                state["refused"].pop(f"{digest} {place}", None)
            if server:
                state["accepted"][f"{digest} {server}"] = time.monotonic()

        if self._path is not None and self._memory["refused"]:
            change(self._memory)
        self._update(change)

    @contextmanager
    def turn(self, seconds: float) -> Iterator[bool]:
        """Offer a password in a block while nobody else of the node does.

        It yields whether it is so; not if others took longer than ``seconds``. One who is stopped
        meanwhile keeps the others for a second or so, and then no more.
        """
        began = time.monotonic()
        taken: FileLock | None = None
        alone = not self._turns
        try:
            try:
                while not alone:
                    waited = time.monotonic() - began
                    for lock in self._turns[: 1 + int(waited / _TURN_SECONDS)]:
                        if lock.attempt():
                            taken = lock
                            break
                    if taken is not None or waited >= seconds:
                        break
                    time.sleep(_POLL_SECONDS)
            except CoordinatorError as error:
                self._go_alone(error)
                alone = True
            yield taken is not None or alone
        finally:
            if taken is not None:
                taken.__exit__(None, None, None)
                taken.close()  # it is seldom taken

    def after_fork(self) -> None:
        """Release the parent's locks, in a child whose fork hooks may not have run."""
        for lock in (self._lock, *self._turns):
            if lock is not None:
                lock.after_fork()

    def _read(self) -> dict[str, Any]:
        """Return the content of the file; without one, that which this process knows."""
        if self._path is None:
            return self._memory
        try:
            with open(os.open(self._path, _READ), "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                    return _checked(json_text.parse(file.read(_LONGEST)))
        except (OSError, ValueError, OverflowError, LookupError, TypeError, AttributeError):
            pass  # not there, or not ours, or broken: it is written anew
        return _empty()

    def _update(self, change: Callable[[dict[str, Any]], None]) -> None:
        path, lock = self._path, self._lock
        if path is not None and lock is not None and self.shared:
            try:
                with lock:
                    state = self._read()
                    change(state)
                    self._write(path, state)
                lock.close()
                self._alone_until = 0.0
                return
            except (CoordinatorError, OSError) as error:
                self._go_alone(error)
        change(self._memory)

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        if not state["refused"]:
            path.unlink(missing_ok=True)
            return
        fd, name = tempfile.mkstemp(dir=path.parent)  # with mode 0600
        try:
            with open(fd, "w") as file:
                json.dump(state, file)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _go_alone(self, error: Exception) -> None:
        """Share with nobody for a while: who holds the file may be stopped, or the disk full."""
        if not self._alone_until:
            LOG.warning("refused passwords are not shared with other processes: %s", error)
        self._alone_until = time.monotonic() + ALONE_SECONDS

    def _digest(self, salt: str, secret: bytes) -> str:
        made = self._made.get(salt)
        if made is None or made[0] != secret:
            digest = hashlib.scrypt(secret, salt=base64.b64decode(salt), dklen=16, **_COST)
            if len(self._made) > 1:  # the file has another salt when it is made anew
                self._made.clear()
            made = self._made[salt] = (secret, digest.hex())
        return made[1]


def _empty() -> dict[str, Any]:
    return {"salt": _text(os.urandom(16)), "refused": {}, "accepted": {}}


def _is_on(entry: dict[str, Any], now: float) -> bool:
    """Return whether a refusal holds. What is further away than any does was of before a boot."""
    return bool(now < entry["until"] <= now + MAX_HOLD_SECONDS)


def shared_folder() -> Path | None:
    """Return the folder of this user's files; ``None`` if there is none that is safe."""
    base = Path("/dev/shm")
    if not os.access(base, os.W_OK | os.X_OK):
        base = Path(tempfile.gettempdir())
    folder = base / f"keyfront-ldap-{os.geteuid()}"
    with suppress(OSError):
        found = PLACE.lstat()
        own = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022
        if stat.S_ISDIR(found.st_mode) and own and found.st_uid:
            folder = PLACE / "ldap"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
    except OSError as error:
        reason = error.strerror
    else:
        own = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if stat.S_ISDIR(found.st_mode) and own:
            _remove_old(folder)
            return folder
        reason = "it is another user's, or others may look into it"
    LOG.warning("%s: refused passwords are not shared with other processes: %s", folder, reason)
    return None


def _remove_old(folder: Path) -> None:
    """Remove what nobody has written for a day: what is in it has long been over."""
    with suppress(OSError):
        for each in os.scandir(folder):
            with suppress(OSError):
                if time.time() - each.stat(follow_symlinks=False).st_mtime > _OLD:
                    os.unlink(each.path)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _checked(state: Any) -> dict[str, Any]:
    base64.b64decode(state["salt"], validate=True)
    for entry in state["refused"].values():
        entry["until"] = _finite(entry["until"])
        entry["hold"] = _finite(entry["hold"])
        _error(entry["error"], 0.0)
    accepted = {str(key): _finite(at) for key, at in state.get("accepted", {}).items()}
    return {"salt": state["salt"], "refused": state["refused"], "accepted": accepted}


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(number)
    return number


def _parts(error: CredentialsError) -> list[Any]:
    return [
        error.verdict.name, error.code, error.name, error.diagnostic, error.matched_dn,
        list(error.referrals), error.server,
    ]  # fmt: skip


def _error(parts: list[Any], seconds: float) -> CredentialsError:
    """Return the error of a refusal again, with what is left of its time."""
    verdict, code, name, diagnostic, matched_dn, referrals, server = parts
    told = f"{diagnostic}; " if diagnostic else ""
    return CredentialsError(
        Verdict[verdict],
        code,
        name,
        f"{told}it is not offered again for {seconds:.0f} s",
        matched_dn,
        referrals,
        server=server,
    )

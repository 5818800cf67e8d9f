"""Reads a password from a file that only its owner can write, and nobody but its group read."""

from __future__ import annotations

import os
import stat

from keyfront.errors import OptionError

# Bytes; no password is as long.
_LONGEST_SECRET = 8192


def read_secret(option: str, path: str) -> str:
    """Return the password that is in a file, without the end of its line.

    :param option: name of the option that names the file, for the error
    :raises OptionError: it is no file, cannot be read, is readable for everybody or writable for
        its group, is empty, or holds what is no password
    """
    try:
        # a named pipe would be waited for
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OptionError(option, path, "a regular file")
            if status.st_mode & 0o027:
                raise OptionError(
                    option,
                    path,
                    f"only for its owner to write, and for nobody but its group to read; its mode "
                    f"is {stat.S_IMODE(status.st_mode):04o}, try chmod 0600",
                )
            data = file.read(_LONGEST_SECRET + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise OptionError(option, path, f"a file that can be read ({reason})") from None
    try:
        secret = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        secret = ""
    # a second line would be an accident that no server would explain
    if not secret or len(data) > _LONGEST_SECRET or any(x in secret for x in "\0\r\n"):
        data = b""
        secret = ""
        raise OptionError(
            option, path, f"a file of one line in UTF-8, 1 to {_LONGEST_SECRET} bytes"
        )
    return secret

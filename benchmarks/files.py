"""Files that are written whole or not at all, JSON, and folders that last for a block."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keyfront.common import json_text
from keyfront.common.unix_sockets import temporary_parent
from keyfront.errors import BenchmarkError

_MEMORY = Path("/dev/shm")


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """Make two folders of this user only, and delete them when the block ends.

    The first has a short path, for sockets; the second lies in memory where there is such a place.
    """
    places = temporary_parent(), _MEMORY if _MEMORY.is_dir() else None
    first, second = (
        tempfile.TemporaryDirectory(prefix="keyfront-bench-", dir=place, ignore_cleanup_errors=True)
        for place in places
    )
    with first as folder, second as shared:
        yield Path(folder), Path(shared)


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all; one that is there keeps its mode.

    :raises BenchmarkError: it cannot be written
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=path.suffix)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, path.stat().st_mode & 0o777 if path.exists() else 0o644)
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise BenchmarkError(f"{path}: cannot be written: {error.strerror}") from None


def read_json(path: Path) -> Any:
    """Return what a file of JSON says.

    :raises BenchmarkError: it cannot be read or is no JSON; names the line
    """
    try:
        return json_text.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(f"{path}: cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise BenchmarkError(f"{path}:{error.lineno}: is no JSON: {error.msg}") from None
    except ValueError as error:
        raise BenchmarkError(f"{path}: is no JSON: {error}") from None

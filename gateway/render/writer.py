"""The folder of the files: written whole or not at all, and a change by hand is kept."""

from __future__ import annotations

import difflib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from keyfront.errors import OptionError

from .files import File, body, is_untouched

NEW = "new"
CHANGED = "changed"
UNCHANGED = "unchanged"
KEPT = "kept"


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What happens to a file: ``new``, ``changed``, ``unchanged``; ``kept`` as a hand left it."""

    file: File
    fate: str


def compare(files: Sequence[File], folder: Path, *, force: bool = False) -> list[Fate]:
    """Find out what writing would do, without doing it.

    A file whose digest no longer fits, or that keyfront did not make, is kept unless ``force``.

    :raises OptionError: something is in the way that is no file, or cannot be read
    """
    return [Fate(file=file, fate=_fate(file, folder, force)) for file in files]


def _fate(file: File, folder: Path, force: bool) -> str:
    there = _text(folder, file)
    if there is None:
        return NEW
    if there == file.text:
        return UNCHANGED
    return CHANGED if force or is_untouched(there) else KEPT


def write(files: Sequence[File], folder: Path, *, force: bool = False) -> list[Fate]:
    """Write the files, all of them or none; those changed by hand stay unless ``force``.

    Each is written beside its place and synced; only when all are there do they take their places.
    A failure in the middle of that puts back what was there.

    :raises OptionError: the folder cannot be written to; nothing in it has changed
    """
    fates = compare(files, folder, force=force)
    wanted = [item.file for item in fates if item.fate in (NEW, CHANGED)]
    try:
        _write(wanted, folder)
        for parent in {(folder / file.path).parent for file in wanted}:
            _sync(parent)
        for item in fates:
            if item.fate == UNCHANGED:
                (folder / item.file.path).chmod(item.file.mode)
    except OSError as error:
        where = error.filename or folder
        raise OptionError(
            "DIR", folder, f"a folder that can be written to ({where}: {error.strerror})"
        ) from None
    return fates


def _write(files: Sequence[File], folder: Path) -> None:
    with _undone_on_error() as undo_folders:
        _make_folder(folder, undo_folders)
        for parent in sorted({parent for file in files for parent in _parents(folder, file)}):
            _make_folder(parent, undo_folders)
        # the temporary names go whatever happens, after what needs them to undo
        with ExitStack() as temporary, _undone_on_error() as undo:
            written = [(_beside(folder / file.path, file, temporary), file) for file in files]
            for path, file in written:
                _take_place(path, folder / file.path, temporary, undo)


def diff(files: Sequence[File], folder: Path) -> Iterator[str]:
    """Lines of a unified diff from what is there to what would be written.

    Files changed by hand are included: they show what they miss. A file that differs in its header
    alone is left out.
    """
    for file in files:
        there = _text(folder, file)
        if there is not None and body(there) == body(file.text):
            continue
        path = str(folder / file.path)
        yield from difflib.unified_diff(
            [] if there is None else there.splitlines(keepends=True),
            file.text.splitlines(keepends=True),
            "/dev/null" if there is None else path,
            path,
        )


def left_over(files: Sequence[File], folder: Path, known: Sequence[str]) -> list[str]:
    """Paths that another line-up left in the folder, as keyfront made them.

    :param known: the paths of all line-ups
    """
    taken = {file.path for file in files}
    candidates = (File(path=path, text="") for path in known if path not in taken)
    return sorted(file.path for file in candidates if is_untouched(_text(folder, file) or ""))


def _text(folder: Path, file: File) -> str | None:
    """What is in a file's place; ``None`` if nothing is."""
    path = folder / file.path
    for parent in reversed(_parents(folder, file)):
        if parent.is_symlink():
            raise OptionError("DIR", folder, f"without symbolic links in it: remove {parent}")
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OptionError("DIR", folder, f"free of what is no plain file: remove {path}")
        return path.read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OptionError("DIR", folder, f"readable ({path}: {error.strerror})") from None


def _parents(folder: Path, file: File) -> list[Path]:
    """The folders between, the innermost first."""
    path = (folder / file.path).parent
    between = []
    while path != folder:
        between.append(path)
        path = path.parent
    return between


@contextmanager
def _undone_on_error() -> Iterator[ExitStack]:
    """A stack of what takes the steps back, run only if a later step fails."""
    with ExitStack() as undo:
        yield undo
        undo.pop_all()


def _make_folder(path: Path, undo: ExitStack) -> None:
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir()
        undo.callback(_ignoring, folder.rmdir)
        folder.chmod(0o755)  # whatever the umask: the servers' users read it


def _beside(target: Path, file: File, temporary: ExitStack) -> Path:
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    path = Path(name)
    temporary.callback(_ignoring, path.unlink)
    with os.fdopen(descriptor, "wb") as stream:
        os.fchmod(descriptor, file.mode)
        stream.write(file.text.encode())
        stream.flush()
        os.fsync(descriptor)
    return path


def _take_place(path: Path, target: Path, temporary: ExitStack, undo: ExitStack) -> None:
    if target.exists():
        # a second name for what is there, by which it is put back
        spare = path.with_name(f"{path.name}.old")
        os.link(target, spare)
        temporary.callback(_ignoring, spare.unlink)
        undo.callback(_ignoring, lambda: spare.replace(target))
    else:
        undo.callback(_ignoring, target.unlink)
    path.replace(target)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ignoring(call: object) -> None:
    assert callable(call)
    with suppress(OSError):
        call()

"""The files of a deployment: their text, and the folder that they are written to.

A file's text is a template filled with a plan's numbers, under a header that can be checked. The
header carries the command that makes the file, and a digest of the content, by which a change by
hand is noticed. Nothing in it depends on the day or the run: the same plan, settings and versions
make the same bytes. Files are written all or none, and one that was changed by hand is kept.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import stat
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from keyfront import __version__
from keyfront.common import templates
from keyfront.errors import OptionError

if TYPE_CHECKING:
    from ..plan import Number

NEW = "new"
CHANGED = "changed"
UNCHANGED = "unchanged"
KEPT = "kept"

#: The folder that mirrors the root of the file system, and whose content is copied there.
SYSTEM = "system/"
# Columns that comments keep to.
_WIDTH = 100
_MARK = "# keyfront content: sha256:"
_HEADER = """\
# {title}
#
# Made by keyfront {version} for {versions}, by:
#     {command}
# Change what that command is told rather than this file: it is then kept, and --diff shows what
# is missed. Each number says what it was computed from and what breaks beyond it.
"""


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a deployment.

    :param path: below the folder, with ``/``
    :param text: the whole content, header included
    :param mode: 0o644 for configuration, 0o600 for keys
    """

    path: str
    text: str
    mode: int = 0o644

    @property
    def goes_to(self) -> str:
        """Return the path at which the system looks for it; empty if it is used where it lies."""
        return self.path[len(SYSTEM) - 1 :] if self.path.startswith(SYSTEM) else ""


def fill(template: str, numbers: Mapping[str, Number], **values: object) -> str:
    """Return a template of ``keyfront.deploy``, filled in.

    It sees each number as ``n.uwsgi.processes.value`` and its reason, for a comment, as
    ``n.uwsgi.processes | why``. Comments that grow beyond :data:`_WIDTH` are wrapped afterwards.

    :param template: its path below ``keyfront/deploy``, for example ``production/nginx.conf.j2``
    :raises jinja2.UndefinedError: a value or a number that the template names was not given
    """
    text = templates.render(template, n=_namespace(numbers), **values)
    return "\n".join(_wrapped(line) for line in text.split("\n"))


def _namespace(numbers: Mapping[str, Number]) -> SimpleNamespace:
    """Return the numbers as attributes: ``uwsgi.processes`` of a mapping becomes two dots."""
    tree = SimpleNamespace()
    for name, number in numbers.items():
        group, _, leaf = name.partition(".")
        if not hasattr(tree, group):
            setattr(tree, group, SimpleNamespace())
        setattr(getattr(tree, group), leaf, number)
    return tree


def with_header(body: str, *, title: str, command: str, versions: str) -> str:
    """Return a file's text: its body below a header, a comment in every language we render.

    :param command: the command line that makes the file
    :param versions: the servers' versions it was made for, in words
    """
    head = _HEADER.format(title=title, version=__version__, versions=versions, command=command)
    wrapped = "\n".join(_wrapped(line) for line in head.split("\n"))
    rest = f"{wrapped}\n{body.lstrip()}"
    return f"{_MARK}{_digest(rest)}\n{rest}"


def is_untouched(text: str) -> bool | None:
    """Return whether a file is as keyfront made it; ``None`` if keyfront did not make it.

    Any version of keyfront counts: the digest is the file's own.
    """
    first, _, rest = text.partition("\n")
    if not first.startswith(_MARK):
        return None
    return first[len(_MARK) :].strip() == _digest(rest)


def body(text: str) -> str:
    """Return a file's text without the header that keyfront put before it."""
    return text.partition("\n\n")[2] if text.startswith(_MARK) else text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _wrapped(line: str) -> str:
    """Return a comment in lines of at most :data:`_WIDTH` columns; other lines as they are."""
    if len(line) <= _WIDTH:
        return line
    match = re.match(r"( *# ?)( *)", line)
    if match is None:
        return line
    return textwrap.fill(
        line[match.end() :],
        _WIDTH,
        initial_indent=match[0],
        subsequent_indent=match[0],
        break_long_words=False,
        break_on_hyphens=False,
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """A file, and the effect of writing it.

    :param file: the file
    :param kind: ``new``, ``changed``, ``unchanged``, or ``kept`` if it was changed by hand
    """

    file: File
    kind: str


def compare(files: Sequence[File], folder: Path, *, force: bool = False) -> list[Change]:
    """Return the effects that writing would have, without writing.

    A file whose digest no longer fits, or that keyfront did not make, is kept unless ``force``.

    :param files: the rendered files
    :param folder: the folder that they go to
    :param force: true to replace also what was changed by hand
    :raises OptionError: something is in the way that is no file, or cannot be read
    """
    return [Change(file=file, kind=_kind(file, folder, force)) for file in files]


def _kind(file: File, folder: Path, force: bool) -> str:
    there = _text(folder, file)
    if there is None:
        return NEW
    if there == file.text:
        return UNCHANGED
    return CHANGED if force or is_untouched(there) else KEPT


def write(files: Sequence[File], folder: Path, *, force: bool = False) -> list[Change]:
    """Write the files, all of them or none; those changed by hand stay unless ``force``.

    Each is written beside its place and synced; only when all are there do they take their places.
    A failure in the middle of that puts back what was there.

    :param files: the rendered files
    :param folder: the folder that they go to, made if it is not there
    :param force: true to replace also what was changed by hand
    :raises OptionError: the folder cannot be written to; nothing in it has changed
    """
    changes = compare(files, folder, force=force)
    wanted = [item.file for item in changes if item.kind in (NEW, CHANGED)]
    try:
        _write(wanted, folder)
        for parent in {(folder / file.path).parent for file in wanted}:
            _sync(parent)
        for item in changes:
            if item.kind == UNCHANGED:
                (folder / item.file.path).chmod(item.file.mode)
    except OSError as error:
        where = error.filename or folder
        raise OptionError(
            "DIR", folder, f"a folder that can be written to ({where}: {error.strerror})"
        ) from None
    return changes


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
    """Return the lines of a unified diff from what is there to what would be written.

    Files changed by hand are included: they show what they miss. A file that differs in its header
    alone is left out.

    :param files: the rendered files
    :param folder: the folder that they would go to
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
    """Return the sorted paths that another line-up left in the folder, as keyfront made them.

    :param known: the paths of all line-ups
    """
    taken = {file.path for file in files}
    candidates = (File(path=path, text="") for path in known if path not in taken)
    return sorted(file.path for file in candidates if is_untouched(_text(folder, file) or ""))


def _text(folder: Path, file: File) -> str | None:
    """Return the text of what is at a file's path; ``None`` if nothing is."""
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
    """Return the folders between ``folder`` and the file, the innermost first."""
    path = (folder / file.path).parent
    between = []
    while path != folder:
        between.append(path)
        path = path.parent
    return between


@contextmanager
def _undone_on_error() -> Iterator[ExitStack]:
    """Give a stack of functions that undo steps; they run only if a later step fails."""
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

"""Loads the WSGI application that a server process serves.

The target is named by ``KEYFRONT_APP`` in the environment, in one of three forms:

``config:/etc/keyfront/keystone.ini`` or ``config:keystone.ini#public``
    an application of a paste file (PasteDeploy); the name after ``#`` is ``main`` if left out;
``egg:keyfront#keystone``
    a ``paste.app_factory`` entry point of an installed distribution;
``glance.wsgi.api:application``
    an object in a module.

Left out, it is the packaged Keystone pipeline (``keyfront/deploy/paste/keystone.ini``).

A load that fails is reported once, whole. Afterwards :class:`FailedApplication` answers 503 and
repeats that first error, never a follow-up of it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from keyfront.errors import KeyfrontError, OptionError, TargetError

from . import paste_file
from .error_body import answer_error, error_body
from .unwritten_lines import UnwrittenLines, guard_handlers

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

TARGET_VARIABLE = "KEYFRONT_APP"
_ARGUMENTS_VARIABLE = "KEYFRONT_ARGV"
_FORMS = "config:FILE[#NAME], egg:DISTRIBUTION[#NAME] or MODULE:CALLABLE"

# Seconds a client is told to wait after a failed load; a server needs about that long to restart.
RETRY_AFTER = 10

# Objects that are frozen: more than Python 3.12 itself begins with (375, other releases none), and
# fewer than whoever freezes on purpose has frozen, which is not undone.
_FROZEN_BY_PYTHON = 1000

# To the last @ of the word: a password that is not URL-encoded may hold one.
_CREDENTIALS = re.compile(r"(://[^\s:/@]*:)\S*@")
_OBJECT = re.compile(r"^\w+(\.\w+)*:\w+(\.\w+)*$")


def default_target() -> str:
    """Return the packaged Keystone pipeline as a ``config:`` target."""
    return f"config:{files('keyfront.deploy').joinpath('paste/keystone.ini')}"


def pin_argv(prog: str | None = None) -> None:
    """Hide the server's own command line from the application.

    Keystone, nova, cinder, neutron and ironic parse ``sys.argv`` when they load, and end the
    process over options of gunicorn, granian or Apache. What the application itself shall see
    goes into ``KEYFRONT_ARGV``, for example ``--config-file /etc/nova/nova.conf``.

    :param prog: the name to leave in ``sys.argv[0]``; the present one by default
    :raises OptionError: ``KEYFRONT_ARGV`` ends inside a quotation
    """
    given = os.environ.get(_ARGUMENTS_VARIABLE, "")
    try:
        arguments = shlex.split(given)
    except ValueError as error:
        raise OptionError(
            _ARGUMENTS_VARIABLE, given, f"a command line as a shell reads it ({error})"
        ) from None
    sys.argv = [prog or (sys.argv[0] if sys.argv else "keyfront"), *arguments]


def load(target: str | None = None) -> WSGIApplication:
    """Load the application that ``target`` names.

    :param target: see the module's text; ``KEYFRONT_APP`` or the packaged pipeline by default
    :raises TargetError: the target names nothing
    :raises PasteFileError: the paste file is missing, unreadable or broken
    :raises Exception: whatever the application raises while it loads, unchanged
    """
    target = target or os.environ.get(TARGET_VARIABLE) or default_target()
    scheme, rest = _split(target)
    with _uncollected():
        if scheme == "config":
            return _load_config(rest)
        if scheme == "egg":
            return _load_egg(target)
        return _load_object(target, scheme, rest)


def _end_quickly() -> None:
    """Have this process look for no garbage at its end, nor any that it forks.

    To find all of Keystone in cycles and free it piece by piece takes as long as half of loading
    it, and the process's memory goes back as a whole. One that shall warn of what it leaves open
    (``-X dev``, ``-W``, ``PYTHONWARNINGS``) finds that only by looking.
    """
    if not (sys.flags.dev_mode or sys.warnoptions):
        # Registered before all that the application registers, and so called after it.
        atexit.register(gc.freeze)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Have no garbage looked for in the block.

    Loading makes much that stays and hardly any garbage. To look through all of it again and again
    takes a sixth of the time in which Keystone is loaded.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() < _FROZEN_BY_PYTHON:
            # Straight to the oldest generation, so that the next allocation does not look at all.
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()


def check(target: str) -> None:
    """Find out what is wrong with a target, as far as can be told without importing it.

    :raises TargetError: the target names nothing
    :raises PasteFileError: the paste file is missing, unreadable or broken
    """
    scheme, rest = _split(target)
    if scheme == "config":
        path, name = _paste_path(rest)
        paste_file.check(path)
        found = paste_file.find_fault(path, name, imports=False)
        if found is not None:
            raise found
    elif scheme == "egg":
        _check_egg(target)
    elif fault := paste_file.module_fault(scheme, None, imports=False):
        raise TargetError(f"{TARGET_VARIABLE} = {target}: {fault}; must be {_FORMS}")


def _split(target: str) -> tuple[str, str]:
    """Return a target's scheme, or its module, and the words behind the colon."""
    scheme, _, rest = target.partition(":")
    if rest and (scheme in ("config", "egg") or _OBJECT.match(target)):
        return scheme, rest
    raise TargetError(f"{TARGET_VARIABLE} = {target}: must be {_FORMS}")


def _paste_path(rest: str) -> tuple[Path, str]:
    """Return the file and the application name of a ``config:`` target."""
    path_text, _, name = rest.partition("#")
    path = Path(path_text)
    try:
        path = path.expanduser()
    except RuntimeError:
        pass  # no such user: then it is a file's name
    return path.absolute(), name or "main"


def _load_config(rest: str) -> WSGIApplication:
    from paste.deploy import loadapp

    path, name = _paste_path(rest)
    paste_file.check(path)
    try:
        # PasteDeploy unquotes what follows config:
        return cast("WSGIApplication", loadapp(f"config:{quote(str(path))}", name=name))
    except KeyfrontError:
        raise
    except Exception as error:
        # PasteDeploy names no line; the fault is sought only now, so that a good file costs nothing
        fault = paste_file.find_fault(path, name)
        if fault is not None:
            raise fault from error
        raise


def _load_egg(target: str) -> WSGIApplication:
    from paste.deploy import loadapp

    _check_egg(target)
    return cast("WSGIApplication", loadapp(target))


def _check_egg(target: str) -> None:
    fault = paste_file.egg_fault(target, *paste_file.APP_GROUPS)
    if fault:
        raise TargetError(f"{TARGET_VARIABLE} = {target}: {fault}")


def _load_object(target: str, module_name: str, attributes: str) -> WSGIApplication:
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # only the target's own absence is a wrong target; a missing import inside it is its error
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise TargetError(
                f"{TARGET_VARIABLE} = {target}: there is no module {missing}; must be {_FORMS}"
            ) from None
        raise
    for attribute in attributes.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise TargetError(
                f"{TARGET_VARIABLE} = {target}: module {module_name} has no {attributes}"
            ) from None
    if not callable(found):
        raise TargetError(f"{TARGET_VARIABLE} = {target}: is not callable")
    return cast("WSGIApplication", found)


def redact(text: str) -> str:
    """Blank passwords in URLs, which configuration errors like to quote."""
    return _CREDENTIALS.sub(r"\1***@", text)


def describe(error: BaseException) -> str:
    """Return one line with an error and, behind it, its causes; passwords in URLs are blanked."""
    parts = []
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        text = " ".join(str(step).split())
        parts.append(f"{type(step).__name__}: {text}" if text else type(step).__name__)
        if step.__cause__ is not None or step.__suppress_context__:
            step = step.__cause__
        else:
            step = step.__context__
    return redact(" (caused by) ".join(parts))


def report(error: BaseException) -> None:
    """Write a failed load to standard error, whole and once.

    Standard error and not the log: the application may have failed before it set up logging, and
    every server keeps standard error in its own log.
    """
    if isinstance(error, KeyfrontError):
        text = f"keyfront: the application cannot be loaded: {describe(error)}\n"
    else:
        whole = "".join(traceback.format_exception(error))
        text = f"{redact(whole)}keyfront: the application failed to load: {describe(error)}\n"
    UnwrittenLines().write(sys.stderr, text)


@contextmanager
def reported() -> Iterator[None]:
    """Report what an entrypoint cannot go on with, as a failed load, and raise it.

    :raises KeyfrontError: whatever the block raised
    """
    try:
        yield
    except KeyfrontError as error:
        report(error)
        raise


class FailedApplication:
    """Stands in for an application that failed to load: 503 for every request.

    Each answer writes the first error to standard error in one line, so that the log names the
    cause wherever an operator looks. The client is told nothing but to come back.

    :param error: the exception that the load raised
    :param on_request: called after each answer, for a server that can start a fresh process
    """

    def __init__(
        self, error: BaseException, *, on_request: Callable[[], None] | None = None
    ) -> None:
        self.error = error
        self._line = f"keyfront: 503, the application did not load: {describe(error)}\n"
        self._unwritten = UnwrittenLines()
        self._on_request = on_request

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        self._unwritten.write(sys.stderr, self._line)
        body = error_body(503, "The service could not be started. Its log names the cause.")
        wait = ("Retry-After", str(RETRY_AFTER))
        answer = answer_error(start_response, "503 Service Unavailable", body, wait)
        if self._on_request is not None:
            self._on_request()
        return answer


def load_or_fail(*, raising: bool, on_request: Callable[[], None] | None = None) -> WSGIApplication:
    """Load the target; report a failure and raise it, or stand in for the application.

    The handlers of its logs are guarded, see :mod:`.unwritten_lines`. ``SystemExit`` counts as a
    failure: oslo.config raises it over arguments it does not know. At its end the process does not
    take apart what was loaded.

    :param raising: raise the failure, for servers that end themselves on it (uWSGI's need-app)
    :param on_request: see :class:`FailedApplication`
    """
    _end_quickly()
    try:
        application = load()
    except (Exception, SystemExit) as error:
        report(error)
        if raising:
            raise
        application = FailedApplication(error, on_request=on_request)
    guard_handlers()
    return application


def keep_connections() -> None:
    """Keep the application's AMQP connections alive if its configuration says so.

    Entrypoints call it once the application is loaded. What it imports (ssl, socket) it imports
    only then: an application may patch the standard library while it loads.
    """
    if "oslo_config.cfg" in sys.modules:
        from .heartbeat import install_if_enabled

        install_if_enabled()

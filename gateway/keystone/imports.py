"""Imports of Keystone's modules, and the error for those that are not as keyfront needs them."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from keyfront.errors import IncompatibleError, MissingPartError

from . import series


def import_keystone(name: str) -> Any:
    """Import a module of Keystone, or of what it requires.

    :param name: the module's dotted name
    :raises MissingPartError: Keystone is not installed
    :raises IncompatibleError: Keystone is installed without this module
    """
    try:
        importlib.import_module("keystone")
    except ModuleNotFoundError as error:
        if error.name != "keystone":
            raise
        raise MissingPartError(
            "Keystone is not installed; install it with: pip install 'keyfront[keystone]'"
        ) from error
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another module that fails to import is an error of its own and is shown as it is.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise incompatible(f"there is no module {error.name}") from error


def incompatible(difference: str) -> IncompatibleError:
    """Return the error that names this Keystone's version and what is not as expected.

    :param difference: a clause that says what is not as expected
    """
    try:
        version = series.installed()
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return IncompatibleError(
        f"Keystone {version} does not look as keyfront needs it: {difference}; use a Keystone of "
        f"OpenStack {', '.join(series.SERIES.values())}, or a newer keyfront"
    )

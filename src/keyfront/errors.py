"""The errors of keyfront: one tree, one line each, made for an operator to act on.

Every error says what is wrong, where, and what to do, in a single line and without a secret.
The command line prints that line and exits with status 2. All of them pickle, so that they cross
process borders whole.
"""

from __future__ import annotations


class KeyfrontError(Exception):
    """Base of every error that keyfront raises on purpose; ``str()`` is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))

    @property
    def message(self) -> str:
        """The line an operator reads."""
        return str(self.args[0])


class OptionError(KeyfrontError):
    """An option has a value outside its range.

    :param option: the option as the operator writes it, for example ``--listen``
    :param value: what was given (never a secret)
    :param allowed: the values it takes, in words
    """

    def __init__(self, option: str, value: object, allowed: str) -> None:
        super().__init__(f"{option} = {value}: must be {allowed}")
        self.option = option
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, object, str]]:
        return type(self), (self.option, self.value, self.allowed)


class TargetError(KeyfrontError):
    """An application target (``KEYFRONT_APP``) names nothing that can be loaded."""


class PasteFileError(KeyfrontError):
    """A paste file cannot be read or is broken; names file and line."""


class IncompatibleError(KeyfrontError):
    """A part that keyfront builds upon no longer looks as keyfront needs it."""


class ImportedTooEarlyError(KeyfrontError):
    """A module was imported before gevent's monkey patching and holds blocking primitives."""


class MissingPartError(KeyfrontError):
    """A program or an optional package is not installed; names the command that installs it."""


class StateError(KeyfrontError):
    """A state folder cannot be used: another user's, from a newer version, or not ours."""


class ServerError(KeyfrontError):
    """A server did not start, or ended by itself; names its log."""


class CoordinatorError(KeyfrontError):
    """The epochs of the token cache cannot be reached: changes are refused, nothing is cached."""

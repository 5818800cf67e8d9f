"""What the options of a directory pool may be; errors name option, value and range."""

from __future__ import annotations

from collections.abc import Sequence

from keyfront.errors import OptionError

from .protocol.tls import TLS
from .protocol.urls import ServerURL


def servers(urls: str | Sequence[str]) -> list[ServerURL]:
    """Read URLs: a sequence, or one text with commas or spaces between them.

    :raises OptionError: there is none, or one is no URL of an LDAP server
    """
    texts = urls.replace(",", " ").split() if isinstance(urls, str) else urls
    found = list(dict.fromkeys(ServerURL.parse(text, "urls") for text in texts))
    if not found:
        raise OptionError("urls", "(none)", "at least one LDAP URL")
    return found


def secured(tls: TLS | None, urls: Sequence[ServerURL]) -> TLS:
    """Return the options of TLS, after a look whether they go with the URLs and the files exist.

    :raises OptionError: StartTLS is wanted where it cannot be, or a file cannot be read
    """
    tls = TLS() if tls is None else tls
    for url in urls:
        if tls.start_tls and url.scheme != "ldap":
            raise OptionError("start_tls", True, f"off with {url.scheme}:// ({url.text})")
    if tls.start_tls or any(url.scheme == "ldaps" for url in urls):
        tls.context()
    return tls


def above_zero(option: str, value: float) -> float:
    """Check a time.

    :raises OptionError: it is no number above 0
    """
    if not _is_number(value) or not value > 0:
        raise OptionError(option, value, "a number of seconds above 0")
    return value


def zero_or_more(option: str, value: float) -> float:
    """Check a time that may be none.

    :raises OptionError: it is no number, or below 0
    """
    if not _is_number(value) or not value >= 0:
        raise OptionError(option, value, "a number of seconds, 0 or more")
    return value


def finite(option: str, value: float) -> float:
    """Check a time that may not be without end.

    :raises OptionError: it is no number above 0, or infinite
    """
    if above_zero(option, value) == float("inf"):
        raise OptionError(option, value, "a number of seconds above 0, and finite")
    return value


def sizes(minimum: int, maximum: int, prefix: str = "") -> None:
    """Check a pair of sizes.

    :param prefix: of the options' names
    :raises OptionError: the maximum is below 1, or the minimum negative or above it
    """
    low, high = f"{prefix}min_size", f"{prefix}max_size"
    if not _is_count(maximum) or maximum < 1:
        raise OptionError(high, maximum, "a whole number, 1 or more")
    if not _is_count(minimum) or not 0 <= minimum <= maximum:
        raise OptionError(low, minimum, f"a whole number from 0 to {high} ({maximum})")


def count(option: str, value: int) -> int:
    """Check a whole number.

    :raises OptionError: it is none, or below 0
    """
    if not _is_count(value) or value < 0:
        raise OptionError(option, value, "a whole number, 0 or more")
    return value


def one_of(option: str, value: object, *allowed: object) -> None:
    """Check a choice.

    :raises OptionError: it is none of these
    """
    if value not in allowed:
        raise OptionError(option, value, "one of " + ", ".join(str(each) for each in allowed))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

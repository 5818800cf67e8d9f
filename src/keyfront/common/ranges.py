"""Checks options against their ranges, or reads them from text; an error names all three."""

from __future__ import annotations

import math
import re

from keyfront.errors import OptionError


def above_zero(option: str, value: float) -> float:
    """Return a number of seconds above 0, ``math.inf`` included.

    :param option: the option's name, for the error
    :raises OptionError: it is no number above 0
    """
    if not _is_number(value) or not value > 0:
        raise OptionError(option, value, "a number of seconds above 0")
    return value


def zero_or_more(option: str, value: float) -> float:
    """Return a number of seconds from 0, ``math.inf`` included.

    :param option: the option's name, for the error
    :raises OptionError: it is no number, or below 0
    """
    if not _is_number(value) or not value >= 0:
        raise OptionError(option, value, "a number of seconds, 0 or more")
    return value


def finite(option: str, value: float) -> float:
    """Return a number of seconds above 0 that is not infinite.

    :param option: the option's name, for the error
    :raises OptionError: it is no number above 0, or infinite
    """
    if above_zero(option, value) == math.inf:
        raise OptionError(option, value, "a number of seconds above 0, and finite")
    return value


def sizes(minimum: int, maximum: int, prefix: str = "") -> None:
    """Check a pair of sizes.

    :param prefix: beginning of both options' names
    :raises OptionError: the maximum is below 1, or the minimum negative or above it
    """
    low, high = f"{prefix}min_size", f"{prefix}max_size"
    if not _is_count(maximum) or maximum < 1:
        raise OptionError(high, maximum, "a whole number, 1 or more")
    if not _is_count(minimum) or not 0 <= minimum <= maximum:
        raise OptionError(low, minimum, f"a whole number from 0 to {high} ({maximum})")


def count(option: str, value: int) -> int:
    """Return a whole number from 0.

    :param option: the option's name, for the error
    :raises OptionError: it is no whole number, or below 0
    """
    if not _is_count(value) or value < 0:
        raise OptionError(option, value, "a whole number, 0 or more")
    return value


def whole(option: str, text: str, low: int, high: int, allowed: str = "") -> int:
    """Return the whole number that a text is.

    :param low: the smallest, at least 0
    :param high: the largest, below 10 ** 9
    :param allowed: says what is allowed, in an error; default: the range
    :raises OptionError: it is none, or out of the range
    """
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise OptionError(option, text, allowed or f"a whole number, {low} to {high}")
    return int(text)


def decimal(option: str, text: str, low: float, high: float) -> float:
    """Return the number that a text is, with at most nine digits before and behind the point.

    :param option: the option's name, for the error
    :param low: the smallest number, at least 0
    :param high: the largest number
    :raises OptionError: it is none, or not within ``low`` and ``high``
    """
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not low <= float(text) <= high:
        raise OptionError(option, text, f"a number, {low:g} to {high:g}")
    return float(text)


def limit(option: str, text: str, low: float, high: float, none: str) -> float:
    """Return the seconds that a text is; 0, which is always allowed, switches something off.

    :param option: the option's name, for the error
    :param low: the smallest number besides 0
    :param high: the largest number
    :param none: says what 0 is for, in an error
    :raises OptionError: it is none, or neither 0 nor within ``low`` and ``high``
    """
    try:
        seconds = float(text)
        if seconds == 0 or low <= seconds <= high:
            return seconds
    except ValueError:
        pass
    allowed = f"a number of seconds, {low:g} to {high:g}, or 0 for {none}"
    raise OptionError(option, text, allowed)


def one_of(option: str, value: object, *allowed: object) -> None:
    """Check a choice.

    :param option: the option's name, for the error
    :param allowed: the values that may be chosen
    :raises OptionError: it is none of these
    """
    if value not in allowed:
        raise OptionError(option, value, "one of " + ", ".join(str(each) for each in allowed))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

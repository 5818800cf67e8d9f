"""Values of oslo.config options, from the service's configuration and from sections of paste files.

Which options there are stands beside what reads them: in ``options.py`` of each package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from oslo_config import cfg

from keyfront.errors import OptionError


def values_of(conf: cfg.ConfigOpts, group: str, options: list[cfg.Opt]) -> dict[str, Any]:
    """Return the values of a group of registered options by name.

    :param conf: the service's configuration, loaded
    :raises OptionError: a value is out of its range; names where it was set
    """
    values: dict[str, Any] = {}
    for option in options:
        try:
            values[option.dest] = conf[group][option.dest]
        except ValueError as error:
            # oslo.config tells where the value is and not what it is
            where = re.search(r"detail='([^']*)'", str(error))
            raise _out_of_range(group, option, where[1] if where else "the environment") from None
        if _is_no_value(values[option.dest], option):
            where_set = conf.get_location(option.dest, group).detail
            raise _out_of_range(group, option, where_set)
    return values


def of_paste(
    name: str,
    options: list[cfg.Opt],
    local: Mapping[str, str],
    elsewhere: Mapping[str, str],
    prefix: str = "",
) -> dict[str, Any]:
    """Return the values of those options that the section of a filter sets, by name.

    :param name: the filter's name, for messages
    :param local: the keys and values of the section
    :param elsewhere: the options that may not be set there, each with where it belongs
    :param prefix: the beginning of the options' names in the section
    :raises OptionError: a name is not known, a value is out of its range, or an option may not be
        set there
    """
    known = {option.dest: option for option in options}
    allowed = ", ".join(sorted(prefix + key for key in known.keys() - elsewhere.keys()))
    values: dict[str, Any] = {}
    for written, text in local.items():
        key = written.removeprefix(prefix)
        if key not in known:
            raise OptionError(f"egg:keyfront#{name}", written, f"one of {allowed}")
        option = known[key]
        if option.secret:
            text = "(not shown)"
        if key in elsewhere:
            raise OptionError(f"{name}: {written}", text, elsewhere[key])
        try:
            values[key] = option.type(local[written])
            if _is_no_value(values[key], option):
                raise ValueError(text)
        except ValueError:
            raise OptionError(f"{name}: {written}", text, _allowed(option)) from None
    return values


def _is_no_value(value: object, option: cfg.Opt) -> bool:
    """Return whether a value is ``nan``, which no range keeps out, or empty unlike the default."""
    return value != value or (value is None and option.default is not None)


def _out_of_range(group: str, option: cfg.Opt, where: str) -> OptionError:
    return OptionError(f"[{group}] {option.name}", f"(as set in {where})", _allowed(option))


def _allowed(option: cfg.Opt) -> str:
    if isinstance(option, cfg.BoolOpt):
        return "true or false"
    choices = getattr(option.type, "choices", None)
    if choices:
        return "one of " + ", ".join(choices)
    low, high = getattr(option.type, "min", None), getattr(option.type, "max", None)
    if low is None or high is None:
        return "a list divided by commas" if isinstance(option, cfg.ListOpt) else "text"
    return f"a number from {low} to {high}"

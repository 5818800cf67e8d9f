"""Values of oslo.config options, from the service's configuration and from sections of paste files.

Which options there are stands beside what reads them: in ``options.py`` of each package.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from oslo_config import cfg

from keyfront.errors import OptionError

#: All sections of ours.
SECTIONS = ("keyfront_authtoken", "keyfront_heartbeat", "keyfront_ldap", "keyfront_token_cache")

#: The section of keystonemiddleware, which is beside ours.
STOCK = "keystone_authtoken"


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


def unread(conf: cfg.ConfigOpts, groups: Mapping[str, list[cfg.Opt]]) -> list[str]:
    """Return what the files of a configuration say in sections of ours, or nearly so, and nobody
    reads: each with file and line, and with what may be meant.

    Values are not shown. A file that cannot be read says nothing.

    :param conf: the service's configuration, loaded
    :param groups: sections of ours that this process reads, and their options
    """
    known = {group.lower(): [option.dest for option in groups[group]] for group in groups}
    others = {group.lower() for group in conf} | {"default"}
    stock = list(conf[STOCK]) if STOCK in conf else []
    found = []
    for path in _files(conf):
        section = ""
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            if header := re.match(r"\[([^]]*)\]", line):
                written = header[1]
                section = written.strip().lower()
                if section in others or section in SECTIONS or section.startswith("keystone"):
                    continue
                meant = _nearest(section, SECTIONS)
                if meant or section.startswith("keyfront"):
                    hint = f"did you mean [{meant}]?" if meant else "there is no such section"
                    found.append(f"[{written}] ({path}:{number}), {hint}")
                continue
            option = re.match(r"([^\s#;=:\[][^=:]*?)\s*[=:]", line)
            if option is None:
                continue
            name = option[1]
            if section in known and name not in known[section]:
                meant = _nearest(name.removeprefix("keyfront_"), known[section])
                if not meant and (meant := _nearest(name, stock)):
                    meant += f" in [{STOCK}]"
                hint = f"did you mean {meant}?" if meant else "there is no such option"
                found.append(f"{name} in [{section}] ({path}:{number}), {hint}")
            elif name.startswith("keyfront_") and section not in SECTIONS:
                # as it is written in a paste file
                own = name.removeprefix("keyfront_")
                meant = next((f"[{group}]" for group in known if own in known[group]), "")
                if meant:
                    where = f"{name} in [{section}] ({path}:{number})"
                    found.append(f"{where}, did you mean {own} in {meant}?")
    return found


def _files(conf: cfg.ConfigOpts) -> list[Path]:
    """Return the files that a configuration was read from, in their order."""
    try:
        named, folders = conf.config_file or [], conf.config_dir or []
    except cfg.NoSuchOptError:  # it was never called
        return []
    files = [Path(name) for name in named]
    for folder in folders:
        files += sorted(Path(folder).glob("*.conf"))
    return files


def _nearest(name: str, names: Iterable[str]) -> str:
    """Return the one of some names that was probably meant; empty if none was."""
    found = difflib.get_close_matches(name, names, 1, 0.75)
    return found[0] if found else ""


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

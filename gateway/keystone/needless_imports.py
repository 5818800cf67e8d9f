"""Leaves out what importing Keystone does without need, in processes that keyfront starts.

* pysaml2's XML schemas. Keystone imports pysaml2, because it may be an identity provider, and
  ``saml2.xml.schema`` imports the package xmlschema and builds the schemas of SAML while it is
  imported: a third of the CPU time that loading Keystone takes, in each process. Keystone makes
  assertions and signs them; by a schema it checks nothing. They are built when one is asked for.
* eventlet's resolver. oslo.service imports eventlet, and Keystone that. eventlet's sockets find
  names by dnspython, two hundred modules of it: a tenth of the CPU time, and nothing uses them.
* The list of entry points. Keystone finds its drivers by stevedore, which keeps the list in a file
  of its user's home folder. Where it cannot, as for a service without a home folder that it may
  write to, or finds none for this ``sys.path`` and the times of the folders in it, each process
  that loads Keystone makes the list anew, and stevedore (5.10) goes through all entry points once
  for each of their hundred groups. Here it goes through them once.
* Two warnings about nothing that their reader could change or that happened. eventlet's, eight
  lines whenever it is imported (``EventletDeprecationWarning`` of eventlet 0.40 and later). And
  Keystone's ``Truncating password to algorithm specific maximum length`` (Keystone 30,
  ``keystone.common.password_hashing``) at each hash of any password, however short, as long as
  ``[identity] max_password_length`` is above 72. Where a password is cut off, it says so in another
  line (``Truncating user password``), which stays.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import chain
from types import ModuleType
from typing import Any

_SCHEMAS = "saml2.xml.schema"

_GREENDNS = "EVENTLET_NO_GREENDNS"

# All that the function goes by which is replaced. One that does anything else is left alone.
_GOES_BY = frozenset(
    {
        *("importlib", "metadata", "entry_points", "groups", "set", "select", "name", "value"),
        *("group", "add", "append", "sys", "executable", "prefix"),
    }
)

_EVENTLET = r"\s*Eventlet is deprecated\."
_LOGGER = "keystone.common.password_hashing"
_TRUNCATING = "Truncating password to algorithm specific maximum length"


class SchemaOnDemand:
    """A stand-in for a schema, which builds it when an attribute of it is asked for.

    :param build: a function that returns the schema
    """

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build

    @cached_property
    def _schema(self) -> Any:
        return self._build()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._schema, name)


def build_schemas_on_demand() -> None:
    """Import pysaml2's schemas without xmlschema; to be called before Keystone is imported.

    Modules that are imported already stay as they are; Keystone reports missing ones.
    """
    if _SCHEMAS in sys.modules or importlib.util.find_spec("xmlschema") is None:
        return
    stand_in: Any = ModuleType("xmlschema")
    stand_in.XMLSchema = lambda *given, **options: SchemaOnDemand(partial(_built, given, options))
    stand_in.exceptions = ModuleType("xmlschema.exceptions")
    # What is raised before anything was built is no error of a schema.
    stand_in.exceptions.XMLSchemaException = type("NothingBuilt", (Exception,), {})
    places = {"xmlschema": stand_in, "xmlschema.exceptions": stand_in.exceptions}
    before = {name: sys.modules[name] for name in places if name in sys.modules}
    sys.modules.update(places)
    try:
        with suppress(ImportError):
            module = importlib.import_module(_SCHEMAS)
            # a schema that is asked for later is built at once
            vars(module)["_XMLSchema"] = lambda *given, **options: _built(given, options)
    finally:
        for name in places:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _built(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return a schema, and have pysaml2 know xmlschema's errors from then on."""
    xmlschema: Any = importlib.import_module("xmlschema")
    vars(sys.modules[_SCHEMAS])["_XMLSchemaException"] = xmlschema.exceptions.XMLSchemaException
    return xmlschema.XMLSchema(*given, **options)


@contextmanager
def without_resolver() -> Iterator[None]:
    """Have eventlet's sockets find names by the system's functions if the block imports them.

    What was imported before stays as it is, and so does what the variable says already.
    """
    if _GREENDNS in os.environ:
        yield
        return
    os.environ[_GREENDNS] = "yes"
    try:
        yield
    finally:
        os.environ.pop(_GREENDNS, None)


def list_entry_points_once() -> None:
    """Have stevedore list all entry points in one pass; to be called before Keystone is imported.

    What is not installed is for Keystone to say.
    """
    try:
        cache: Any = importlib.import_module("stevedore._cache")
    except ImportError:
        return
    code = getattr(getattr(cache, "_build_cacheable_data", None), "__code__", None)
    # others have no quadratic loop, or something else to find
    if code is not None and "select" in code.co_names and _GOES_BY.issuperset(code.co_names):
        cache._build_cacheable_data = cacheable_data


def cacheable_data() -> dict[str, Any]:
    """Return what stevedore keeps: the entry points by their groups, none of them twice."""
    found: Any = importlib.metadata.entry_points()
    # before Python 3.12 they are by groups already
    every = chain.from_iterable(dict.values(found)) if isinstance(found, dict) else found
    groups: dict[str, dict[tuple[str, str, str], None]] = {}
    for each in every:
        groups.setdefault(each.group, {})[each.name, each.value, each.group] = None
    return {
        "groups": {name: list(members) for name, members in groups.items()},
        "sys.executable": sys.executable,
        "sys.prefix": sys.prefix,
        "path_values": [],
    }


def leave_out_warnings() -> None:
    """Keep both warnings out of this process's log; to be called before Keystone is imported."""
    warnings.filterwarnings("ignore", message=_EVENTLET)
    logger = logging.getLogger(_LOGGER)
    if is_needed not in logger.filters:
        logger.addFilter(is_needed)


def is_needed(record: logging.LogRecord) -> bool:
    """Return whether a log record is none of these warnings."""
    return not str(record.msg).startswith(_TRUNCATING)

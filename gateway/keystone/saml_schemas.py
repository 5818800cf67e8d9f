"""pysaml2's XML schemas, built only when a document is checked by them.

Keystone imports pysaml2, because it may be an identity provider, and ``saml2.xml.schema`` imports
the package xmlschema and builds the schemas of SAML while it is imported: a third of the CPU time
that loading Keystone takes, in each process. Keystone makes assertions and signs them; by a schema
it checks nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from types import ModuleType
from typing import Any

_MODULE = "saml2.xml.schema"


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


def build_on_demand() -> None:
    """Import pysaml2's schemas without xmlschema; to be called before Keystone is imported.

    Modules that are imported already stay as they are; Keystone reports missing ones.
    """
    if _MODULE in sys.modules or importlib.util.find_spec("xmlschema") is None:
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
            module = importlib.import_module(_MODULE)
            # a schema that is asked for later is built at once
            vars(module)["_XMLSchema"] = lambda *given, **options: _built(given, options)
    finally:
        for name in places:
            sys.modules.pop(name, None)
        sys.modules.update(before)


def _built(given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return a schema, and have pysaml2 know xmlschema's errors from then on."""
    xmlschema: Any = importlib.import_module("xmlschema")
    vars(sys.modules[_MODULE])["_XMLSchemaException"] = xmlschema.exceptions.XMLSchemaException
    return xmlschema.XMLSchema(*given, **options)

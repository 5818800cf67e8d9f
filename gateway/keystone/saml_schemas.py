"""pysaml2's XML schemas, built only when a document is checked by them.

Keystone imports pysaml2, because it may be an identity provider, and ``saml2.xml.schema`` builds
the schemas of SAML while it is imported: a third of the CPU time that loading Keystone takes, in
each process. Keystone makes assertions and signs them; by a schema it checks nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
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
    """Import pysaml2's schemas without building them; to be called before Keystone is imported.

    Modules that are imported already stay as they are; Keystone reports missing ones.
    """
    if _MODULE in sys.modules:
        return
    with suppress(ImportError):
        xmlschema: Any = importlib.import_module("xmlschema")
        eager = xmlschema.XMLSchema
        xmlschema.XMLSchema = lambda *given, **options: SchemaOnDemand(
            partial(eager, *given, **options)
        )
        try:
            module = importlib.import_module(_MODULE)
        finally:
            xmlschema.XMLSchema = eager
        # a schema that is asked for later is built at once
        vars(module)["_XMLSchema"] = eager

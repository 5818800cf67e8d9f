"""pysaml2's schemas: built when a document is checked, and then as strict as ever."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("saml2") is None, reason="pysaml2 is not installed"
)

# In processes of their own: here, Keystone may be imported already.
CHECK = """
import sys
import xmlschema
eager = xmlschema.XMLSchema
built = []

class Counted(eager):
    def __init__(self, *given, **options):
        built.append(given)
        super().__init__(*given, **options)

xmlschema.XMLSchema = Counted
from keyfront.gateway.keystone import needless_imports
needless_imports.build_schemas_on_demand()
needless_imports.build_schemas_on_demand()
assert xmlschema.XMLSchema is Counted

from saml2 import samlp
from saml2.xml import schema
assert not built
good = str(samlp.AuthnRequest(id="a", version="2.0", issue_instant="2026-01-01T00:00:00Z"))
schema.validate(good)
# with those that it names
count = len(built)
assert count
for _ in range(2):
    try:
        schema.validate(good.replace("2026-01-01T00:00:00Z", "yesterday"))
    except schema.XMLSchemaError as error:
        assert "yesterday" in str(error)
    else:
        raise AssertionError("it is not checked")
assert len(built) == count
assert schema._XMLSchemaException is xmlschema.exceptions.XMLSchemaException
# one that is asked for by itself is no other than xmlschema's
empty = '<xs:schema xmlns:xs="http://www.w3.org/2001/XMLSchema"/>'
assert type(schema._XMLSchema(empty)) is Counted
"""

LOADED = """
import sys
import warnings
warnings.simplefilter("ignore")
from keyfront.gateway.keystone import application
from keyfront.gateway.keystone.needless_imports import SchemaOnDemand
try:
    application.app_factory({}, config_files=sys.argv.pop())
except Exception as error:
    assert "no such" in str(error), error
from saml2.xml import schema
assert isinstance(schema._schema_validator_default, SchemaOnDemand)
loaded = {"xmlschema", "elementpath", "dns"} & set(sys.modules)
assert not loaded, loaded
"""

EAGER = """
from saml2.xml import schema
before = schema._schema_validator_default
from keyfront.gateway.keystone import needless_imports
needless_imports.build_schemas_on_demand()
assert schema._schema_validator_default is before
"""


def run(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_they_are_built_once_and_when_a_document_is_checked() -> None:
    run(CHECK)


def test_what_was_imported_before_stays() -> None:
    run(EAGER)


@pytest.mark.skipif(importlib.util.find_spec("keystone") is None, reason="no Keystone")
def test_loading_keystone_builds_none(tmp_path: Path) -> None:
    """And imports nothing of what would be left out for it, eventlet's resolver among that."""
    run(LOADED, str(tmp_path / "no such.conf"))


def test_without_pysaml2_nothing_happens() -> None:
    for missing in ("xmlschema", "saml2"):
        run(
            f"import sys; sys.modules[{missing!r}] = None\n"
            "from keyfront.gateway.keystone import needless_imports\n"
            "needless_imports.build_schemas_on_demand()\n"
        )

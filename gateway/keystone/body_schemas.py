"""Validation of request bodies by their schemas, with what is plainly right accepted at once.

For each body Keystone makes a validator of its schema anew, a class of its own included; the
schemas are constants of modules. And jsonschema makes an object for each part of a body, and a
generator for each keyword. Most bodies are right, and most schemas say little: of which types the
parts are, and which of them have to be there. That is looked at here. What is not accepted so is
validated as ever, and refused in the same words.
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
from collections.abc import Callable
from types import NoneType
from typing import Any, Final

from .needed_interfaces import incompatible

LOG = logging.getLogger(__name__)

# The names that all drafts of JSON Schema have for types; numbers are left to the drafts.
_TYPES: Final[dict[type, str]] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    NoneType: "null",
}
_NAMES: Final = tuple(_TYPES.values())


def conforms(schema: Any, value: Any) -> bool:
    """Return true only if each draft of JSON Schema since the fourth accepts a value.

    :param schema: the schema; the keywords ``type``, ``properties``, ``required`` and ``items`` are
        known, and one with others accepts nothing here
    :param value: the value, as JSON was parsed
    """
    kind = type(value)
    name = _TYPES.get(kind)
    if name is None or type(schema) is not dict:
        return False
    for keyword, wanted in schema.items():
        if keyword == "type":
            if wanted != name and not (
                type(wanted) is list and name in wanted and all(one in _NAMES for one in wanted)
            ):
                return False
        elif keyword == "properties":
            if type(wanted) is not dict:
                return False
            if kind is dict:
                for one, inner in wanted.items():
                    if one in value and not conforms(inner, value[one]):
                        return False
        elif keyword == "required":
            if type(wanted) is not list:
                return False
            if kind is dict and not all(one in value for one in wanted):
                return False
        elif keyword == "items":
            if type(wanted) is not dict:
                return False
            if kind is list and not all(conforms(wanted, one) for one in value):
                return False
        else:
            return False
    return True


# All names that the method of Keystone's validators uses.
_VALIDATES = frozenset(
    {
        *("validator", "validate", "jsonschema", "ValidationError", "path", "join", "map", "str"),
        *("message", "_", "exception", "SchemaValidationError"),
    }
)
_KEYWORDS = ("type", "properties", "required", "items")


def _accepting_at_once(validator: Any, schema: Any) -> Any:
    """Make a validator of Keystone's accept at once what plainly conforms to its schema.

    :param validator: the validator; one that does not look as expected is left as it is
    :param schema: its schema
    """
    kind: Any = type(validator)
    if not _is_plain(kind):
        return validator
    validate: Callable[..., None] = validator.validate

    @functools.wraps(validate)
    def validate_at_once(*values: Any, **named: Any) -> None:
        if len(values) == 1 and not named and conforms(schema, values[0]):
            return
        validate(*values, **named)

    validator.validate = validate_at_once
    return validator


@functools.lru_cache(maxsize=8)
def _is_plain(kind: Any) -> bool:
    """Return whether validators of Keystone's are jsonschema's, with its own types and keywords."""
    jsonschema = importlib.import_module("jsonschema")
    drafts = (
        *(jsonschema.Draft4Validator, jsonschema.Draft6Validator, jsonschema.Draft7Validator),
        *(jsonschema.Draft201909Validator, jsonschema.Draft202012Validator),
    )
    draft: Any = getattr(kind, "validator_org", None)
    code = getattr(getattr(kind, "validate", None), "__code__", None)
    plain = draft in drafts and code is not None and _VALIDATES.issuperset(code.co_names)
    if plain:
        made: object = getattr(kind({}), "validator", None)
        functions = getattr(made, "VALIDATORS", {})
        plain = getattr(made, "TYPE_CHECKER", None) == draft.TYPE_CHECKER and all(
            functions.get(one) is draft.VALIDATORS[one] for one in _KEYWORDS
        )
    if not plain:
        LOG.debug("%s does not look as expected: all bodies are validated by it", kind)
    return plain


# Validators that are kept; with one more all are dropped, as some schemas are of one request only.
_SCHEMAS = 256


def keep_validators(validation: Any) -> None:
    """Make Keystone build the validator of each schema once.

    :param validation: the module ``keystone.common.validation``
    :raises IncompatibleError: it has no class of validators
    """
    module: Any = getattr(validation, "validators", None)
    make = getattr(module, "SchemaValidator", None)
    if not callable(make):
        raise incompatible("keystone.common.validation has no validators.SchemaValidator")
    if hasattr(make, "keyfront"):
        return
    # By the object, which is held here so that no other takes its place. What is changed further
    # in is seen by the validator, whose schema it is; for other keywords it is made anew.
    kept: dict[int, tuple[Any, Any, Any]] = {}

    @functools.wraps(make, updated=())
    def schema_validator(schema: Any) -> Any:
        found = kept.get(id(schema))
        if found is None or found[1] != schema:
            if len(kept) >= _SCHEMAS:
                kept.clear()
            made = _accepting_at_once(make(schema), schema)
            found = kept[id(schema)] = (schema, copy.copy(schema), made)
        return found[2]

    schema_validator.keyfront = True  # type: ignore[attr-defined]
    module.SchemaValidator = schema_validator

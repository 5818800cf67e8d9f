"""Request bodies that are accepted at once: each of them is one that jsonschema accepts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("keystone")

import jsonschema as _jsonschema
from keystone import exception
from keystone.auth.schema import token_issue
from keystone.common.validation import validators as keystone_validators

from keyfront.errors import IncompatibleError
from keyfront.gateway.keystone import body_schemas
from keyfront.gateway.keystone.body_schemas import conforms

jsonschema: Any = _jsonschema

DRAFTS = (
    *(jsonschema.Draft4Validator, jsonschema.Draft6Validator, jsonschema.Draft7Validator),
    *(jsonschema.Draft201909Validator, jsonschema.Draft202012Validator),
)
_SCOPES: dict[str, Any] = {
    "project": {"project": {"id": "p"}},
    "project by name": {"project": {"name": "p", "domain": {"id": "default"}}},
    "domain": {"domain": {"name": "d"}},
    "trust": {"OS-TRUST:trust": {"id": "t"}},
    "unscoped": "unscoped",
}
_IDENTITIES: dict[str, Any] = {
    "password": {
        "methods": ["password"],
        "password": {"user": {"name": "a", "domain": {"id": "default"}, "password": "secret"}},
    },
    "password by id": {"methods": ["password"], "password": {"user": {"id": "a", "password": ""}}},
    "token": {"methods": ["token"], "token": {"id": "gAAA"}},
}
BODIES: list[dict[str, Any]] = [
    {"identity": identity, **({"scope": scope} if scope else {})}
    for identity in _IDENTITIES.values()
    for scope in (None, *_SCOPES.values())
]

names = st.sampled_from(["a", "b", "id", "methods"])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner)),
    max_leaves=8,
)
types = st.sampled_from(["object", "array", "string", "boolean", "null", "number", "integer"])


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    known = {
        "type": st.one_of(types, st.lists(types, min_size=1, unique=True)),
        "properties": st.dictionaries(names, inner),
        "required": st.lists(names, unique=True),
        "items": inner,
    }
    others = {
        "enum": st.lists(values, min_size=1, max_size=3),
        "minLength": st.integers(0, 3),
        "additionalProperties": st.booleans(),
        "not": inner,
        "pattern": st.just("^a"),
    }
    plain = st.fixed_dictionaries({}, optional=known)
    return st.one_of(plain, plain, st.fixed_dictionaries({}, optional={**known, **others}))


schemas = st.recursive(st.just({}), _schemas, max_leaves=6)


@given(schema=schemas, value=values)
@settings(max_examples=500, deadline=None)
def test_what_conforms_is_accepted_by_each_draft(schema: Any, value: Any) -> None:
    if conforms(schema, value):
        assert all(draft(schema).is_valid(value) for draft in DRAFTS)


@st.composite
def near_bodies(draw: st.DrawFn) -> Any:
    """Draw a body of a login with one part of it replaced, added or left out."""
    body: Any = {"body": copy.deepcopy(draw(st.sampled_from(BODIES)))}
    parts: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in list(value if isinstance(value, dict) else range(len(value))):
            parts.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(body)
    holder, key = draw(st.sampled_from(parts))
    if draw(st.booleans()) or key == "body":
        holder[key] = draw(values)
    else:
        del holder[key]
    return body["body"]


@given(body=near_bodies())
@settings(max_examples=500, deadline=None)
def test_what_conforms_to_the_schema_of_logins_is_accepted(body: Any) -> None:
    if conforms(token_issue, body):
        assert all(draft(token_issue).is_valid(body) for draft in DRAFTS)


@pytest.mark.parametrize("body", BODIES)
def test_a_login_is_accepted_at_once(body: Any) -> None:
    assert conforms(token_issue, body)


class _Text(str):
    pass


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "number"}, 1),
        ({"type": ["number", "string"]}, "a"),
        ({"type": ["string", {}]}, "a"),
        ({"type": "string"}, _Text("a")),
        ({"type": "integer"}, True),
        ({"required": True}, {}),
        ({"items": [{"type": "string"}]}, []),
        ({"items": {"type": "string"}}, ["a", 1]),
        ({"properties": []}, {}),
        ({"properties": {"a": True}}, {"a": 1}),
        ({"type": "string", "maxLength": 1}, "a"),
        (True, "a"),
    ],
)
def test_what_is_not_sure_is_left_to_jsonschema(schema: Any, value: Any) -> None:
    assert not conforms(schema, value)


@pytest.fixture
def validation() -> Iterator[Any]:
    """Keystone's module of validators, with its own class."""
    own: Any = keystone_validators.SchemaValidator
    own = getattr(own, "__wrapped__", own)
    body_schemas._is_plain.cache_clear()
    yield SimpleNamespace(validators=SimpleNamespace(SchemaValidator=own))
    body_schemas._is_plain.cache_clear()


def test_jsonschema_is_not_asked_of_a_login(
    validation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body_schemas.keep_validators(validation)
    validator = validation.validators.SchemaValidator(token_issue)
    asked: list[Any] = []
    validate = validator.validator.validate
    own = SimpleNamespace(validate=lambda value: (asked.append(value), validate(value)))
    monkeypatch.setattr(validator, "validator", own)
    validator.validate(BODIES[0])
    assert asked == []
    with pytest.raises(exception.SchemaValidationError, match="'identity' is a required property"):
        validator.validate({})
    assert asked == [{}]


def test_a_schema_that_is_changed_is_looked_at_anew(validation: Any) -> None:
    body_schemas.keep_validators(validation)
    schema: dict[str, Any] = {"type": "object"}
    validation.validators.SchemaValidator(schema).validate({})
    schema["required"] = ["id"]
    with pytest.raises(exception.SchemaValidationError):
        validation.validators.SchemaValidator(schema).validate({})


@pytest.mark.parametrize("different", ["keyword", "type", "method", "draft"])
def test_validators_that_look_different_are_asked_themselves(
    validation: Any, caplog: pytest.LogCaptureFixture, different: str
) -> None:
    caplog.set_level(logging.DEBUG)

    def refuse(*_: object) -> Iterator[Any]:
        yield jsonschema.ValidationError("never")

    class Other(validation.validators.SchemaValidator):  # type: ignore[misc, name-defined]
        if different == "draft":
            validator_org = jsonschema.Draft3Validator

        def __init__(self, schema: Any) -> None:
            super().__init__(schema)
            given: dict[str, Any] = {}
            if different == "keyword":
                given["validators"] = {"type": refuse}
            elif different == "type":
                types = jsonschema.Draft202012Validator.TYPE_CHECKER
                given["type_checker"] = types.redefine("object", lambda *_: False)
            kind = jsonschema.validators.extend(type(self.validator), **given)
            self.validator = kind(schema)

        if different == "method":

            def validate(self, *values: Any, **named: Any) -> None:
                raise exception.SchemaValidationError(detail=self.reason(values))

            def reason(self, values: Any) -> str:
                return f"{values} are refused"

    validation.validators.SchemaValidator = Other
    body_schemas.keep_validators(validation)
    validator = validation.validators.SchemaValidator({"type": "object"})
    if different != "draft":
        with pytest.raises(exception.SchemaValidationError):
            validator.validate({})
    assert "validate" not in vars(validator)
    assert "does not look as expected" in caplog.text


def test_a_validator_is_made_once_for_a_schema() -> None:
    made = []

    def make(schema: Any) -> Any:
        made.append(schema)
        return SimpleNamespace(schema=schema)

    validation = SimpleNamespace(validators=SimpleNamespace(SchemaValidator=make))
    body_schemas.keep_validators(validation)
    kept = validation.validators.SchemaValidator
    body_schemas.keep_validators(validation)
    assert validation.validators.SchemaValidator is kept
    schema, equal = {"type": "object"}, {"type": "object"}
    assert kept(schema) is kept(schema)
    assert kept(equal).schema is equal
    assert len(made) == 2
    for number in range(1000):
        kept({"maximum": number})
    # each of those was asked for by its own object, whatever its address
    assert len(made) == 1002
    assert [kept({"maximum": n}).schema for n in range(3)] == [{"maximum": n} for n in range(3)]


def test_a_keystone_without_validators_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="no validators"):
        body_schemas.keep_validators(SimpleNamespace())

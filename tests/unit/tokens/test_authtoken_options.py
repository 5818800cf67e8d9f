"""Where authtoken's options come from, and what it says of those that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oslo_config import cfg
from paste.deploy import loadapp

from keyfront.errors import OptionError
from keyfront.middleware.tokens import options
from keyfront.middleware.tokens.authtoken import middleware as authtoken
from keyfront.middleware.tokens.coordinator.redis.coordinator import Redis
from keyfront.options import list_opts
from support.authtoken_world import Epochs, World, configuration, environ

NAME = authtoken.__name__

PASTE = """\
[pipeline:main]
pipeline = authtoken service

[filter:authtoken]
{name}
auth_type = admin_token
endpoint = http://keystone.example/v3
token = secret
auth_version = v3
www_authenticate_uri = http://keystone.example
delay_auth_decision = true
keyfront_memory = 3

[app:service]
paste.app_factory = support.authtoken_world:app_factory
"""


def test_defaults() -> None:
    found = options.authtoken(configuration())
    own = {"memory": 64, "negative_ttl": 5.0, "revalidate": 1.0, "flight_timeout": 5.0}
    assert {name: found[name] for name in own} == own
    assert found["coordinator"] is None
    assert found.keys() - own.keys() == {option.dest for option in options.COORDINATOR}


def test_they_are_listed() -> None:
    assert dict(list_opts())[options.AUTHTOKEN_GROUP] is options.AUTHTOKEN


def test_the_service_s_configuration_and_the_paste_section(tmp_path: Path) -> None:
    text = "[keyfront_authtoken]\nmemory = 2\nrevalidate = 7\n[keystone_authtoken]\n"
    world = World(conf=configuration(tmp_path, text + "token_cache_time = 9\n"))
    found = world.middleware.validations
    assert (found.refused.limit, found._revalidate, found.cache_time) == ((2 << 20) // 8, 7.0, 9)
    world.close()
    world = World(conf=configuration(tmp_path, text), keyfront_memory="4")
    found = world.middleware.validations
    assert (found.refused.limit, found._revalidate) == ((4 << 20) // 8, 7.0)
    world.close()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("memory", "0", "a number from 1 to 65536"),
        ("memory", "x", "a number from 1 to 65536"),
        ("revalidate", "0.01", "a number from 0.1 to 60.0"),
        ("revalidate", "61", "a number from 0.1 to 60.0"),
        ("revalidate", "nan", "a number from 0.1 to 60.0"),
        ("negative_ttl", "-1", "a number from 0.0 to 3600.0"),
        ("flight_timeout", "100", "a number from 0.0 to 60.0"),
        ("consistency", "eventual", "one of strict, lease"),
        ("lease", "2", "a number from 0.1 to 1.0"),
    ],
)
def test_a_value_out_of_its_range(tmp_path: Path, name: str, value: str, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        World(**{f"keyfront_{name}": value})
    assert str(caught.value) == f"authtoken: keyfront_{name} = {value}: must be {allowed}"
    conf = configuration(tmp_path, f"[keyfront_authtoken]\n{name} = {value}\n")
    with pytest.raises(OptionError) as caught:
        World(conf=conf)
    assert str(caught.value).startswith(f"[keyfront_authtoken] {name} = (as set in {tmp_path}")
    assert str(caught.value).endswith(f"must be {allowed}")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {},
            "Keystone at http://keystone.example/v3 validates; a validation is used for 1 s, and "
            "on if Keystone says that it stands, at most 300 s; a refusal for 5 s; 64 MiB",
        ),
        (
            {
                "keyfront_coordinator": "redis://reader:opensesame@127.0.0.1:1/0",
                # not as a URL has to spell them
                "endpoint": "http://nova:/@://opensesame@keystone.example/v3",
            },
            "Keystone at http://keystone.example/v3 validates; a validation is used while Redis at "
            "redis://127.0.0.1:1/0 (prefix keyfront:, strict) says that it stands, at most 300 s; "
            "a refusal for 5 s; 64 MiB",
        ),
        (
            {"token_cache_time": "-1"},
            "Keystone at http://keystone.example/v3 validates; a validation is used once, with "
            "token_cache_time = -1; a refusal for 5 s; 64 MiB",
        ),
    ],
)
def test_it_says_by_what_it_goes(
    section: dict[str, str], expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", NAME):
        world = World(**section)
    assert [one.message for one in caplog.records if one.name == NAME] == [f"authtoken: {expected}"]
    assert "opensesame" not in caplog.text
    if world.middleware.validations.coordinator:
        world.middleware.validations.coordinator.close()
    world.close()


@pytest.mark.parametrize(
    ("text", "section", "expected"),
    [
        (
            "[keyfront_autotoken]\nmemory = 3\n[keyfront_authtoken]\nmemry = 3\n",
            {"revalidate": "3"},
            "nothing reads revalidate in the filter's section, did you mean keyfront_revalidate?; "
            "[keyfront_autotoken] (FILE:1), did you mean [keyfront_authtoken]?; "
            "memry in [keyfront_authtoken] (FILE:4), did you mean memory?",
        ),
        ("", {"auth_type": None}, "authtoken: Keystone cannot be asked: auth_type is not set"),
        (
            "",
            {"endpoint": "keystone.example/v3"},
            "authtoken: Keystone cannot be asked: its URL has no http:// or https://",
        ),
    ],
)
def test_it_warns_once_of_what_is_misspelt_or_missing(
    text: str,
    section: dict[str, Any],
    expected: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(conf=configuration(tmp_path, text), **section)
    (found,) = [one.message for one in caplog.records if one.name == NAME]
    assert found.replace(str(tmp_path / "service.conf"), "FILE") == expected
    world.close()


def test_an_unknown_option() -> None:
    with pytest.raises(OptionError, match="keyfront_ttl: must be one of keyfront_consistency"):
        World(keyfront_ttl="3")


def test_a_coordinator_is_for_reading_and_connects_to_nothing_yet() -> None:
    url = "redis://reader:secret@127.0.0.1:1/0"
    world = World(keyfront_coordinator=url, keyfront_consistency="lease")
    coordinator = world.middleware.validations.coordinator
    assert type(coordinator) is Redis
    assert coordinator._create is False
    coordinator.close()
    world.close()


def test_a_password_is_in_no_error() -> None:
    with pytest.raises(OptionError) as caught:
        World(keyfront_coordinator="http://user:opensesame@host")
    assert "opensesame" not in str(caught.value)


def test_outside_of_oslo_configs_own_object() -> None:
    """Each pipeline its own, as with ``oslo_config_config`` and ``oslo_config_project``."""
    first, second = World(), World(coordinator=Epochs())
    assert first.middleware.validations is not second.middleware.validations
    assert options.AUTHTOKEN_GROUP not in cfg.CONF
    first.close()
    second.close()


@pytest.mark.parametrize(
    "name",
    [
        "paste.filter_factory = keyfront.middleware.tokens.authtoken:filter_factory",
        "use = egg:keyfront#authtoken",
    ],
)
def test_in_a_paste_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "api-paste.ini"
    path.write_text(PASTE.format(name=name))
    cfg.CONF([], project="service", default_config_files=[], default_config_dirs=[])
    try:
        application = loadapp(f"config:{path}")
    finally:
        cfg.CONF.reset()
    assert type(application) is authtoken.AuthProtocol
    assert application.validations.refused.limit == (3 << 20) // 8
    answers: list[Any] = []
    body = application(environ(None), lambda *arguments: answers.append(arguments))
    assert b"".join(body) == b"ok" and answers[0][0] == "200 OK"
    application._session.session.close()

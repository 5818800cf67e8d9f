"""The options of the token cache: from keystone.conf, and from a paste section on top."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oslo_config import cfg

from keyfront.errors import OptionError
from keyfront.middleware.tokens import options
from keyfront.middleware.tokens.options import SHARED, TOKEN_CACHE, TOKEN_CACHE_GROUP
from keyfront.options import list_opts


def conf(folder: Path, text: str = "") -> cfg.ConfigOpts:
    path = folder / "keystone.conf"
    path.write_text(f"[{TOKEN_CACHE_GROUP}]\n{text}\n")
    made = cfg.ConfigOpts()
    made(args=[], default_config_files=[str(path)])
    return made


def refusal(made: cfg.ConfigOpts, local: dict[str, str] | None = None) -> str:
    with pytest.raises(OptionError) as caught:
        options.token_cache(made, local)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults(tmp_path: Path) -> None:
    assert options.token_cache(conf(tmp_path)) == {
        "path": None,
        "ttl": 30.0,
        "negative_ttl": 5.0,
        "memory": 64,
        "node_memory": 32,
        "flight_timeout": 5.0,
        "first_validations": True,
        "reuse": True,
        "routes": ["/v3/projects", "/v3/users/{id}", "/v3/role_assignments"],
        "settle": 0.0,
        "commit_timeout": 300.0,
        "coordinator": None,
        "coordinator_prefix": "keyfront:",
        "coordinator_timeout": 0.5,
        "coordinator_sentinel_master": None,
        "coordinator_sentinel_user": None,
        "coordinator_sentinel_password": None,
        "coordinator_ca_file": None,
        "coordinator_cert_file": None,
        "coordinator_key_file": None,
        "consistency": "strict",
        "lease": 1.0,
        "on_loss": "refuse",
    }


def test_values_of_the_file(tmp_path: Path) -> None:
    text = "ttl = 60\npath = /run/x\nroutes = /v3/projects, /v3/users/{id}\nnode_memory=8"
    values = options.token_cache(conf(tmp_path, text))
    assert values["ttl"] == 60.0
    assert values["path"] == "/run/x"
    assert values["routes"] == ["/v3/projects", "/v3/users/{id}"]
    assert values["node_memory"] == 8


def test_no_routes(tmp_path: Path) -> None:
    assert options.token_cache(conf(tmp_path, "routes ="))["routes"] == []


def test_a_paste_section_wins(tmp_path: Path) -> None:
    local = {"ttl": "7.5", "routes": "/v3/auth/catalog,/v3/projects", "memory": "2"}
    values = options.token_cache(conf(tmp_path, "ttl = 60"), local)
    assert values["ttl"] == 7.5
    assert values["routes"] == ["/v3/auth/catalog", "/v3/projects"]
    assert values["memory"] == 2
    assert values["negative_ttl"] == 5.0


def test_it_may_be_asked_for_twice(tmp_path: Path) -> None:
    made = conf(tmp_path)
    assert options.token_cache(made, {"ttl": "1"})["ttl"] == 1.0
    assert options.token_cache(made)["ttl"] == 30.0


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("ttl", "0", "a number from 0.01 to 3600.0"),
        ("ttl", "3601", "a number from 0.01 to 3600.0"),
        ("ttl", "soon", "a number from 0.01 to 3600.0"),
        ("negative_ttl", "-1", "a number from 0.0 to 3600.0"),
        ("memory", "0", "a number from 1 to 65536"),
        ("memory", "1.5", "a number from 1 to 65536"),
        ("flight_timeout", "61", "a number from 0.0 to 60.0"),
    ],
)
def test_a_value_out_of_range(tmp_path: Path, name: str, value: str, allowed: str) -> None:
    assert refusal(conf(tmp_path), {name: value}) == (
        f"token_cache: {name} = {value}: must be {allowed}"
    )
    message = refusal(conf(tmp_path, f"{name} = {value}"))
    assert message.startswith(f"[{TOKEN_CACHE_GROUP}] {name} = ")
    assert "keystone.conf" in message



@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["ttl", "negative_ttl", "flight_timeout"])
def test_what_is_no_number_of_seconds_is_refused(tmp_path: Path, name: str, value: str) -> None:
    refusal(conf(tmp_path), {name: value})
    refusal(conf(tmp_path, f"{name} = {value}"))


def test_an_unknown_option_names_the_known_ones(tmp_path: Path) -> None:
    message = refusal(conf(tmp_path), {"tll": "3"})
    assert message.startswith("egg:keyfront#token_cache = tll: must be one of ")
    assert "negative_ttl" in message


@pytest.mark.parametrize("name", sorted(SHARED))
def test_what_all_processes_share_is_not_set_in_a_paste_file(tmp_path: Path, name: str) -> None:
    message = refusal(conf(tmp_path), {name: "5"})
    secret = next(option.secret for option in TOKEN_CACHE if option.dest == name)
    assert f"token_cache: {name} = {'(not shown)' if secret else 5}:" in message
    assert TOKEN_CACHE_GROUP in message


def test_every_option_is_listed_and_says_its_unit() -> None:
    listed = dict(list_opts())[TOKEN_CACHE_GROUP]
    assert listed == TOKEN_CACHE
    assert {option.dest for option in listed} >= SHARED
    for option in listed:
        assert option.help and option.help.endswith("."), option.name
        if isinstance(option, (cfg.FloatOpt, cfg.IntOpt)):
            assert re.match(r"(Seconds|MiB)\b", option.help), option.name
            assert option.type.min is not None and option.type.max is not None

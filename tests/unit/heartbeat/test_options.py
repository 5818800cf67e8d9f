"""The options of the heartbeat: from the service's configuration, and from a paste section."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("oslo_config")

from oslo_config import cfg

from keyfront.errors import OptionError
from keyfront.gateway.heartbeat import options
from keyfront.gateway.heartbeat.options import HEARTBEAT, HEARTBEAT_GROUP
from keyfront.middleware.tokens import options as tokens
from keyfront.options import list_opts


def conf(folder: Path, text: str = "") -> cfg.ConfigOpts:
    path = folder / "nova.conf"
    path.write_text(f"[{HEARTBEAT_GROUP}]\n{text}\n")
    made = cfg.ConfigOpts()
    made(args=[], default_config_files=[str(path)])
    return made


def refusal(made: cfg.ConfigOpts, local: dict[str, str] | None = None) -> str:
    with pytest.raises(OptionError) as caught:
        options.heartbeat(made, local)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults(tmp_path: Path) -> None:
    defaults = {"enabled": False, "interval": None, "path": None}
    assert options.heartbeat(conf(tmp_path)) == defaults
    assert options.heartbeat(cfg.ConfigOpts()) == defaults  # nothing loaded it


def test_values_of_the_file(tmp_path: Path) -> None:
    made = conf(tmp_path, "enabled = true\ninterval = 7.5\npath = /run/x")
    assert options.heartbeat(made) == {"enabled": True, "interval": 7.5, "path": "/run/x"}


def test_a_paste_section_wins(tmp_path: Path) -> None:
    made = conf(tmp_path, "interval = 7.5\npath = /run/x")
    values = options.heartbeat(made, {"interval": " 2 "})
    assert values == {"enabled": False, "interval": 2.0, "path": "/run/x"}
    assert options.heartbeat(made)["interval"] == 7.5


def test_left_empty_is_the_default(tmp_path: Path) -> None:
    values = options.heartbeat(conf(tmp_path, "interval =\npath ="))
    assert (values["interval"], values["path"]) == (None, None)
    values = options.heartbeat(conf(tmp_path), {"interval": "", "path": ""})
    assert (values["interval"], values["path"]) == (None, None)


@pytest.mark.parametrize("value", ["0", "-1", "0.09", "3600.5", "inf", "nan", "soon", "1s"])
def test_an_interval_out_of_range(tmp_path: Path, value: str) -> None:
    allowed = "must be a number from 0.1 to 3600.0"
    assert refusal(conf(tmp_path), {"interval": value}) == (
        f"heartbeat: interval = {value}: {allowed}"
    )
    message = refusal(conf(tmp_path, f"interval = {value}"))
    assert message.startswith(f"[{HEARTBEAT_GROUP}] interval = ")
    assert str(tmp_path / "nova.conf") in message
    assert allowed in message


@pytest.mark.parametrize("value", ["0.1", "3600"])
def test_the_ends_of_the_range(tmp_path: Path, value: str) -> None:
    assert options.heartbeat(conf(tmp_path, f"interval = {value}"))["interval"] == float(value)


def test_enabled_is_no_word_for_a_filter(tmp_path: Path) -> None:
    for value in ("true", "false", ""):
        message = refusal(conf(tmp_path), {"enabled": value})
        assert message.startswith(f"heartbeat: enabled = {value}")
        assert f"[{HEARTBEAT_GROUP}]" in message
    assert "true or false" in refusal(conf(tmp_path, "enabled = perhaps"))


def test_a_name_it_does_not_know(tmp_path: Path) -> None:
    message = refusal(conf(tmp_path), {"intervall": "3"})
    assert message == "egg:keyfront#heartbeat = intervall: must be one of interval, path"


def test_it_is_listed_for_the_generator() -> None:
    assert dict(list_opts())[HEARTBEAT_GROUP] is HEARTBEAT
    told = {option.name: option.help for option in HEARTBEAT}
    assert "Seconds" in told["interval"]
    assert "half" in told["interval"]
    assert None not in told.values()


@pytest.mark.parametrize("where", ["paste", "file"])
def test_a_number_left_empty_where_there_must_be_one(tmp_path: Path, where: str) -> None:
    made = cfg.ConfigOpts()
    path = tmp_path / "keystone.conf"
    path.write_text("[keyfront_token_cache]\n" + ("ttl =\n" if where == "file" else ""))
    made(args=[], default_config_files=[str(path)])
    with pytest.raises(OptionError, match="a number from"):
        tokens.token_cache(made, {"ttl": ""} if where == "paste" else None)

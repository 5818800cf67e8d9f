"""Options that a configuration sets and nobody reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from oslo_config import cfg

from keyfront.common.options import SECTIONS, unread
from keyfront.middleware.tokens import options
from keyfront.options import list_opts

OURS = {options.AUTHTOKEN_GROUP: options.AUTHTOKEN}


def said(folder: Path, text: str) -> list[str]:
    """What is said of a file, without its path."""
    path = folder / "service.conf"
    path.write_text(text)
    conf = cfg.ConfigOpts()
    stock = [cfg.StrOpt("auth_url"), cfg.ListOpt("memcached_servers")]
    conf.register_opts(stock, group="keystone_authtoken")
    conf([], default_config_files=[str(path)], default_config_dirs=[])
    return [one.replace(f"{path}:", "") for one in unread(conf, OURS)]


def test_all_sections_are_known() -> None:
    assert sorted(SECTIONS) == sorted(group for group, _ in list_opts())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[keyfront_authtoken]\nmemory = 3\n", ""),
        (
            "[keyfront_authtoken]\nmemry = 3\n",
            "memry in [keyfront_authtoken] (2), did you mean memory?",
        ),
        (
            "# one\n\n[keyfront_authtoken]\n# two\ncoordinatr : redis://u:secret@h\n",
            "coordinatr in [keyfront_authtoken] (5), did you mean coordinator?",
        ),
        (
            "[keyfront_authtoken]\nkeyfront_memory = 3\n",
            "keyfront_memory in [keyfront_authtoken] (2), did you mean memory?",
        ),
        (
            "[keyfront_authtoken]\nmemcached_server = h\n",
            "memcached_server in [keyfront_authtoken] (2), did you mean memcached_servers in "
            "[keystone_authtoken]?",
        ),
        (
            "[keyfront_authtoken]\nzzz = h\n",
            "zzz in [keyfront_authtoken] (2), there is no such option",
        ),
        (
            "[keystone_authtoken]\nauth_url = x\nkeyfront_memory = 3\n",
            "keyfront_memory in [keystone_authtoken] (3), did you mean memory in "
            "[keyfront_authtoken]?",
        ),
        (
            "[keyfront_autotoken]\nmemory = 3\n",
            "[keyfront_autotoken] (1), did you mean [keyfront_authtoken]?",
        ),
        ("[keyfrontauthtoken]\n", "[keyfrontauthtoken] (1), did you mean [keyfront_authtoken]?"),
        ("[keyfront_zzz]\nx = 1\n", "[keyfront_zzz] (1), there is no such section"),
        # oslo.config takes any case of a section, but no dash for what is an underscore
        (
            "[Keyfront_Authtoken]\nmemory = 4\nnegative-ttl = 3\n",
            "negative-ttl in [keyfront_authtoken] (3), did you mean negative_ttl?",
        ),
        # another process reads these
        ("[keyfront_token_cache]\nanything = 1\n[keystone_ldap]\nx = 1\n[cache]\nmemry = 1\n", ""),
        # a value of several lines
        ("[keyfront_authtoken]\ncoordinator = a\n  memry = 3\n", ""),
    ],
)
def test_what_is_said(tmp_path: Path, text: str, expected: str) -> None:
    assert said(tmp_path, text) == [expected] * bool(expected)


def test_folders_are_read_as_well(tmp_path: Path) -> None:
    conf = cfg.ConfigOpts()
    (tmp_path / "10.conf").write_text("[keyfront_authtoken]\nmemry = 3\n")
    conf([], default_config_files=[], default_config_dirs=[str(tmp_path)])
    assert unread(conf, OURS) == [
        f"memry in [keyfront_authtoken] ({tmp_path}/10.conf:2), did you mean memory?"
    ]


def test_without_files_nothing_is_said() -> None:
    assert unread(cfg.ConfigOpts(), OURS) == []

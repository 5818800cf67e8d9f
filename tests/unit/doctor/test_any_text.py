"""Whatever stands in the files: no check and no reader fails, and nothing is thrown at the user."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from keyfront.gateway.doctor import fix_plan, report
from keyfront.gateway.doctor.diagnosis import diagnose
from keyfront.gateway.doctor.found import Found
from support.doctor.cases import CASES
from support.doctor.deployments import CLEAN, LDAP_GALERA
from support.doctor.machines import Machine

_ROUNDS = int(os.environ.get("KEYFRONT_TEST_ROUNDS", "2"))
_FAULT = "fault of keyfront"
_NONE = ("/etc/keystone/fernet-keys/",)


def _whole() -> Machine:
    """LDAP and Galera with all kinds of files that are only read."""
    machine = LDAP_GALERA
    for code in ("S01", "S02", "M01", "M02", "M04", "D02", "R01", "R02"):
        for path, text in CASES[code][0].files.items():
            if path not in machine.files:
                machine = machine.put(path, text)
    return machine


_MACHINES = {**CLEAN, "whole": _whole()}
_PIECES = [
    *"=\"'{}[]<>;\\:#\0",
    *("%(", "$(", "@(", "::", "unix:", "on", "0", "-1", "9" * 20, "1e9", "\u00e9", "://", "a b c"),
]


def damaged(text: str, chance: random.Random) -> str:
    """A text with some lines cut, emptied, doubled or filled with what nobody writes."""
    lines = text.splitlines() or [""]
    for _ in range(4):
        number = chance.randrange(len(lines))
        words = lines[number].split()
        how = chance.randrange(7)
        if how == 0:
            lines[number] = words[0] if words else ""
        elif how == 1:
            lines[number] = " ".join(words[:2])
        elif how == 2:
            lines[number] = lines[number][: chance.randrange(len(lines[number]) + 1)]
        elif how == 3:
            lines[number] = lines[number].replace("=", f"={chance.choice(_PIECES)}")
        elif how == 4:
            at = chance.randrange(len(lines[number]) + 1)
            lines[number] = lines[number][:at] + chance.choice(_PIECES) + lines[number][at:]
        elif how == 5:
            lines.insert(number, lines[number])
        elif words:
            words[-1] = chance.choice(_PIECES)
            lines[number] = " ".join(words)
    return "\n".join(lines) + "\n"


def faults(found: Found) -> list[str]:
    made = diagnose(found)
    report.text(made, found)
    report.as_json(made, found)
    fix_plan.words(found)
    return [x.why for x in made.unread if _FAULT in x.why]


@pytest.mark.parametrize("seed", range(_ROUNDS))
@pytest.mark.parametrize("name", _MACHINES)
def test_damaged_files(name: str, seed: int, tmp_path: Path) -> None:
    machine = _MACHINES[name]
    chance = random.Random(f"{name} {seed}")
    paths = [x for x, text in machine.files.items() if text and not x.startswith(_NONE)]
    for path in chance.sample(sorted(paths), min(3, len(paths))):
        machine = machine.put(path, damaged(machine.files[path], chance))
    assert faults(machine.found(tmp_path)) == []


#: A machine, a file of it, what is written there: each once ended the doctor with a traceback.
_HTTPD = "/etc/httpd/conf.d/10-keystone_wsgi.conf"
_SITE, _BACKEND = "/etc/nginx/sites-enabled/keystone", "/etc/haproxy/services.d/keystone.cfg"
ONCE = [
    ("rdo-puppet", _HTTPD, "WSGIDaemonProcess\nLoadModule\n"),
    ("rdo-puppet", _HTTPD, "WSGIScriptAlias\nProxyPass\nListen\n"),
    ("kolla", "/etc/haproxy/haproxy.cfg", "global\n stats socket /x mode\ndefaults\n timeout\n"),
    ("kolla", _BACKEND, "frontend\n bind\n server\nbackend\n server a\n"),
    ("debian-nginx", _SITE, "server { location / { uwsgi_pass; } }\n"),
    ("debian-nginx", "/etc/nginx/nginx.conf", "http { upstream { server; } listen; }\n"),
]


@pytest.mark.parametrize(("name", "path", "text"), ONCE)
def test_directives_without_words(name: str, path: str, text: str, tmp_path: Path) -> None:
    assert faults(CLEAN[name].put(path, text).found(tmp_path)) == []


def test_a_check_that_fails_is_named_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keyfront.gateway.doctor.registry import CHECKS

    def fails(found: Found):  # type: ignore[no-untyped-def]
        raise IndexError("hunter2")
        yield

    monkeypatch.setitem(CHECKS, "U05", replace(CHECKS["U05"], function=fails))
    made = CLEAN["kolla"].diagnosis(tmp_path)
    said = [x for x in made.unread if x.what.startswith("U05")]
    assert [x.why for x in said] == [
        "it could not be made, which is a fault of keyfront: IndexError at test_any_text.py:"
        f"{fails.__code__.co_firstlineno + 1}"
    ]
    assert len(made.right) > 20

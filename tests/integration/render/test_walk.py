"""docs/deploy.md, line by line as it stands there, from step 1 to a login, for each line-up.

What is not of this machine's own in a root that is thrown away stands in ``support/clean_root.py``:
packages and pip are not tried (``test_debian`` and ``test_packaging`` do), nor systemd itself; its
units are read, and their commands run as their users.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import deploy_document
from support.clean_root import Done, run

SERVERS = ("nginx+uwsgi", "apache+uwsgi", "mod_wsgi", "prefork+mod_wsgi", "nginx+uwsgi-tcp")
# Ends what the line-up before has started, and removes what only it has.
BETWEEN = (
    "for pid in /run/keyfront-*.pid /run/nginx.service.pid /run/nginx.pid; do"
    " [ -e $pid ] && kill $(cat $pid) 2>/dev/null; rm -f $pid; done;"
    " timeout 300 bash -c 'while pgrep -r R,S,D -x \"uwsgi|nginx|apache2\"; do sleep 0.1; done' &&"
    " rm -rf /etc/keyfront /etc/systemd/system/keyfront-* /run/keyfront"
)


def lines() -> list[str]:
    """All that is run, in order: one line-up after the other, on one Keystone."""
    step = deploy_document.another(SERVERS[0])
    found = [deploy_document.named(), *(step[number] for number in range(1, 11))]
    for server in SERVERS[1:]:
        former, step = step, deploy_document.another(server)
        found.append(BETWEEN)
        if step[2] != former[2]:
            found.append(step[2].replace("python3 -m venv /opt/keyfront && ", ""))
        found += [step[4], step[5], step[9], deploy_document.READY, step[10]]
    return [line.replace("/opt/keyfront/bin/pip ", "keyfront-pip ") for line in found]


@pytest.mark.slow
def test_every_line_does_what_the_document_says(tmp_path: Path) -> None:
    done = run(lines(), tmp_path)
    for one in done:
        assert one.status == 0, f"{one.line}\n{one.output}"
    assert len(done) == len(lines())
    logins = [one for one in done if one.line.startswith("curl")]
    assert len(logins) == len(SERVERS)
    for one in logins:
        _assert_login(one)


def _assert_login(one: Done) -> None:
    assert re.search(r"^HTTP/\S+ 201", one.output), one.output
    assert re.search(r"^x-subject-token: \S+", one.output, re.IGNORECASE | re.MULTILINE), one.output

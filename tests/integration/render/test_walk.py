"""docs/deploy.md, line by line as it stands there, from step 1 to a login, for three line-ups.

What is not of this machine's own in a root that is thrown away stands in ``support/clean_root.py``:
packages and pip are not tried, nor systemd itself; its units are read, and their commands run as
their users.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.clean_root import NAME, Done, run

DOCUMENT = (Path(__file__).parents[3] / "docs/deploy.md").read_text(encoding="utf-8")
SERVERS = ("nginx+uwsgi", "apache+uwsgi", "mod_wsgi")
# Ends what the line-up before has started, and removes what only it has.
BETWEEN = (
    "for pid in /run/keyfront-*.pid /run/nginx.service.pid /run/nginx.pid; do"
    " [ -e $pid ] && kill $(cat $pid) 2>/dev/null; rm -f $pid; done;"
    " timeout 60 bash -c 'while pgrep -r R,S,D -x \"uwsgi|nginx|apache2\"; do sleep 0.1; done' &&"
    " rm -rf /etc/keyfront /etc/systemd/system/keyfront-* /run/keyfront"
)
# Apache is there before its daemons have loaded Keystone.
READY = (
    "export NAME; timeout 90 bash -c 'until curl -fsS --cacert /etc/keyfront/tls/keyfront.crt -o"
    " /dev/null https://$NAME:5000/v3; do sleep 0.2; done' 2>/dev/null"
)


def steps() -> dict[int, str]:
    """The command of each numbered step."""
    found = {}
    text = DOCUMENT[: DOCUMENT.index("\n## Then")]
    for part in re.split(r"^(?=\*\*\d+\. )", text, flags=re.MULTILINE)[1:]:
        number = int(part[2:].partition(".")[0])
        lines = [line[4:] for line in part.splitlines() if line.startswith("    ")]
        found[number] = "\n".join(lines)
    return found


def another(server: str) -> tuple[str, str]:
    """What the table of other servers has for one: its requirement, if any, and its start."""
    table = DOCUMENT[DOCUMENT.index("| `--server` |") :]
    row = next(line for line in table.splitlines() if line.startswith(f"| `{server}`"))
    _, _, packages, start, _ = row.split("|")
    requirement = re.search(r"pip install ('[^']+')", packages)
    return requirement[1] if requirement else "", start.strip().strip("`")


def lines() -> list[str]:
    """All that is run, in order: one line-up after the other, on one Keystone."""
    step = steps()
    (named,) = re.findall(r"^    (NAME=.+)$", DOCUMENT, re.MULTILINE)
    assert named == f"NAME={NAME}"
    assert list(step) == list(range(1, 11))
    found = [named, *(step[number] for number in range(1, 11))]
    for server in SERVERS[1:]:
        requirement, start = another(server)
        found.append(BETWEEN)
        if requirement:
            own = re.sub(r"'keyfront\[.*?\]'", requirement, step[2])
            found.append(own.replace("python3 -m venv /opt/keyfront && ", ""))
        found += [f"{step[4]} --server {server}", step[5], start, READY, step[10]]
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

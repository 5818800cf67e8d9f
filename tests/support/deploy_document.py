"""The command lines of docs/deploy.md, by step and line-up."""

from __future__ import annotations

import re
from pathlib import Path

from keyfront.gateway.render import lineups
from support.clean_root import NAME

TEXT = (Path(__file__).parents[2] / "docs/deploy.md").read_text(encoding="utf-8")
#: Those that the document leads to.
SERVERS = tuple(name for name in lineups.SERVERS if name != "uwsgi")
#: That of the numbered steps.
FIRST = "nginx+uwsgi"
# Apache is there before its daemons have loaded Keystone.
READY = (
    "export NAME; timeout 300 bash -c 'until curl -fsS --cacert /etc/keyfront/tls/keyfront.crt -o"
    " /dev/null https://$NAME:5000/v3; do sleep 0.2; done' 2>/dev/null"
)


def named() -> str:
    """Return the line that chooses the name."""
    (line,) = re.findall(r"^    (NAME=.+)$", TEXT, re.MULTILINE)
    assert line == f"NAME={NAME}"
    return str(line)


def steps() -> dict[int, str]:
    """Return the command of each numbered step."""
    found = {}
    text = TEXT[: TEXT.index("\n## Then")]
    for part in re.split(r"^(?=\*\*\d+\. )", text, flags=re.MULTILINE)[1:]:
        number = int(part[2:].partition(".")[0])
        lines = [line[4:] for line in part.splitlines() if line.startswith("    ")]
        found[number] = "\n".join(lines)
    assert list(found) == list(range(1, 11))
    return found


def another(server: str) -> dict[int, str]:
    """Return the steps of a line-up, as the table of other servers changes them."""
    step = steps()
    if server == FIRST:
        return step
    table = TEXT[TEXT.index("| `--server` |") :]
    row = next(line for line in table.splitlines() if f"`{server}`" in line.split("|")[1])
    _, _, packages, start, _ = row.split("|")
    instead = re.search(r"`([^`]+)` instead of `nginx`", packages)
    if instead:
        step[1] = step[1].replace(" nginx ", f" {instead[1]} ")
    requirement = re.search(r"pip install ('[^']+')", packages)
    if requirement:
        step[2] = re.sub(r"'keyfront\[.*?\]'", requirement[1], step[2])
    step[4] += f" --server {server}"
    if start.strip() != "as above":
        step[9] = start.strip().strip("`")
    return step


def walk(server: str) -> tuple[list[str], list[str]]:
    """Return all lines from the first to the login: those that fetch packages, and the others."""
    step = another(server)
    return [named(), step[1], step[2]], [
        named(), *(step[number] for number in range(3, 10)), READY, step[10],
    ]  # fmt: skip

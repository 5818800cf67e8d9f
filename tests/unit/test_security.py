"""The promises of SECURITY.md: each has a test, and those that had none have theirs here."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from keyfront.cli import main as cli
from keyfront.cli.parser import Parser
from keyfront.gateway.render import certificates

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
# Longer than what a hash or a number of the file could be by chance.
CALLER, SUBJECT = "gAAAAABcaller-of-the-cache", "gAAAAABsubject-of-the-cache"


@cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_each_promise_has_tests_and_they_exist() -> None:
    part = DOCUMENT.split("\n## Promises\n")[1].split("\n## ")[0]
    promises = re.findall(r"^- (.*?)(?=^- |^#|\Z)", part, re.MULTILINE | re.DOTALL)
    assert len(promises) > 30
    for promise in promises:
        named = TEST.findall(promise)
        assert named and len(named) == promise.count("::"), promise
        for path, name in named:
            assert (ROOT / path).is_file(), path
            assert name in names_in(path), (path, name)


def test_what_the_token_cache_leaves_in_its_folder(tmp_path: Path) -> None:
    """Every file of a node that has answered, refused, changed and answered by another worker."""
    pytest.importorskip("sqlalchemy")
    from keyfront.middleware.tokens.directory_leases import leases as process_leases
    from support.token_worlds import World, model

    folder = tmp_path / "cache"
    before = os.umask(0)
    try:
        world = World(folder)
        assert process_leases.make(folder) is not None
        world.keystone.known |= {CALLER: model("caller"), SUBJECT: model("subject")}
        for worker in (world.cache, world.worker()):
            assert world.get(CALLER, SUBJECT, by=worker)[1]["X-Subject-Token"] == SUBJECT
            world.get(CALLER, "junk", by=worker)
        world.change("user:user-subject")
        assert world.get(CALLER, SUBJECT)[2] == f"body of {SUBJECT}".encode()
    finally:
        os.umask(before)
        process_leases.leases = None
    assert world.counts["node_hits"] > 0, "nothing was shared"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= 4
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        content = path.read_bytes()
        for token in (CALLER, SUBJECT):
            assert token.encode() not in content, path
    # What would show a token shows that there is an answer.
    assert any(b"body of " in path.read_bytes() for path in files)


def options_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from options_of(one)


@pytest.mark.parametrize("name", cli._COMMANDS)
def test_no_command_takes_a_secret_as_an_argument(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser(prog=name)
    importlib.import_module(f"keyfront.cli.{name}").add_arguments(parser)
    for action in options_of(parser):
        for option in action.option_strings:
            if re.search(r"passw|passphrase|secret|token$|private|credential", option) is None:
                continue
            if not option.endswith("-file"):
                # It is there to be refused.
                with pytest.raises(SystemExit):
                    action(parser, argparse.Namespace(), "hush-hush", option)
                told = capsys.readouterr().err
                assert "refused" in told and "hush-hush" not in told, option


def test_titles_of_processes_are_not_made_of_requests() -> None:
    """uWSGI's and mod_wsgi's are constants of the rendered files; nothing of ours sets another."""
    trees = [ROOT / name for name in ("src", "gateway", "middleware")]
    for path in (path for tree in trees for path in tree.rglob("*.py")):
        assert not re.search(r"setproctitle|PR_SET_NAME", path.read_text(encoding="utf-8")), path
    template = (ROOT / "deploy/production/uwsgi.ini.j2").read_text(encoding="utf-8")
    titles = re.findall(r"^(?:auto-)?procname.*$", template, re.MULTILINE)
    assert titles and not any("$" in title or "{{" in title for title in titles), titles


def test_the_key_of_a_pair_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        certificates.make(tmp_path, "localhost")
    finally:
        os.umask(before)
    _, key = certificates.paths(tmp_path)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600

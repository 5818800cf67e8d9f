"""Which node is drained, and for what a drain waits."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from keyfront.cli import drain as command
from keyfront.cli.parser import Parser
from keyfront.errors import KeyfrontError, OptionError, ServerError
from keyfront.gateway.node import drain
from keyfront.gateway.node.counters import NodeCounts, count_requests
from keyfront.gateway.serve.state import State, default_path


class Time:
    """Passes only in sleeps, in which something may happen."""

    def __init__(self, happens: Callable[[float], object] = lambda now: None) -> None:
        self.now = 0.0
        self._happens = happens

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._happens(self.now)


@pytest.fixture
def counts(tmp_path: Path) -> NodeCounts:
    made = NodeCounts()
    made.share(tmp_path)
    made.begin()
    return made


def _run(*words: str) -> tuple[int, str, str]:
    parser = Parser()
    command.add_arguments(parser)
    out, err = io.StringIO(), io.StringIO()
    return command.run(parser.parse_args(words), out, err), out.getvalue(), err.getvalue()


def _wait(folder: Path, time: Time, *, notice: float = 4.0, timeout: float = 60.0) -> int:
    found = drain.wait(folder, notice=notice, timeout=timeout, clock=time.clock, sleep=time.sleep)
    return found.under_way


def test_waits_until_balancers_have_noticed(tmp_path: Path, counts: NodeCounts) -> None:
    time = Time()
    assert _wait(tmp_path, time) == 0
    assert 4.0 <= time.now < 5.0


def test_waits_until_nothing_comes_any_more(tmp_path: Path, counts: NodeCounts) -> None:
    application = count_requests(lambda *_: [], counts)
    time = Time(lambda now: application({}, lambda *_: None) if now < 20 else None)
    assert _wait(tmp_path, time) == 0
    assert 20.9 <= time.now < 22.0


def test_waits_for_what_runs_and_no_longer_than_it_may(
    tmp_path: Path, counts: NodeCounts
) -> None:
    answer = count_requests(lambda *_: iter(()), counts)({}, lambda *_: None)
    time = Time()
    assert _wait(tmp_path, time) == 1
    assert 60.0 <= time.now < 61.0
    answer.close()  # type: ignore[attr-defined]
    assert _wait(tmp_path, Time()) == 0


def test_the_command(tmp_path: Path, counts: NodeCounts) -> None:
    where = ("--node", str(tmp_path))
    quick = ("--notice", "0", "--timeout", "0")
    status, _, err = _run(*where, *quick)
    # nothing has come for a second only after a second
    assert (status, err) == (0, "")
    assert drain.is_draining(tmp_path)
    answer = count_requests(lambda *_: iter(()), counts)({}, lambda *_: None)
    status, _, err = _run(*where, *quick)
    assert status == 1
    assert "1 request(s) still run" in err
    answer.close()  # type: ignore[attr-defined]
    assert _run(*where, "--undo")[:2] == (0, f"{tmp_path}: ready again\n")
    assert not drain.is_draining(tmp_path)
    assert _run(*where, "--undo")[1] == f"{tmp_path}: was not draining\n"


def test_an_interrupted_drain_goes_on(
    tmp_path: Path, counts: NodeCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drain, "wait", interrupted)
    status, _, err = _run("--node", str(tmp_path))
    assert status == 130
    assert "goes on draining" in err and "--undo" in err
    assert drain.is_draining(tmp_path)


def test_nothing_to_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ini = tmp_path / "uwsgi.ini"
    ini.write_text(f"[uwsgi]\nenv = KEYFRONT_NODE={tmp_path}/none\n")
    assert _run(str(ini))[:2] == (0, f"{tmp_path}/none: nothing runs\n")
    assert _run(str(ini), "--undo")[:2] == (0, f"{tmp_path}/none: was not draining\n")
    for words in (("--node", str(tmp_path / "none")), ("--state", str(tmp_path / "none"))):
        for undo in ((), ("--undo",)):  # misspelt: it is drained nowhere, or goes on draining
            with pytest.raises(ServerError, match="there is no such folder"):
                _run(*words, *undo)
    monkeypatch.setattr(command, "nodes", list)
    with pytest.raises(ServerError, match="KEYFRONT_NODE"):
        _run()
    monkeypatch.setattr(command, "nodes", lambda: [tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ServerError, match="several"):
        _run()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no server has counted there"):
        _run("--node", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_node_of_keyfront_serve(tmp_path: Path) -> None:
    node = State(tmp_path).node
    node.mkdir(parents=True)
    made = NodeCounts()
    made.share(node)
    assert _run("--state", str(tmp_path))[:2] == (0, f"{node}: draining\nno worker runs\n")
    assert drain.is_draining(node)


def test_who_names_no_node_means_the_usual_ones_else_that_of_keyfront_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEYFRONT_NODE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(command, "_USUAL", str(tmp_path / "keyfront*/node"))
    with pytest.raises(ServerError, match="--state"):
        _run()
    served = State(default_path()).node
    served.mkdir(parents=True)
    NodeCounts().share(served)
    assert command.nodes() == [served]
    usual = tmp_path / "keyfront/node"
    usual.mkdir(parents=True)
    assert command.nodes() == [usual]
    monkeypatch.setenv("KEYFRONT_NODE", str(tmp_path))
    assert command.nodes() == [tmp_path]


def test_a_link_is_not_followed(tmp_path: Path, counts: NodeCounts) -> None:
    """The folder is the service's, and root drains: it must not be led to write elsewhere."""
    (tmp_path / "draining").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ServerError, match="cannot be drained"):
        drain.begin(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("option", ("--timeout", "--notice"))
@pytest.mark.parametrize("value", ("-1", "nan", "soon", "1e9"))
def test_errors_name_the_option(option: str, value: str) -> None:
    with pytest.raises(OptionError, match=option):
        _run(f"{option}={value}")


def test_the_node_of_a_file(tmp_path: Path) -> None:
    ini = tmp_path / "uwsgi.ini"
    ini.write_text("[uwsgi]\nenv = KEYFRONT_APP=x\nenv = KEYFRONT_NODE=/run/50%%/node\n")
    assert drain.folder_of(ini) == Path("/run/50%/node")
    conf, script = tmp_path / "apache.conf", tmp_path / "keyfront.wsgi"
    conf.write_text(f'WSGIScriptAlias / "{script}" process-group=keyfront\n')
    script.write_text('os.environ.setdefault("KEYFRONT_NODE", "/run/keyfront/node")\n')
    assert drain.folder_of(conf) == Path("/run/keyfront/node")
    script.write_text("")
    ini.write_text("[uwsgi]\n")
    for file in (ini, conf, tmp_path / "missing"):
        with pytest.raises(KeyfrontError, match=file.name):
            drain.folder_of(file)

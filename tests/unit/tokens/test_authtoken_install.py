"""authtoken in services that build their pipeline in code. Each test has a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        env={"PYTHONPATH": str(TESTS)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_imported_later_finds_ours() -> None:
    printed = run("""
        from keyfront.middleware.tokens.authtoken.install import install
        install()
        install()
        from keyfront.middleware.tokens import authtoken
        import keystonemiddleware.auth_token as first
        from keystonemiddleware import auth_token as second
        from keystonemiddleware.auth_token import AuthProtocol, filter_factory, _request
        print(AuthProtocol is first.AuthProtocol is second.AuthProtocol is authtoken.AuthProtocol)
        print(filter_factory is authtoken.filter_factory)

        class Own(AuthProtocol):
            pass

        from support.authtoken_world import World
        world = World(made_by=Own)
        print(world.get().status, world.get().status, world.asked)
        # the rest is keystonemiddleware's, to be patched as ever
        first.probe = 1
        print(second.probe, "probe" in dir(first), first.InvalidToken.__name__)
        del first.probe
        print(hasattr(second, "probe"))
    """)
    assert printed.splitlines() == [
        "True", "True", "200 200 1", "1 True InvalidToken", "False"
    ]  # fmt: skip


def test_too_late_is_an_error() -> None:
    printed = run("""
        import sys
        from types import ModuleType
        import keystonemiddleware.auth_token
        early = sys.modules["early"] = ModuleType("early")
        {line}
        from keyfront.errors import ImportedTooEarlyError
        from keyfront.middleware.tokens.authtoken.install import install
        try:
            install()
        except ImportedTooEarlyError as error:
            print(error)
    """.replace("{line}", "early.factory = keystonemiddleware.auth_token.filter_factory"))
    assert printed == (
        "early was imported before authtoken was put in place of keystonemiddleware's and goes on "
        "without it; call install() first\n"
    )

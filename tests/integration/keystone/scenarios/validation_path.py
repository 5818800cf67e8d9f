"""Print the functions of keyfront that a validation enters while a change is under way, as JSON.

Called as ``python validation_path.py ours user CONFIG_FILE``. The token was validated before;
another process has marked a change of its user, so that Keystone is asked. It is validated twice:
with nothing due that is done twice a second at most, and with all of it due. The monotonic clock of
this process stands still, so that how long anything takes makes no difference.

Of each: ``path``, the functions that the filter calls, and those that are called by them, up to
Keystone; ``hooks``, those that Keystone and its libraries call; and ``crossings``, the calls of the
path from middleware to gateway and back, as ``FILE FUNCTION > FILE FUNCTION``.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import keystone
from keystone_holes import Client

import keyfront

PACKAGE = f"{Path(keyfront.__file__).parent}/"
LIBRARIES = f"{Path(keystone.__file__).parents[1]}/"
TOKENS = "/v3/auth/tokens"
EXTRA = """
[keyfront_token_cache]
path = {path}
"""


class Clock:
    """The monotonic clock of this process, which goes on only when it is told to."""

    def __init__(self) -> None:
        self._now = time.monotonic_ns()
        time.monotonic = lambda: self._now / 1e9  # type: ignore[assignment]
        time.monotonic_ns = lambda: self._now  # type: ignore[assignment]

    def go_on(self, seconds: float) -> None:
        self._now += round(seconds * 1e9)


class Passed:
    """The functions of keyfront that are entered during a call, in this thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.path: dict[str, set[str]] = defaultdict(set)
        self.hooks: dict[str, set[str]] = defaultdict(set)
        self.crossings: set[str] = set()
        gc.collect()
        gc.disable()  # what ends is of former requests
        sys.setprofile(self._note)
        try:
            call()
        finally:
            sys.setprofile(None)
            gc.enable()

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not _is_ours(frame):
            return
        file, function = _name(frame)
        # comprehensions are functions of their own before Python 3.12
        if function in ("<genexpr>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>"):
            function = ""
        callers = []
        caller = frame.f_back
        while caller is not None:
            callers.append(caller)
            caller = caller.f_back
        hook = any(_is_of_a_library(one) for one in callers)
        found = (self.hooks if hook else self.path)[file]
        if function:
            found.add(function)
        before = next((one for one in callers if _is_ours(one)), None)
        if not hook and before is not None:
            ends = {_name(before)[0].split("/")[0], file.split("/")[0]}
            if ends == {"middleware", "gateway"}:
                self.crossings.add(" > ".join((" ".join(_name(before)), f"{file} {function}")))

    def told(self) -> dict[str, Any]:
        path, hooks = (
            {file: sorted(functions) for file, functions in sorted(found.items())}
            for found in (self.path, self.hooks)
        )
        return {"path": path, "hooks": hooks, "crossings": sorted(self.crossings)}


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


def _is_of_a_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(LIBRARIES) and not name.startswith(PACKAGE)


def _name(frame: FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename.removeprefix(PACKAGE), frame.f_code.co_name


def main() -> None:
    """Play it."""
    config, sys.argv[1:] = Path(sys.argv[-1]), []
    own = config.with_name("validation_path.conf")
    own.write_text(config.read_text() + EXTRA.format(path=config.with_name("shared")))

    from keyfront.gateway.keystone.application import app_factory
    from keyfront.middleware.tokens.cache import token_cache
    from keyfront.middleware.tokens.epochs import slots
    from keyfront.middleware.tokens.invalidation.rules import tags

    cache = token_cache(app_factory({}, config_files=str(own)))
    client = Client(cache)
    admin, token = client.login("admin"), client.login("admin")

    def validate() -> Any:
        status, _, body = client("GET", TOKENS, x_auth_token=admin, x_subject_token=token)
        assert status == 200, (status, body)
        return body["token"]

    user = validate()["user"]["id"]
    clock = Clock()
    for _ in range(2):
        clock.go_on(1.0)
        validate()  # all that is due is done now, and the answer is kept
    found: dict[str, Any] = {"hit": Passed(validate).told()}
    changed = tags("user", "update", {"enabled"}, [{"id": user}])
    mark = cache.coordinator.mark(slots(changed, cache.coordinator.slot_count))
    validate()
    clock.go_on(0.2)  # whose mark it is, is looked for ten times a second
    found["miss"] = Passed(validate).told()
    clock.go_on(1.0)
    found["miss, all due"] = Passed(validate).told()
    cache.coordinator.stamp(mark)
    found["miss after it"] = Passed(validate).told()
    found["hit after it"] = Passed(validate).told()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""The files that a validation passes, from memory and while a change of its user is under way.

A newcomer should be able to read each way in one go. What Keystone and its libraries call of us is
counted apart: each of these hooks is read by itself, most of them spare Keystone some work of its
own, and Keystone answers without them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("keystone")

Play = Callable[..., Any]

# Files of a validation that is asked of Keystone; more of them where all that is done twice a
# second is due; and of the hooks in it.
MISS = 12
DUE = 14
HOOKS = 21

# One crossing: the filter calls Keystone's application, which answers as PEP 3333 has it.
CROSSINGS = [
    "gateway/keystone/application.py __call__ > middleware/tokens/cache.py start",
    "middleware/tokens/cache.py _ask > gateway/keystone/application.py __call__",
]


@pytest.fixture(scope="module")
def passed(play: Play) -> Any:
    return play("validation_path", "ours", "user")


def test_an_answer_from_memory(passed: Any) -> None:
    for found in (passed["hit"], passed["hit after it"]):
        assert "middleware/tokens/keys_and_entries.py" in found["path"]
        assert len(found["path"]) <= 4, sorted(found["path"])
        assert not found["hooks"]
        assert not found["crossings"]


@pytest.mark.parametrize(("kind", "most"), [("miss", MISS), ("miss, all due", DUE)])
def test_a_miss_with_a_change_under_way(passed: Any, kind: str, most: int) -> None:
    found = passed[kind]
    assert "recover" in "".join(found["path"]["middleware/tokens/coordinator/local.py"])
    assert "gateway/keystone/application.py" in found["path"]
    assert len(found["path"]) <= most, found["path"]
    assert found["crossings"] == CROSSINGS
    assert "middleware/tokens/invalidation/sqlalchemy_plugin.py" in found["hooks"]
    assert len(found["hooks"]) <= HOOKS, found["hooks"]


def test_a_miss_whose_answer_is_kept(passed: Any) -> None:
    found = passed["miss after it"]
    assert "keep" in found["path"]["middleware/tokens/node_cache.py"]
    assert len(found["path"]) <= MISS, found["path"]
    assert found["crossings"] == CROSSINGS


def test_what_is_looked_at_twice_a_second_was_due(passed: Any) -> None:
    """Else the second count would bound nothing that the first does not."""
    assert not passed["miss"]["path"].keys() >= passed["miss, all due"]["path"].keys()

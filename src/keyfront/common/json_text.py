"""Reads JSON that came from outside: whatever is wrong with it is a ``ValueError``."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    :param text: the text; bytes are UTF-8, UTF-16 or UTF-32
    :raises ValueError: it is no JSON (``json.JSONDecodeError``, which tells the line), no text, or
        nests deeper than Python's recursion limit
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None

"""How a load benchmark ends: its tables, its file, its exit status."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from keyfront.errors import KeyfrontError

from . import goals


def run(
    name: str,
    measure: Callable[[Any], Any],
    settings: Any,
    options: Namespace,
    *,
    report: ModuleType,
    judge: Callable[[Any], Mapping[goals.Goal, str]],
    say: Callable[[str], None],
) -> int:
    """Measure, print and write; 1 if a goal was missed, 2 if it cannot be measured.

    :param measure: called with the settings; returns the samples
    :param options: ``json``, a file to write all to or ``None``, and ``markdown``
    :param report: has ``described``, ``described_in_words``, ``markdown`` and ``table``
    """
    start = time.monotonic()
    try:
        samples = measure(settings)
    except KeyfrontError as error:
        say(f"{name}: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        return 130
    if options.json:
        content = report.described(samples, settings, time.monotonic() - start)
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        print(report.markdown(samples, settings))
    else:
        say(report.described_in_words(settings))
        print(report.table(samples))
    lines = goals.missed(judge(samples))
    for line in lines:
        say(line)
    return 1 if lines else 0

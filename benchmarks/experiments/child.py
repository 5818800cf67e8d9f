"""The process of ``keyfront bench experiment`` that has namespaces of its own."""

from __future__ import annotations

import sys

from . import run_experiments


def _terminate() -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(run_experiments.child(sys.stdin, sys.stdout, terminate=_terminate))

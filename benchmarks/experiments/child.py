"""The process of ``keyfront bench experiment`` that has namespaces of its own."""

from __future__ import annotations

import sys

from . import command


def _terminate() -> None:
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(command.child(sys.stdin, sys.stdout, terminate=_terminate))

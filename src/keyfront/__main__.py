"""``python -m keyfront`` and the ``keyfront`` command."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 -- a copied tree can meet an old interpreter
    sys.stderr.write("keyfront: needs Python 3.11 or later, this is %d.%d\n" % sys.version_info[:2])  # noqa: UP031
    sys.exit(2)

from keyfront.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

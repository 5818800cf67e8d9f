"""eventlet without its resolver, in processes that import it and never use it.

oslo.service imports eventlet, and Keystone that. eventlet's sockets find names by dnspython, two
hundred modules of it: a tenth of the CPU time that loading Keystone takes, in each process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "EVENTLET_NO_GREENDNS"


@contextmanager
def left_out() -> Iterator[None]:
    """Have eventlet's sockets find names by the system's functions if the block imports them.

    What was imported before stays as it is, and so does what the variable says already.
    """
    if _VARIABLE in os.environ:
        yield
        return
    os.environ[_VARIABLE] = "yes"
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)

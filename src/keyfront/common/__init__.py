"""The parts that every layer stands on, each idea once.

:mod:`.counters` (counts in mapped memory), :mod:`.file_lock`, :mod:`.mmap_file`, :mod:`.fork` (what
a child must not share), :mod:`.process` (whether another one lives), :mod:`.machine` (cores, memory
and the kernel's limits), :mod:`.programs` (servers installed on this machine), :mod:`.ranges` (of
options), :mod:`.options` (values of oslo.config and of paste files), :mod:`.json_text` (what others
wrote), :mod:`.templates` (Jinja), :mod:`.request_phases` (where a request's time goes),
:mod:`.late_requests` (which came too late for their turn), :mod:`.unix_sockets` (in folders of long
paths), :mod:`.interpreter` (what monkey patching replaces). Each is imported by itself: some need a
library that others do without.
"""

__all__ = [
    "condition",
    "counters",
    "file_lock",
    "fork",
    "interpreter",
    "json_text",
    "late_requests",
    "machine",
    "mmap_file",
    "options",
    "poller",
    "process",
    "programs",
    "ranges",
    "request_phases",
    "signals",
    "templates",
    "unix_sockets",
]

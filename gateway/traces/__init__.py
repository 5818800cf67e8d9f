"""Traces of requests by OpenTelemetry: spans for front, token cache, directory and Keystone.

Off unless ``KEYFRONT_TRACES = on``. :mod:`.installation` is what entrypoints use, and imports
nothing of OpenTelemetry's before that is known; :mod:`.spans` makes the spans, and hides what is
a client's in a path; :mod:`.export` sends them.
"""

__all__ = ["export", "installation", "spans"]

"""Measurements of keyfront: each prints the figure that README or docs cites.

What is needed and not installed is a ``MissingPartError``, which names the command that installs
it; a server or program that does not start, ends, or answers otherwise than it should is a
``ServerError``, which says why. Functions tell of these only where there is more to say.
"""

__all__ = ["gate"]

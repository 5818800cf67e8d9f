"""The ``keyfront`` command: one file a command."""

__all__ = ["main"]

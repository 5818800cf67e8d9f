"""The ``keyfront`` command: one file a command."""

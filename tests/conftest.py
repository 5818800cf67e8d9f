"""What holds for all tests."""

from __future__ import annotations

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass  # the documents are tested without it
else:
    # How long an example takes is the machine's affair: beside others some take a second.
    settings.register_profile("unhurried", deadline=None)
    settings.load_profile("unhurried")
    # For a second Python: the same properties, looked at less often.
    settings.register_profile("brief", deadline=None, max_examples=20)

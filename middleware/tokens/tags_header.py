"""The response header by which Keystone's token cache tells services what an answer depends on.

A service that validates a token asks for it with a request header of the same name. Keystone's
cache then says of each answer how long it stands: the epoch it is from and the slots it depends on
(``GENERATION.SEQUENCE.SLOT,SLOT,…``, the generation in hexadecimal), so that the service can go by
the same epoch table; or ``none``, where the cache itself would not give the answer again. Behind a
Keystone without the cache there is no such header.
"""

from __future__ import annotations

import re

from .epochs import Epoch, Slots

#: The header's name, in requests and in answers.
NAME = "X-Keyfront-Epochs"

#: The same in a WSGI environment.
ENVIRON_KEY = "HTTP_X_KEYFRONT_EPOCHS"

#: What a request says to be told.
ASK = "1"

#: Of an answer that Keystone's cache does not keep.
NONE = "none"

# An answer depends on some twenty slots; a table has at most 2**24 (8 digits) of them, and numbers
# are of 64 bits.
_LONGEST = 4096
_FORM = re.compile(r"([0-9a-f]{1,16})\.([0-9]{1,19})\.([0-9]{1,8}(?:,[0-9]{1,8})*)", re.ASCII)


def compose(epoch: Epoch, slots: Slots) -> str:
    """Return the header's value for an answer."""
    return f"{epoch[0]:x}.{epoch[1]}.{','.join(map(str, slots))}"


def parse(value: str) -> tuple[Epoch, Slots] | None:
    """Return what an answer stands by; ``None`` of :data:`NONE` and whatever was not composed."""
    found = _FORM.fullmatch(value) if len(value) <= _LONGEST else None
    if found is None:
        return None
    generation, sequence, numbers = found.groups()
    return Epoch(int(generation, 16), int(sequence)), Slots(map(int, numbers.split(",")))

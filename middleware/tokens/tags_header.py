"""The response header in which Keystone's token cache tells services what an answer depends on.

A service that validates a token asks for it with a request header of the same name. Keystone's
cache then says of each answer how long it stands: the epoch it is from, the slots it depends on,
when it ends, and which table that is (``GENERATION.SEQUENCE.SLOT,SLOT,….SECONDS.DIGEST``, the
generation and :data:`~.epochs.DIGEST` in hexadecimal, the seconds in Unix time), so that the
service can check it with the same epoch table; or ``none``, where the cache itself would not give
the answer again. Behind a Keystone without the cache there is no such header.

A service that asks in the first form, ``1``, is not told the end, and takes that of the token.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from .epochs import DIGEST, Epoch, Slots

#: The header's name, in requests and in answers.
NAME = "X-Keyfront-Epochs"

#: The same in a WSGI environment.
ENVIRON_KEY = "HTTP_X_KEYFRONT_EPOCHS"

#: The header's value in a request.
ASK = "2"

#: The header's value for an answer that Keystone's cache does not keep.
NONE = "none"

# An answer depends on some twenty slots; a table has at most 2**24 (8 digits) of them, and numbers
# are of 64 bits.
_LONGEST = 4096
_FORM = re.compile(
    r"([0-9a-f]{1,16})\.([0-9]{1,19})\.([0-9]{1,8}(?:,[0-9]{1,8})*)"
    r"(?:\.([0-9]{1,12}|never)\.([0-9a-f]{12}))?",
    re.ASCII,
)
_NEVER = "never"


class Told(NamedTuple):
    """The parts of the header: the epoch and slots that an answer stands by, and its end."""

    epoch: Epoch
    slots: Slots
    #: Unix time of its end, infinite if it has none; ``None`` if that was not told.
    expires: float | None
    #: The digest in the table's name; empty if that was not told.
    digest: str


def compose(asked: str, epoch: Epoch, slots: Slots, expires: float) -> str:
    """Return the header's value for an answer.

    :param asked: the header's value in the request
    :param epoch: the epoch that the answer is from
    :param slots: the slots that it depends on
    :param expires: Unix time of the answer's end, or infinite
    """
    value = f"{epoch[0]:x}.{epoch[1]}.{','.join(map(str, slots))}"
    if asked != ASK:
        return value
    return f"{value}.{_NEVER if math.isinf(expires) else int(expires)}.{DIGEST}"


def parse(value: str) -> Told | None:
    """Return the parts of the header; ``None`` for :data:`NONE` and for any other text.

    :param value: the header's value in an answer
    """
    found = _FORM.fullmatch(value) if len(value) <= _LONGEST else None
    if found is None:
        return None
    generation, sequence, numbers, end, digest = found.groups()
    expires = None if end is None else math.inf if end == _NEVER else float(end)
    slots = Slots(map(int, numbers.split(",")))
    return Told(Epoch(int(generation, 16), int(sequence)), slots, expires, digest or "")

"""Filters for two warnings of Keystone's libraries, in processes that keyfront starts.

Each is about nothing that its reader could change or that happened:

* eventlet's, eight lines whenever it is imported (``EventletDeprecationWarning`` of eventlet 0.40
  and later). oslo.service imports it, and Keystone that, whether or not anything uses it.
* Keystone's ``Truncating password to algorithm specific maximum length`` (Keystone 30,
  ``keystone.common.password_hashing``) at each hash of any password, however short, as long as
  ``[identity] max_password_length`` is above 72. Where a password is cut off, it says so in another
  line (``Truncating user password``), which stays.
"""

from __future__ import annotations

import logging
import warnings

_EVENTLET = r"\s*Eventlet is deprecated\."
_LOGGER = "keystone.common.password_hashing"
_TRUNCATING = "Truncating password to algorithm specific maximum length"


def leave_out() -> None:
    """Keep these warnings out of this process's log; to be called before Keystone is imported."""
    warnings.filterwarnings("ignore", message=_EVENTLET)
    logger = logging.getLogger(_LOGGER)
    if is_needed not in logger.filters:
        logger.addFilter(is_needed)


def is_needed(record: logging.LogRecord) -> bool:
    """Return whether a log record is none of these warnings."""
    return not str(record.msg).startswith(_TRUNCATING)

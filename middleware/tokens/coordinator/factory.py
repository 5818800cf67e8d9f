"""The coordinator that the options name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyfront.errors import MissingPartError

if TYPE_CHECKING:
    from .redis.coordinator import Redis


def coordinator_of(
    values: Mapping[str, Any], create: bool, *, folder: Path | None = None
) -> Redis | None:
    """Return the coordinator on Redis that the options name; ``None`` where they name none.

    It does not connect before it is first used.

    :param values: the values by name of the options
        :data:`~keyfront.middleware.tokens.options.COORDINATOR`, and in Keystone of ``on_loss`` and
        ``ttl``
    :param create: if true, this process may make a table, as Keystone's do; services only read
    :param folder: the folder for the secret of this node; ``None`` in services, which need none
    :raises OptionError: an option has a value that it cannot have
    :raises MissingPartError: the Redis client is not installed
    """
    if not values["coordinator"]:
        return None
    try:
        import redis  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "redis":
            raise
        raise MissingPartError(
            "the option coordinator needs the Redis client, which is not installed; install it "
            "with: pip install 'keyfront[redis]'"
        ) from error

    from .redis.address import Address
    from .redis.coordinator import Redis

    ttl = values.get("ttl")
    keystone = f"{ttl:g} s ([keyfront_token_cache] ttl)" if ttl else "the ttl of token_cache"
    return Redis(
        Address.of(values),
        create=create,
        prefix=values["coordinator_prefix"],
        timeout=values["coordinator_timeout"],
        lease=values["lease"] if values["consistency"] == "lease" else None,
        allow=values.get("on_loss") == "allow",
        bound=f"{keystone} and the token_cache_time of the services",
        folder=folder,
    )

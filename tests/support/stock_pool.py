"""ldappool as Keystone uses it: the control of tests that say what ours does not do.

A :class:`StockPool` does what ``PooledLDAPHandler`` of Keystone does with it, and no more. Options
that Keystone sets for the whole process are set on each connection, so that nothing of them stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ldap
import ldappool


class StockPool(ldappool.ConnectionManager):  # type: ignore[misc]
    """``ldappool.ConnectionManager`` with Keystone's defaults.

    :param url: one URL or more, with commas between
    :param timeout: seconds to connect, and for each answer; Keystone's is none
    :param ca_file: of the servers, for StartTLS
    :param options: of ``ConnectionManager``: ``size``, ``retry_max``, ``use_tls`` and so on
    :ivar made: called with each connection when it is made
    """

    def __init__(
        self, url: str, *, timeout: float = -1, ca_file: Path | None = None,
        made: Callable[[ldappool.StateConnector], None] = lambda connection: None, **options: Any,
    ) -> None:
        class Connector(ldappool.StateConnector):  # type: ignore[misc]
            def __init__(self, *args: Any, **kw: Any) -> None:
                super().__init__(*args, **kw)
                made(self)
                if timeout > 0:
                    self.set_option(ldap.OPT_NETWORK_TIMEOUT, timeout)
                if ca_file:
                    self.set_option(ldap.OPT_X_TLS_CACERTFILE, str(ca_file))
                    self.set_option(ldap.OPT_X_TLS_NEWCTX, 0)

        # [ldap] pool_size, pool_retry_max, pool_retry_delay and pool_connection_lifetime
        options = {"retry_max": 3, "retry_delay": 0.1, "max_lifetime": 600, **options}
        super().__init__(url, timeout=timeout, connector_cls=Connector, **options)

    def login(self, dn: str, password: str) -> bool:
        """Whether it says that the password is right; ``PooledLDAPHandler.simple_bind_s``.

        :raises Exception: it does not say
        """
        try:
            with self.connection(dn, password):
                return True
        except ldap.INVALID_CREDENTIALS:
            return False

    @contextlib.contextmanager
    def all_at_once(self, *identities: tuple[str, str]) -> Iterator[None]:
        """Hold a connection for each of these users, so that there are as many."""
        with contextlib.ExitStack() as held:
            for dn, password in identities:
                held.enter_context(self.connection(dn, password))
            yield

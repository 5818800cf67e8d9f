"""``authtoken`` for the services beside Keystone, which sees revocations and answers from memory.

:class:`AuthProtocol` is keystonemiddleware's, with validations that are kept in the worker.
:mod:`.install` puts it in place of keystonemiddleware's where there is no paste file.
"""

from .middleware import AuthProtocol, app_factory, filter_factory

__all__ = ["AuthProtocol", "app_factory", "filter_factory"]

"""Puts ``authtoken`` in place of keystonemiddleware's, for services without a paste file.

Placement and ironic build their pipelines in code. Their WSGI module is then one of your own::

    from keyfront.middleware.tokens.authtoken.install import install
    install()
    from placement.wsgi.api import application
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import keystonemiddleware
import keystonemiddleware.auth_token as stock

from keyfront.errors import ImportedTooEarlyError

from . import middleware as authtoken

_NAME = "keystonemiddleware.auth_token"
_OURS = ("AuthProtocol", "filter_factory", "app_factory")


class _Substitute(ModuleType):
    """keystonemiddleware's module with our class in it.

    Not the module itself with another class: its own code finds the base class by that name.
    """

    def __init__(self, original: ModuleType) -> None:
        super().__init__(original.__name__, original.__doc__)
        own = vars(self)
        own["_original"] = original
        for name in ("__spec__", "__loader__", "__package__", "__file__", "__path__"):
            own[name] = getattr(original, name)
        for name in _OURS:
            own[name] = getattr(authtoken, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __dir__(self) -> list[str]:
        return dir(self._original)


def install() -> None:
    """Put our ``AuthProtocol`` into keystonemiddleware, for all modules that are imported later.

    A second call does nothing.

    :raises ImportedTooEarlyError: a module that was imported before goes on without it
    """
    if isinstance(sys.modules[_NAME], _Substitute):
        return
    originals = (stock, *(getattr(stock, name) for name in _OURS))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("keystonemiddleware", "keyfront"):
            continue
        held = list(getattr(module, "__dict__", {}).values())
        if any(value is original for value in held for original in originals):
            raise ImportedTooEarlyError(
                f"{name} was imported before authtoken was put in place of keystonemiddleware's "
                "and goes on without it; call install() first"
            )
    substitute = _Substitute(stock)
    sys.modules[_NAME] = substitute
    keystonemiddleware.auth_token = substitute

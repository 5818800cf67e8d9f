"""What the integration tests share: one Keystone, made once and served in turn; one RabbitMQ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.broker import Broker

# The cheapest that bcrypt takes, for each Keystone that is started here: how passwords are hashed
# is tested nowhere.
os.environ.setdefault("OS_IDENTITY__PASSWORD_HASH_ROUNDS", "4")


@pytest.fixture(scope="session")
def keystone_state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A state folder with a Keystone, and the port that its catalog names."""
    from support import keystones

    state = keystones.keystone_state(tmp_path_factory.mktemp("keystone") / "state")
    return state, keystones.port_of(state)


@pytest.fixture(scope="session")
def oddly_named_state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The same in a folder named after what servers' configurations take for more than a letter."""
    from support import keystones

    name = "a state ü, 'so' \"called\" {x}; 50% #1"
    state = keystones.keystone_state(tmp_path_factory.mktemp("keystone") / name)
    return state, keystones.port_of(state)


@pytest.fixture(scope="session")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A RabbitMQ with TLS, for tests that neither stop nor pause it, nor leave it blocked.

    Take queues of your own, or a virtual host by ``add_vhost``, and name your connections, so
    that they can be counted apart from others'.
    """
    from support.broker import broker
    from support.certificates import certificates

    made = certificates(tmp_path_factory.getbasetemp())
    with broker(tmp_path_factory.mktemp("rabbitmq"), tls=made) as running:
        yield running

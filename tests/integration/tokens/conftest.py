"""What tests of the token cache share: a cluster, in which changes go by Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.cluster import Shared


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Two nodes and two services, and the Redis that they get to by a proxy.

    Who breaks something mends it, and waits until changes are made again: see ``redis`` in
    ``test_cluster_faults.py``.
    """
    from support.cluster import TIMEOUT, Shared, cluster
    from support.fault_proxy import FaultProxy
    from support.redis_servers import redis_server

    folder = tmp_path_factory.mktemp("cluster")
    with redis_server(folder / "redis") as redis, FaultProxy(redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        with cluster(folder, coordinator=url, coordinator_timeout=TIMEOUT) as running:
            yield Shared(running, redis, proxy)

"""A thread that polls, for as long as what it polls for."""

from __future__ import annotations

from keyfront.common.poller import Poller


def test_a_poller_ends_with_its_object() -> None:
    class Polled:
        count = 0

        def poll(self) -> None:
            type(self).count += 1

    polled = Polled()
    poller = Poller(polled.poll, 0.001, name="polled")
    poller.start()
    thread = poller._thread
    assert thread is not None
    poller.start()
    assert poller._thread is thread
    while not Polled.count:
        thread.join(0.001)
    del polled
    thread.join(60)
    assert not thread.is_alive()
    poller.stop()
    poller.start()
    assert poller._thread is thread

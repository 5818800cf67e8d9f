"""Which addresses are this machine's alone."""

from __future__ import annotations

import socket

import pytest

from keyfront.gateway.serve import supervisor


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1", "localhost"]
)
def test_loopback(host: str) -> None:
    assert supervisor.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "::ffff:192.0.2.1", "fe80::1%lo"])
def test_what_others_reach(host: str) -> None:
    assert not supervisor.is_loopback(host)


@pytest.mark.parametrize(
    ("addresses", "alone"),
    [(["127.0.0.1", "::1"], True), (["127.0.1.1"], True), (["127.0.0.1", "192.0.2.1"], False)],
)
def test_a_name_is_what_all_of_its_addresses_are(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], alone: bool
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **more: found)
    assert supervisor.is_loopback("cloud.example.org") is alone


def test_a_name_that_means_nothing_is_not_taken_for_loopback() -> None:
    assert not supervisor.is_loopback("x" * 300)

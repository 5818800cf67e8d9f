"""The kernel's state of a TCP connection, read in microseconds and without sending anything.

The kernel hears from the peer while the process is busy, frozen or merely has nothing to read. It
knows whether the connection stands, how long ago the peer sent or acknowledged data, how many bytes
are unread, and whether there is room for more. While there is no room the peer cannot send: its
silence is then no sign that it is dead.

Sources: tcp(7) for ``TCP_INFO``, ``SIOCINQ`` and ``SIOCOUTQ``; ``struct tcp_info`` of
``linux/tcp.h``, which only ever grows at its end, so that an older kernel gives a shorter one.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import os
import socket
import struct
import sys
import termios
from typing import Final, NamedTuple

_TCP_ESTABLISHED: Final = 1  # linux/tcp_states.h
_SO_MEMINFO: Final = 55  # asm-generic/socket.h; Linux 4.12
# Offsets in struct tcp_info: tcpi_state 0, tcpi_retransmits 2, tcpi_probes 3,
# tcpi_last_data_recv 52, tcpi_last_ack_recv 56 (milliseconds), and since Linux 6.2 tcpi_rcv_wnd
# 232: the window that the peer was last told.
_WHOLE: Final = struct.Struct("=BxBB48xII172xI")
_OLDER: Final = struct.Struct("=BxBB48xII")
_unpack_whole = _WHOLE.unpack_from
_unpack_older = _OLDER.unpack_from
_WHOLE_SIZE: Final = _WHOLE.size
_ioctl = fcntl.ioctl
_from_bytes = int.from_bytes
_byteorder: Final = sys.byteorder
_NOT_TCP: Final = frozenset(
    (errno.EOPNOTSUPP, errno.ENOPROTOOPT, errno.ENOTSOCK, errno.EINVAL, errno.EPROTONOSUPPORT)
)


class State(NamedTuple):
    """A connection at one moment.

    Of one that is closed, also from our side, all is zero and :attr:`established` is false.
    """

    #: Both directions are open. False as soon as the peer's FIN is here, whatever lies unread
    #: before it, after a RST, and when the kernel gave the peer up.
    established: bool
    #: Seconds since anything came from the peer's kernel: data, or the acknowledgement of ours
    #: or of a keepalive probe. A peer that is stopped (SIGSTOP) still acknowledges.
    silent: float
    #: Seconds since the peer itself last sent data; since the connect if it never did.
    silent_data: float
    #: Bytes that came and that this process has not read.
    unread: int
    #: Bytes of ours that the peer has not acknowledged, sent or not.
    unsent: int
    #: The times in a row that the oldest of them was sent again without an answer.
    retransmits: int
    #: The number of probes, of keepalive or for room in the peer's buffer, without an answer.
    probes: int
    #: True if the peer may send: our receive window is open. While it is not, the peer's silence
    #: says nothing of the peer.
    room: bool


CLOSED: Final = State(False, 0.0, 0.0, 0, 0, 0, 0, False)


def look(fd: int) -> State | None:
    """Look at a connection by its descriptor, which stays as it is.

    :param fd: a plain descriptor; if it is of a green or a TLS socket, the one it stands on
    :returns: the state, as :func:`look_at` returns it

    It does so through a duplicate, for a few microseconds: whoever owns the descriptor may close
    it meanwhile, in another thread, and the number may be given to another file.
    """
    try:
        ours = os.dup(fd)
    except OSError:
        return CLOSED
    try:
        sock = plain_socket(ours)
    except OSError:
        os.close(ours)
        return None
    try:
        return look_at(sock)
    finally:
        sock.close()


def plain_socket(fd: int) -> _socket.socket:
    """Return a descriptor as a socket that no patching reaches; the caller owns it from now on.

    The non-blocking type is the socket object's own: a file description is shared among its
    duplicates, and without it one that blocks, or does not, could become the opposite.

    :raises OSError: it is not a socket
    """
    return _socket.socket(
        socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP, fd
    )


def look_at(sock: _socket.socket) -> State | None:
    """Look at a connection through a plain socket of ours, in 1 to 2 microseconds.

    :param sock: from :func:`plain_socket`, or any socket that has ``getsockopt`` and ``fileno``;
        green ones never switch for that. IPv4 or IPv6.
    :returns: :data:`CLOSED` if it is closed here, ``None`` if it is not TCP (a socket in the
        file system knows nothing of this, and its end is seen by reading only)

    It raises nothing.
    """
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WHOLE_SIZE)
        if len(info) == _WHOLE_SIZE:
            state, retransmits, probes, data, ack, window = _unpack_whole(info)
            room = window > 0
        else:
            state, retransmits, probes, data, ack = _unpack_older(info)
            room = _has_memory(sock)
        fd = sock.fileno()
        counted = bytearray(4)
        _ioctl(fd, termios.FIONREAD, counted)
        unread = _from_bytes(counted, _byteorder)
        _ioctl(fd, termios.TIOCOUTQ, counted)
    except (OSError, ValueError) as error:
        # ValueError: closed meanwhile, and its number is -1
        if isinstance(error, OSError) and error.errno in _NOT_TCP:
            return None
        return CLOSED
    return State(
        state == _TCP_ESTABLISHED,
        (ack if ack < data else data) / 1000.0,
        data / 1000.0,
        unread,
        _from_bytes(counted, _byteorder),
        retransmits,
        probes,
        room,
    )


def _has_memory(sock: _socket.socket) -> bool:
    """Return whether half of the receive buffer is free: before Linux 6.2 the window is not told.

    Counted as the kernel counts, with its overhead. It closes the window when over 4/5 are taken.
    """
    taken, size = struct.unpack_from("=II", sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 8))
    return int(taken) * 2 < int(size)

"""A DNS server over loopback, by UDP and TCP, with the records that a test gives it."""

from __future__ import annotations

import socketserver
import struct
import threading
from types import TracebackType
from typing import Self

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

from support.served import PATIENCE


class DNSServer:
    """Answers what it has, and NXDOMAIN for the rest.

    :ivar asked: the questions so far, as ``udp SRV _ldap._tcp.example.test``
    :ivar silent: true: it takes questions and does not answer
    :ivar free: cleared: it answers no question before it is set
    :ivar rcode: with which it answers everything, if not ``None``
    :ivar truncates: true: over UDP it says only that the answer is too long
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.silent = False
        self.free = threading.Event()
        self.free.set()
        self.rcode: dns.rcode.Rcode | None = None
        self.truncates = False
        self._records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self._servers: list[socketserver.BaseServer] = []
        self._threads: list[threading.Thread] = []
        self.port = 0

    @property
    def address(self) -> str:
        """As an option names it."""
        return f"127.0.0.1:{self.port}"

    def put(self, name: str, kind: str, *values: str, ttl: int = 3600) -> None:
        """Have records, in the place of those of this name and kind; without values, none.

        An alias (``CNAME``) is answered with what it leads to, if that is known here.

        :param values: in the form of zone files, with absolute names
        :param ttl: in seconds
        """
        self._records[name.lower(), kind] = (ttl, list(values))

    def remove(self, name: str, kind: str) -> None:
        """Have no such records: NXDOMAIN, unless there are others of the name."""
        self._records.pop((name.lower(), kind), None)

    def srv(self, domain: str, *targets: tuple[int, int, int, str], ttl: int = 3600) -> None:
        """Have the SRV records of LDAP, each by priority, weight, port and target."""
        texts = [f"{a} {b} {port} {target}." for a, b, port, target in targets]
        self.put(f"_ldap._tcp.{domain}", "SRV", *texts, ttl=ttl)

    def count(self, part: str) -> int:
        """Return how many questions had this in them."""
        return sum(part in each for each in list(self.asked))

    def answer(self, data: bytes, by: str) -> bytes | None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text().rstrip(".").lower()
        kind = dns.rdatatype.to_text(question.rdtype)
        self.asked.append(f"{by} {kind} {name}")
        self.free.wait(PATIENCE)
        if self.silent:
            return None
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        if self.rcode is not None:
            response.set_rcode(self.rcode)
        elif self.truncates and by == "udp":
            response.flags |= dns.flags.TC
        elif any(known == name for known, _ in list(self._records)):
            for each in ("CNAME", kind):
                ttl, values = self._records.get((name, each), (0, []))
                if values:
                    owner = dns.name.from_text(name)
                    response.answer.append(
                        dns.rrset.from_text_list(owner, ttl, "IN", each, values)
                    )
                    name = values[0].rstrip(".") if each == "CNAME" else name
        else:
            response.set_rcode(dns.rcode.NXDOMAIN)
        wire: bytes = response.to_wire()
        return wire

    def __enter__(self) -> Self:
        udp, tcp = _bound(self)
        self.port = udp.server_address[1]
        self._servers = [udp, tcp]
        for each in self._servers:
            thread = threading.Thread(target=each.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in self._servers:
            each.shutdown()
            each.server_close()
        for thread in self._threads:
            thread.join()


def _bound(server: DNSServer) -> tuple[socketserver.UDPServer, socketserver.TCPServer]:
    """Return both servers, at one port."""

    class Datagrams(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data, sender = self.request
            if (wire := server.answer(data, "udp")) is not None:
                sender.sendto(wire, self.client_address)

    class Streams(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = self.rfile.read(2)
            if len(head) < 2:
                return
            wire = server.answer(self.rfile.read(struct.unpack("!H", head)[0]), "tcp")
            if wire is not None:
                self.wfile.write(struct.pack("!H", len(wire)) + wire)

    for _ in range(100):
        udp = socketserver.UDPServer(("127.0.0.1", 0), Datagrams)
        try:
            return udp, socketserver.TCPServer(("127.0.0.1", udp.server_address[1]), Streams)
        except OSError:  # taken by somebody
            udp.server_close()
    raise OSError("no port is free for both")

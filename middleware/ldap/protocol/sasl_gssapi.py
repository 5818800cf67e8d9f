"""The steps of a BIND by Kerberos: SASL GSSAPI (RFC 4752), and what binds it to TLS (RFC 5929).

Tokens are made and read by a context of GSSAPI (:mod:`keyfront.middleware.ldap.kerberos`). No
security layer is agreed on, as TLS is one.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from .ber import SEQUENCE, ProtocolError, read_element, read_header

#: The mechanism's name.
GSSAPI = "GSSAPI"
#: BINDs of one exchange at most: Kerberos takes three, and more only if the server asks again.
MAX_ROUNDS = 5
# Bytes of a token at most. The server's own have some hundred.
_MAX_TOKEN = 65536

# A bit of the server's offer, and all of our answer: no security layer (RFC 4752 section 3.3).
_NO_LAYER = 1
_ANSWER = bytes((_NO_LAYER, 0, 0, 0))

_OBJECT_IDENTIFIER = 0x06
_PSS = bytes.fromhex("2a864886f70d01010a")
# The hash that a certificate is signed with, by the identifier of the signature's algorithm: RSA,
# ECDSA, DSA, and of RSASSA-PSS that of the hash. For MD5 and SHA-1 it is SHA-256 (RFC 5929
# section 4.1); for what has none, such as Ed25519, there is no binding.
_HASHES = {
    bytes.fromhex(identifier): name
    for identifier, name in {
        "2a864886f70d010104": "sha256",
        "2a864886f70d010105": "sha256",
        "2a864886f70d01010e": "sha224",
        "2a864886f70d01010b": "sha256",
        "2a864886f70d01010c": "sha384",
        "2a864886f70d01010d": "sha512",
        "2a8648ce3d0401": "sha256",
        "2a8648ce3d040301": "sha224",
        "2a8648ce3d040302": "sha256",
        "2a8648ce3d040303": "sha384",
        "2a8648ce3d040304": "sha512",
        "2a8648ce380403": "sha256",
        "608648016503040302": "sha256",
        "2b0e03021a": "sha256",
        "608648016503040204": "sha224",
        "608648016503040201": "sha256",
        "608648016503040202": "sha384",
        "608648016503040203": "sha512",
    }.items()
}


class NoPlainLayerError(Exception):
    """Raised where the server agrees to nothing without a security layer of SASL."""


class Context(Protocol):
    """The client's side of a GSSAPI context, whose first token was made already.

    :ivar first: the first token
    :ivar complete: true once each side knows the other
    """

    first: bytes
    complete: bool

    def step(self, token: bytes) -> bytes:
        """Return the answer to a token of the server's; empty if there is none."""
        ...

    def wrap(self, message: bytes) -> bytes:
        """Return a message that nobody can change on the way."""
        ...

    def unwrap(self, token: bytes) -> bytes:
        """Return the message that is in a token of the server's."""
        ...


class Exchange:
    """One BIND by GSSAPI, as the client.

    :param context: the context of GSSAPI
    :ivar principal: the client's principal
    :ivar first: the response in the first request of the BIND
    :ivar finished: true when the server may say that it succeeded
    """

    def __init__(self, context: Context, principal: str) -> None:
        self._context = context
        self.principal = principal
        self.first = context.first
        self.finished = False

    def answer(self, challenge: bytes) -> bytes:
        """Return the content of the next request.

        :param challenge: the server's part of the answer to the last one
        :raises ProtocolError: that is none of the steps
        :raises NoPlainLayerError: the server wants a security layer
        """
        if len(challenge) > _MAX_TOKEN:
            raise ProtocolError(f"a token of GSSAPI has more than {_MAX_TOKEN} bytes")
        if self.finished:
            raise ProtocolError("GSSAPI goes on after its last step")
        if not self._context.complete:
            return self._context.step(challenge)
        offer = self._context.unwrap(challenge)
        if len(offer) != 4:
            raise ProtocolError(f"the offer of security layers has {len(offer)} bytes")
        if not offer[0] & _NO_LAYER:
            raise NoPlainLayerError
        self.finished = True
        return self._context.wrap(_ANSWER)


def end_point_of(certificate: bytes) -> bytes:
    """Return the channel binding ``tls-server-end-point`` of a server's certificate (RFC 5929).

    :param certificate: the certificate in DER
    :returns: empty if none is defined for it
    """
    try:
        name = _hash_of(certificate)
    except ProtocolError:
        name = ""
    if not name:
        return b""
    return b"tls-server-end-point:" + hashlib.new(name, certificate).digest()


def _hash_of(certificate: bytes) -> str:
    """Return the name of the hash that goes with a certificate's signature; empty if none does.

    :raises ProtocolError: it is no certificate
    """
    whole, _ = read_element(certificate, 0, len(certificate), SEQUENCE)
    _, _, after = read_header(whole, 0, len(whole))
    algorithm, _ = read_element(whole, after, len(whole), SEQUENCE)
    identifier, rest = read_element(algorithm, 0, len(algorithm), _OBJECT_IDENTIFIER)
    if identifier == _PSS:
        parameters, _ = read_element(algorithm, rest, len(algorithm), SEQUENCE)
        # By default it is SHA-1.
        tag, start, stop = read_header(parameters, 0, len(parameters)) if parameters else (0, 0, 0)
        if tag != 0xA0:
            return "sha256"
        inner, _ = read_element(parameters, start, stop, SEQUENCE)
        identifier, _ = read_element(inner, 0, len(inner), _OBJECT_IDENTIFIER)
    return _HASHES.get(identifier, "")

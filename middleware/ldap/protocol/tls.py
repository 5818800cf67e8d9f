"""The options of TLS for connections to a directory, and the context they make."""

from __future__ import annotations

import hashlib
import logging
import os
import ssl
from dataclasses import dataclass, field
from typing import NamedTuple

from keyfront.errors import OptionError

LOG = logging.getLogger(__name__)

_VERIFY = ("demand", "allow", "never")

_Stamps = tuple[tuple[int, ...], ...]


class Prepared(NamedTuple):
    """A context, and what its client certificate is told from others by."""

    context: ssl.SSLContext
    #: A digest of ``client_cert``; empty if there is none.
    certificate: bytes


@dataclass(frozen=True, kw_only=True)
class TLS:
    """Options of TLS, for ``ldaps://`` and StartTLS. They concern no other pool of the process.

    :param ca_file: PEM file of the CAs to trust; by default those of the system
    :param ca_dir: folder of such files, named by hash (``openssl rehash``)
    :param verify: ``demand`` a certificate that one of these CAs signed for the name in the URL.
        ``never`` and ``allow`` take any, which protects from nobody who can get in between;
        libldap's ``allow`` does the same, as every server shows some certificate
    :param start_tls: encrypt ``ldap://`` connections before anything else is sent (RFC 4511
        section 4.14)
    :param client_cert: PEM file to show to a server that asks, with its chain; the service binds
        by it where the pool's ``sasl_mechanism`` is EXTERNAL
    :param client_key: its key without a passphrase; by default in ``client_cert``
    :param ciphers: ciphers up to TLS 1.2, in the notation of OpenSSL; by default those of Python
    :raises OptionError: ``verify`` is none of these, or there is a key without a certificate
    """

    ca_file: str | None = None
    ca_dir: str | None = None
    verify: str = "demand"
    start_tls: bool = False
    client_cert: str | None = None
    client_key: str | None = None
    ciphers: str | None = None
    # The context, by what its files were like when it was made.
    _made: dict[_Stamps, Prepared] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.verify not in _VERIFY:
            raise OptionError("verify", self.verify, "one of " + ", ".join(_VERIFY))
        if self.client_key and not self.client_cert:
            raise OptionError("client_key", self.client_key, "given together with its certificate")

    def context(self) -> ssl.SSLContext:
        """Return the context of all connections with these options: at least TLS 1.2, with SNI.

        The first call reads the files, which takes some 20 ms with the CAs of the system. They are
        read again when one was changed or replaced; if that cannot be used, which the log says,
        what there was before goes on.

        :raises OptionError: at first, a file is missing, unreadable or not what it should be
        """
        return self.prepared().context

    def prepared(self) -> Prepared:
        """Return the context of :meth:`context`, and which certificate it shows."""
        now = self._stamps()
        # Threads may all get here at once; they go on with what the first of them has made.
        made = self._made.get(now)
        if made is not None:
            return made
        before = list(self._made.items())
        try:
            fresh = self._make()
            if before:
                LOG.info("certificates were read again: %s", self._names())
        except OptionError as error:
            if not before:
                raise
            LOG.warning("certificates cannot be read again, those of before stay: %s", error)
            fresh = before[-1][1]
        made = self._made.setdefault(now, fresh)
        for stamps, _ in before:
            self._made.pop(stamps, None)
        return made

    def _stamps(self) -> _Stamps:
        """Return by what a file is told from what it was before."""
        found = []
        for path in (self.ca_file, self.client_cert, self.client_key):
            try:
                status = os.stat(path) if path else None
            except (OSError, ValueError):
                status = None
            found.append(
                (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) if status else ()
            )
        return tuple(found)

    def _names(self) -> str:
        return ", ".join(x for x in (self.ca_file, self.client_cert, self.client_key) if x)

    def _make(self) -> Prepared:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.verify == "demand":
            self._trust(context)
        else:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        certificate = self._identify(context, self.client_cert) if self.client_cert else b""
        if self.ciphers:
            try:
                context.set_ciphers(self.ciphers)
            except ssl.SSLError:
                raise OptionError(
                    "ciphers", self.ciphers, "a list of ciphers that 'openssl ciphers' knows"
                ) from None
        return Prepared(context, certificate)

    def _trust(self, context: ssl.SSLContext) -> None:
        if not self.ca_file and not self.ca_dir:
            context.load_default_certs()
            return
        if self.ca_file:
            _check("ca_file", self.ca_file)
            try:
                context.load_verify_locations(cafile=self.ca_file)
            except (OSError, ValueError):
                raise OptionError("ca_file", self.ca_file, "certificates in PEM") from None
        if self.ca_dir:
            # OpenSSL looks into it at each handshake, and does not say if it cannot
            if not os.path.isdir(self.ca_dir) or not os.access(self.ca_dir, os.R_OK | os.X_OK):
                raise OptionError("ca_dir", self.ca_dir, "a folder that can be read")
            context.load_verify_locations(capath=self.ca_dir)

    def _identify(self, context: ssl.SSLContext, certificate: str) -> bytes:
        """Load the client certificate into a context; return the digest of its file."""
        shown = _check("client_cert", certificate)
        if self.client_key:
            _check("client_key", self.client_key)
        try:
            # the passphrase would be asked for at the terminal
            context.load_cert_chain(certificate, self.client_key, password=_no_passphrase)
        except (OSError, ValueError):
            option = "client_key" if self.client_key else "client_cert"
            raise OptionError(
                option,
                self.client_key or certificate,
                "the key of the certificate, both in PEM, without a passphrase",
            ) from None
        return shown


def _no_passphrase() -> bytes:
    return b""


def _check(option: str, path: str) -> bytes:
    """Return the digest of a file; see that it can be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise OptionError(option, path, f"a file that can be read ({reason})") from None

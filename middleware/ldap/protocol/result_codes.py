"""Turns a server's refusal into an error: a verdict on a user, an outage, or a wrong set-up.

Servers agree on result codes (RFC 4511 appendix A) and little else. Read here besides are the
password policy control, the controls of the Netscape family, the codes Active Directory and Samba
put into the text (``data 775``), and the texts of 389 Directory Server, FreeIPA and eDirectory.
A server that tells nothing says "wrong password" for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryBusyError,
    DirectoryError,
    Verdict,
)

from .controls import Control, password_policy
from .messages import Message

#: Names of result codes (RFC 4511 section 4.1.9, RFC 3909, RFC 4528, RFC 4531).
NAMES = {
    0: "success",
    1: "operationsError",
    2: "protocolError",
    3: "timeLimitExceeded",
    4: "sizeLimitExceeded",
    5: "compareFalse",
    6: "compareTrue",
    7: "authMethodNotSupported",
    8: "strongerAuthRequired",
    10: "referral",
    11: "adminLimitExceeded",
    12: "unavailableCriticalExtension",
    13: "confidentialityRequired",
    14: "saslBindInProgress",
    16: "noSuchAttribute",
    17: "undefinedAttributeType",
    18: "inappropriateMatching",
    19: "constraintViolation",
    20: "attributeOrValueExists",
    21: "invalidAttributeSyntax",
    32: "noSuchObject",
    33: "aliasProblem",
    34: "invalidDNSyntax",
    36: "aliasDereferencingProblem",
    48: "inappropriateAuthentication",
    49: "invalidCredentials",
    50: "insufficientAccessRights",
    51: "busy",
    52: "unavailable",
    53: "unwillingToPerform",
    54: "loopDetect",
    64: "namingViolation",
    65: "objectClassViolation",
    66: "notAllowedOnNonLeaf",
    67: "notAllowedOnRDN",
    68: "entryAlreadyExists",
    69: "objectClassModsProhibited",
    71: "affectsMultipleDSAs",
    80: "other",
    118: "canceled",
    119: "noSuchOperation",
    120: "tooLate",
    121: "cannotCancel",
    122: "assertionFailed",
    123: "authorizationDenied",
}

SUCCESS, REFERRAL, SASL_BIND_IN_PROGRESS = 0, 10, 14
_UNAVAILABLE = frozenset((51, 52))
# A BIND that failed in these ways says nothing about the user.
_NO_VERDICT = frozenset((1, 3, 51, 52, 80))

_ADVICE = {
    8: "use ldaps:// or StartTLS",
    10: "referrals are not followed with credentials; name that server in the URLs",
    13: "use ldaps:// or StartTLS",
}

_BY_CODE = {
    # 389 Directory Server and its kin lock so: "Exceed password retry limit" (pw.c)
    19: Verdict.LOCKED,
    32: Verdict.UNKNOWN_USER,
    # what is no DN is nobody's: 389 Directory Server says so of some names
    34: Verdict.UNKNOWN_USER,
    # the entry has no password (RFC 4511 appendix A.2)
    48: Verdict.WRONG_PASSWORD,
    49: Verdict.WRONG_PASSWORD,
    # this entry may not bind; OpenLDAP itself says 49
    50: Verdict.UNWILLING,
    53: Verdict.UNWILLING,
}

# Of a BIND by SASL these are refusals of what was shown. OpenLDAP says 7 if it asked for no
# certificate, or was shown none, and where it has no keytab, so no GSSAPI.
_REFUSED_SASL = frozenset((7, 48, 49))

# draft-behera-ldap-password-policy section 6.2; 3 to 8 are about changes of a password.
_BY_POLICY = {0: Verdict.EXPIRED, 1: Verdict.LOCKED, 2: Verdict.MUST_CHANGE}

# Windows error codes, in hexadecimal as Active Directory writes them.
_ACTIVE_DIRECTORY = re.compile(r"\bdata ([0-9a-f]{1,8})\b", re.IGNORECASE)
_BY_DATA = {
    0x525: Verdict.UNKNOWN_USER,
    0x52E: Verdict.WRONG_PASSWORD,
    0x52F: Verdict.UNWILLING,  # a restriction of the account
    0x530: Verdict.NOT_NOW,  # logon hours
    0x531: Verdict.NOT_NOW,  # workstation
    0x532: Verdict.EXPIRED,
    0x533: Verdict.DISABLED,
    0x568: Verdict.UNWILLING,  # in too many groups
    0x569: Verdict.UNWILLING,  # this kind of logon is not granted
    0x701: Verdict.ACCOUNT_EXPIRED,
    0x773: Verdict.MUST_CHANGE,
    0x775: Verdict.LOCKED,
    0x78F: Verdict.UNWILLING,  # not in this forest (selective authentication)
}
# Active Directory says 49 here too: no domain controller of a trusted domain, an internal error,
# one that cannot be called.
_DATA_OUTAGES = frozenset((0x51F, 0x54F, 0x6BA))

# By code, in lower case, the first that is found. eDirectory names its error in parentheses.
_BY_TEXT: dict[int, tuple[tuple[str, Verdict], ...]] = {
    49: (
        ("password expired", Verdict.EXPIRED),  # 389 Directory Server
        ("(-222)", Verdict.EXPIRED),
        ("(-197)", Verdict.LOCKED),
    ),
    53: (
        ("account inactivated", Verdict.DISABLED),  # 389 Directory Server, FreeIPA
        ("entry permanently locked", Verdict.LOCKED),  # FreeIPA
        ("too many failed logins", Verdict.LOCKED),
        ("principal) is expired", Verdict.ACCOUNT_EXPIRED),
        ("(-197)", Verdict.LOCKED),
        ("(-217)", Verdict.NOT_NOW),  # too many logins at once
        ("(-218)", Verdict.NOT_NOW),  # logon hours
        ("(-220)", Verdict.DISABLED),  # or the account has expired
        ("(-222)", Verdict.EXPIRED),
    ),
}

# Sent by 389 Directory Server and its kin without being asked (draft-vchu-ldap-pwd-policy): on
# success the password must be changed before anything else.
_NETSCAPE_EXPIRED = "2.16.840.1.113730.3.4.4"


def name_of(code: int) -> str:
    """Return the name of a result code."""
    return NAMES.get(code, "an unknown result code")


def refusal(message: Message, server: str) -> DirectoryError:
    """Return the error for a result other than success, of anything but a BIND.

    ``busy`` and ``unavailable`` are an outage; the rest is an answer.

    :param message: the result
    :param server: the server as messages name it
    """
    if message.code in _UNAVAILABLE:
        return _outage(message, server)
    return _answer(message, server)


def bind_refusal(
    message: Message, server: str, *, quote: bool = True, sasl: Verdict | None = None
) -> DirectoryError | None:
    """Return the error for a BIND's result; ``None`` if the user is let in.

    With a password that must be changed first, a server may say success and then allow nothing but
    the change (draft-behera-ldap-password-policy section 6.2): that is a refusal as well.

    :param quote: let the error repeat the server's words
    :param sasl: the verdict if it was a BIND by SASL, without a password that could be wrong
    :raises ProtocolError: the password policy control is broken
    """
    code = message.code
    verdict = _by_controls(code, message.controls)
    if code == SUCCESS and verdict is None:
        return None
    outage = code in _NO_VERDICT
    by_code = _BY_CODE if sasl is None else _BY_CODE | dict.fromkeys(_REFUSED_SASL, sasl)
    if not outage and code in by_code:
        data = _ACTIVE_DIRECTORY.search(message.diagnostic) if code == 49 else None
        number = int(data[1], 16) if data else 0
        outage = number in _DATA_OUTAGES
        told = _BY_DATA.get(number) or _by_text(code, message.diagnostic)
        # 389 Directory Server calls a disabled account locked in the control.
        verdict = told or verdict or by_code[code]
        if sasl is not None and verdict is Verdict.WRONG_PASSWORD:
            verdict = sasl
    if not quote:
        message.diagnostic = message.matched_dn = ""
        message.referrals = []
    if outage:
        return _outage(message, server)
    if verdict is None:
        return _answer(message, server)
    return CredentialsError(
        verdict,
        code,
        name_of(code),
        message.diagnostic,
        message.matched_dn,
        message.referrals,
        server=server,
    )


def _by_controls(code: int, controls: Iterable[Control]) -> Verdict | None:
    policy = password_policy(controls)
    if policy is not None and policy.error is not None:
        verdict = _BY_POLICY.get(policy.error)
        if code != SUCCESS or verdict is Verdict.MUST_CHANGE:
            return verdict
    if any(oid == _NETSCAPE_EXPIRED for oid, _, _ in controls):
        return Verdict.MUST_CHANGE if code == SUCCESS else Verdict.EXPIRED
    return None


def _by_text(code: int, diagnostic: str) -> Verdict | None:
    text = diagnostic.lower()
    for words, verdict in _BY_TEXT.get(code, ()):
        if words in text:
            return verdict
    return None


def _outage(message: Message, server: str) -> DirectoryError:
    return DirectoryBusyError(
        _answer(message, server).message.removeprefix(f"{server}: "), server=server
    )


def _answer(message: Message, server: str) -> DirectoryError:
    return DirectoryAnswerError(
        message.code,
        name_of(message.code),
        message.diagnostic,
        message.matched_dn,
        message.referrals,
        server=server,
        advice=_ADVICE.get(message.code, ""),
    )

"""What servers say when they refuse, and what it means: a verdict, an outage, a wrong set-up."""

from __future__ import annotations

import pytest

from keyfront.errors import (
    CredentialsError,
    DirectoryAnswerError,
    DirectoryUnavailableError,
    Verdict,
)
from keyfront.middleware.ldap.protocol import result_codes
from keyfront.middleware.ldap.protocol.controls import PASSWORD_POLICY
from keyfront.middleware.ldap.protocol.messages import Message

SERVER = "ldap://a:389"
EXPIRED = "2.16.840.1.113730.3.4.4"


def answer(
    code: int, diagnostic: str = "", *, policy: int | None = None, controls: object = ()
) -> Message:
    message = Message(1, 1)
    message.code, message.diagnostic, message.matched_dn = code, diagnostic, ""
    message.referrals = []
    message.controls = list(controls)  # type: ignore[call-overload]
    if policy is not None:
        value = bytes((0x30, 3, 0x81, 1, policy))
        message.controls.append((PASSWORD_POLICY, False, value))
    return message


def active_directory(data: str) -> str:
    return (
        f"80090308: LdapErr: DSID-0C09044E, comment: AcceptSecurityContext error, data {data}, "
        "v2580\0"
    )


VERDICTS = [
    (answer(49), Verdict.WRONG_PASSWORD),
    (answer(49, "no data of that kind"), Verdict.WRONG_PASSWORD),
    (answer(48), Verdict.WRONG_PASSWORD),
    (answer(32), Verdict.UNKNOWN_USER),
    (answer(34), Verdict.UNKNOWN_USER),
    (answer(53), Verdict.UNWILLING),
    (answer(50), Verdict.UNWILLING),
    (answer(49, active_directory("525")), Verdict.UNKNOWN_USER),
    (answer(49, active_directory("52e")), Verdict.WRONG_PASSWORD),
    (answer(49, active_directory("52E")), Verdict.WRONG_PASSWORD),
    (answer(49, active_directory("52f")), Verdict.UNWILLING),
    (answer(49, active_directory("530")), Verdict.NOT_NOW),
    (answer(49, active_directory("531")), Verdict.NOT_NOW),
    (answer(49, active_directory("532")), Verdict.EXPIRED),
    (answer(49, active_directory("533")), Verdict.DISABLED),
    (answer(49, active_directory("569")), Verdict.UNWILLING),
    (answer(49, active_directory("701")), Verdict.ACCOUNT_EXPIRED),
    (answer(49, active_directory("773")), Verdict.MUST_CHANGE),
    (answer(49, active_directory("775")), Verdict.LOCKED),
    (answer(49, active_directory("57")), Verdict.WRONG_PASSWORD),
    # the password policy control
    (answer(49, policy=0), Verdict.EXPIRED),
    (answer(49, policy=1), Verdict.LOCKED),
    (answer(49, policy=2), Verdict.MUST_CHANGE),
    (answer(49, policy=6), Verdict.WRONG_PASSWORD),
    (answer(53, policy=1), Verdict.LOCKED),
    (answer(0, policy=2), Verdict.MUST_CHANGE),
    # 389 Directory Server and FreeIPA
    (answer(19, "Exceed password retry limit. Please try later."), Verdict.LOCKED),
    (answer(49, "password expired!"), Verdict.EXPIRED),
    (answer(49, controls=[(EXPIRED, False, b"0")]), Verdict.EXPIRED),
    (answer(0, controls=[(EXPIRED, False, b"0")]), Verdict.MUST_CHANGE),
    (answer(53, "Account inactivated. Contact system administrator.", policy=1), Verdict.DISABLED),
    (answer(53, "Entry permanently locked.\n"), Verdict.LOCKED),
    (answer(53, "Too many failed logins.\n"), Verdict.LOCKED),
    (answer(53, "Account (Kerberos principal) is expired"), Verdict.ACCOUNT_EXPIRED),
    # eDirectory
    (answer(49, "NDS error: failed authentication (-669)"), Verdict.WRONG_PASSWORD),
    (answer(49, "NDS error: bad password (-222)"), Verdict.EXPIRED),
    (answer(53, "NDS error: login lockout (-197)"), Verdict.LOCKED),
    (answer(53, "NDS error: bad login time or Q halted (-218)"), Verdict.NOT_NOW),
    (answer(53, "NDS error: log account expired (-220)"), Verdict.DISABLED),
]


def name(value: object) -> str | None:
    return f"{value.code}-{value.diagnostic[-20:]!r}" if isinstance(value, Message) else None


@pytest.mark.parametrize(("message", "verdict"), VERDICTS, ids=name)
def test_because_of_the_user(message: Message, verdict: Verdict) -> None:
    error = result_codes.bind_refusal(message, SERVER)
    assert isinstance(error, CredentialsError)
    assert error.verdict is verdict
    assert (error.code, error.server) == (message.code, SERVER)
    assert not isinstance(error, DirectoryUnavailableError)


@pytest.mark.parametrize(("message", "verdict"), VERDICTS, ids=name)
def test_because_of_the_certificate(message: Message, verdict: Verdict) -> None:
    """Of a BIND by EXTERNAL: there was no password that could be wrong."""
    error = result_codes.bind_refusal(message, SERVER, sasl=Verdict.WRONG_CERTIFICATE)
    assert isinstance(error, CredentialsError)
    wrong = Verdict.WRONG_PASSWORD
    assert error.verdict is (Verdict.WRONG_CERTIFICATE if verdict is wrong else verdict)


def test_no_external_there() -> None:
    error = result_codes.bind_refusal(answer(7, "SASL(-4)"), SERVER, sasl=Verdict.WRONG_CERTIFICATE)
    assert isinstance(error, CredentialsError)
    assert error.verdict is Verdict.WRONG_CERTIFICATE
    assert "authMethodNotSupported (7): SASL(-4): client certificate not accepted" in str(error)
    for message in OUTAGES:
        error = result_codes.bind_refusal(message, SERVER, sasl=Verdict.WRONG_CERTIFICATE)
        assert isinstance(error, DirectoryUnavailableError)
    for code in (2, 8, 10, 14):
        error = result_codes.bind_refusal(answer(code), SERVER, sasl=Verdict.WRONG_CERTIFICATE)
        assert type(error) is DirectoryAnswerError


OUTAGES = [
    *(answer(code, "words") for code in (1, 3, 51, 52, 80)),
    answer(49, active_directory("51f")),
    answer(49, active_directory("54F")),
    answer(49, active_directory("6ba")),
    # no verdict, whatever comes with it
    answer(51, policy=1),
]


@pytest.mark.parametrize("message", OUTAGES, ids=name)
def test_an_outage_is_no_verdict(message: Message) -> None:
    error = result_codes.bind_refusal(message, SERVER)
    assert isinstance(error, DirectoryUnavailableError)
    assert str(error).count(SERVER) == 1
    assert result_codes.name_of(message.code) in str(error)


@pytest.mark.parametrize("code", [2, 4, 7, 8, 10, 11, 12, 13, 14, 54, 71, 123, 4711])
def test_a_wrong_set_up_is_neither(code: int) -> None:
    error = result_codes.bind_refusal(answer(code, "words"), SERVER)
    assert type(error) is DirectoryAnswerError
    assert error.code == code
    assert "words" in str(error)


@pytest.mark.parametrize("code", [8, 13])
def test_how_to_encrypt_is_told(code: int) -> None:
    assert "use ldaps:// or StartTLS" in str(result_codes.bind_refusal(answer(code), SERVER))


def test_where_referrals_lead_is_told() -> None:
    message = answer(10)
    message.referrals = ["ldap://b"]
    error = result_codes.refusal(message, SERVER)
    assert isinstance(error, DirectoryAnswerError)
    assert error.referrals == ("ldap://b",)


@pytest.mark.parametrize(
    "message",
    [
        answer(0),
        answer(0, "Have a nice day, data 775"),
        answer(0, policy=0),  # within the grace logins
        answer(0, policy=1),
        answer(0, controls=[("1.2.3", False, None)]),
    ],
)
def test_who_is_let_in(message: Message) -> None:
    assert result_codes.bind_refusal(message, SERVER) is None


def test_words_that_must_not_be_repeated() -> None:
    message = answer(49, active_directory("775"))
    message.matched_dn, message.referrals = "cn=s3cret", ["ldap://s3cret"]
    error = result_codes.bind_refusal(message, SERVER, quote=False)
    assert isinstance(error, CredentialsError)
    assert error.verdict is Verdict.LOCKED
    assert (error.diagnostic, error.matched_dn, error.referrals) == ("", "", ())
    for code in (51, 8):
        error = result_codes.bind_refusal(answer(code, "s3cret"), SERVER, quote=False)
        assert "s3cret" not in f"{error} {vars(error)}"


@pytest.mark.parametrize("code", [51, 52])
def test_busy_is_an_outage_for_a_search_too(code: int) -> None:
    assert isinstance(result_codes.refusal(answer(code), SERVER), DirectoryUnavailableError)


@pytest.mark.parametrize("code", [1, 3, 4, 10, 11, 19, 32, 49, 50, 53, 80])
def test_other_answers_to_a_search_are_answers(code: int) -> None:
    assert type(result_codes.refusal(answer(code), SERVER)) is DirectoryAnswerError

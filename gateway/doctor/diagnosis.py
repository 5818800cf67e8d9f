"""The diagnosis: all checks run over the facts that were found, and their results in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from . import checks  # noqa: F401  (enters all checks into the registry)
from .found import Found
from .readers.files import Unread
from .registry import CHECKS, ERROR, LAYERS, LEVELS, WITHIN, Check, Finding, UnknownError, fault

# The option that names what was not found.
_OPTIONS = {
    "keystone": "--keystone FILE",
    "uwsgi": "--uwsgi FILE",
    "nginx": "--nginx FILE",
    "apache": "--apache FILE",
    "haproxy": "--haproxy FILE",
    "systemd": "--systemd UNIT",
}


@dataclass(frozen=True)
class Result:
    """A finding with the check that it is of."""

    check: Check
    finding: Finding

    @property
    def level(self) -> str:
        """The level of the finding: its own, or the check's."""
        return self.finding.level or self.check.level

    @property
    def harm(self) -> str:
        """The harm that it does to users: the finding's own, or the check's."""
        return self.finding.harm or self.check.harm


@dataclass
class Diagnosis:
    """The results of all checks, and the files that could not be read.

    :param results: the findings with their checks, worst first
    :param right: the checks that found nothing
    :param skipped: checks for which a layer was not found
    """

    results: list[Result] = field(default_factory=list)
    right: list[Check] = field(default_factory=list)
    skipped: list[Check] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status: 1 with findings of level error."""
        return 1 if any(result.level == ERROR for result in self.results) else 0

    def count(self, level: str) -> int:
        """Return the number of findings of a level."""
        return sum(result.level == level for result in self.results)


def diagnose(found: Found, codes: Iterable[str] | None = None) -> Diagnosis:
    """Run the checks.

    :param codes: those to run; by default all
    """
    made = Diagnosis()
    wanted = CHECKS if codes is None else {code: CHECKS[code] for code in codes}
    # The other checks may still find a file that is malformed.
    for check in sorted(wanted.values(), key=lambda check: check.code == "F01"):
        if not all(found.has(layer) for layer in check.layers):
            made.skipped.append(check)
            continue
        findings, unknown = _made(check, found)
        if unknown:
            made.unread.append(Unread(f"{check.code} {check.holds}", unknown))
        elif not findings:
            made.right.append(check)
        for finding in dict.fromkeys(findings):
            made.results.append(Result(check, finding))
    made.results.sort(key=lambda result: (LEVELS.index(result.level), _order(result)))
    absent = [
        layer
        for layer in LAYERS
        if not found.has(layer) and any(layer in check.layers for check in made.skipped)
    ]
    made.unread = [*dict.fromkeys(found.unread), *made.unread]
    if found.files.apart:
        made.unread.append(
            Unread(
                ", ".join(sorted(found.files.apart)),
                "not told: the folder of --root has a part of the machine's files only",
            )
        )
    for layer in absent:
        if WITHIN.get(layer) in absent:
            continue
        those = {layer} | {part for part, whole in WITHIN.items() if whole == layer}
        count = sum(bool(those & set(check.layers)) for check in made.skipped)
        option = f" ({_OPTIONS[layer]})" if layer in _OPTIONS else ""
        said = f"not found here{option}"
        if layer in found.others:
            said = f"leads to no Keystone here{option}"
        if layer in found.denied:
            said = f"{found.denied[layer]} may not be read: run this as root"
        made.unread.append(
            Unread(LAYERS[layer], f"{said}, {count} check{'s' * (count != 1)} left out")
        )
    return made


def _made(check: Check, found: Found) -> tuple[list[Finding], str]:
    """Make a check.

    :returns: its findings, and the reason for which it was not made to its end; empty if it was
    """
    findings: list[Finding] = []
    try:
        findings.extend(check.function(found))
    except UnknownError as error:
        return findings, str(error)
    # Files have what nobody thought of. The other checks are made all the same.
    except Exception as error:
        return findings, f"it could not be made, which is a fault of keyfront: {fault(error)}"
    return findings, ""


def _order(result: Result) -> tuple[bool, str]:
    """Across layers first, then by code."""
    code = result.check.code
    return not code.startswith(("X", "F")), code

"""500 tokens for a user in LDAP, with and without kept connections, as M. Fischer measured in 2015.

Connects, BINDs and searches are counted in slapd's log: part of what the stock pool gains is that
it does not ask the directory for the password at all.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

from .. import results
from ..compare import ldap_logins
from ..compare.comparison import in_turns
from ..compare.keystone_process import KeystoneProcess
from ..compare.ldap_keystones import DOMAIN, login
from ..compare.ldap_logins import CASES, Sample, Samples, Settings, name_of, row
from ..compare.ratios import ratio
from ..servers import slapd as directory
from . import timelines
from .experiment import Conclusions, Experiment, World
from .findings import Change, Finding, less_is_better, number

NAME = "ldap-pool"
SOURCE = (
    "M. Fischer, 2015, mattfischer.com/blog/archives/624: 500 tokens in a row, one user, Active "
    "Directory over ldaps; 7 min 25 s without and 1 min 25 s with pools (3 to 5 times)"
)
PUBLISHED_BEFORE, PUBLISHED_AFTER = 7 * 60 + 25, 60 + 25
TOKENS, ROUNDS = 500, 6
QUICK_TOKENS, QUICK_ROUNDS = 2, 1
# Milliseconds added to each round trip.
DISTANCE = 10
REPEATS, QUICK_REPEATS = 20, 1
UNPOOLED, LDAPPOOL, KEYFRONT = CANDIDATES = ("unpooled", "ldappool", "keyfront")
LOGIN, GROUPS, CONTROL = "a user logs in", "the groups of a user", "all projects (no LDAP)"
_MEMORY = (
    "The stock pool does not ask the directory for a password that it has seen: an old one works "
    "on."
)
LABELS = {
    UNPOOLED: "the stock driver without pools",
    LDAPPOOL: "the stock driver with its pools",
    KEYFRONT: "keyfront_ldap",
}


def settings(world: World) -> Settings:
    """Return how ``ldap_logins`` is told to measure this."""
    only = f", {DISTANCE} ms"
    if world.options.quick:
        return Settings(QUICK_TOKENS, QUICK_ROUNDS, logins=1, stock_logins=1, only=f", one{only}")
    return Settings(TOKENS, ROUNDS, logins=1, stock_logins=1, only=only)


def calls(
    keystone: KeystoneProcess, admin: str, *, quick: bool
) -> dict[str, tuple[str, str, str | None, object]]:
    """Return the mix: each call's name, with method, path, token and body.

    :param quick: true if a call that asks the directory and one that does not are enough
    """
    (domain,) = keystone.request("GET", f"domains?name={DOMAIN}", admin)["body"]["domains"]
    name = directory.user_name(0)
    by_name = f"users?domain_id={domain['id']}&name={name}"
    (user,) = keystone.request("GET", by_name, admin)["body"]["users"]
    few: dict[str, tuple[str, str, str | None, object]] = {
        GROUPS: ("GET", f"users/{user['id']}/groups", admin, None),
        CONTROL: ("GET", "projects", admin, None),
    }
    if quick:
        return few
    token: str = keystone.request("POST", "auth/tokens", None, login(0))["token"]
    return {
        LOGIN: ("POST", "auth/tokens", None, login(0)),
        "a user by name": ("GET", by_name, admin, None),
        "a user by id": ("GET", f"users/{user['id']}", admin, None),
        GROUPS: few[GROUPS],
        "the projects of a user": ("GET", "auth/projects", token, None),
        "the groups of a domain": ("GET", f"groups?domain_id={domain['id']}", admin, None),
        CONTROL: few[CONTROL],
    }


def measure(bench: ldap_logins.Bench, record: results.Record, *, quick: bool) -> Samples:
    """Measure every case in each round, then the mix; gives the logins' samples.

    :param quick: true if a part of the mix is enough
    """
    start = time.monotonic()
    probes = {("LDAP connections", "sockets"): lambda: float(timelines.clients(bench.slapd.port))}
    cases = {name: case for name, case in bench.cases.items() if case.candidate in CANDIDATES}
    logins: dict[str, list[Sample]] = {name: [] for name in cases}
    with bench.keystones.running(CANDIDATES) as running:
        for number_, name in in_turns(list(cases), bench.settings.rounds):
            case = cases[name]
            with timelines.Watch(start, probes) as watch:
                sample = bench.once(running[case.candidate], case, number_)
            if number_ == 0 and case.users == "one":
                record.timelines += watch.timelines(f"tokens, {case.label}")
            logins[name].append(sample)
            who = {"candidate": case.candidate, "users": case.users, "round": number_}
            record.samples.append({"what": "tokens", **who, **sample._asdict()})
        bench.proxy.delay(DISTANCE / 1000)
        mixes = {
            name: calls(keystone, bench.keystones.admin(keystone), quick=quick)
            for name, keystone in running.items()
        }
        # what is made once is made in a first one, which the quick form is not worth
        first = 0 if quick else 1
        for repeat, name in in_turns(list(running), first + (QUICK_REPEATS if quick else REPEATS)):
            for what, call in mixes[name].items():
                mark, began = bench.slapd.mark(), time.perf_counter()
                running[name].request(*call)
                seconds = time.perf_counter() - began
                if repeat < first:
                    continue
                counts = bench.slapd.counts(mark)._asdict()
                del counts["bound"]
                who = {"candidate": name, "round": repeat, "seconds": seconds}
                record.samples.append({"what": what, **who, **counts})
    return logins


def mix_table(samples: list[results.Sample]) -> results.Table:
    """Return the mix: milliseconds of each call, by who keeps connections."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for one in samples:
        if one["what"] != "tokens":
            found[one["what"]][one["candidate"]].append(1000 * one["seconds"])
    rows: list[list[results.Cell]] = []
    for what, times in found.items():
        middle = {name: statistics.median(each) for name, each in times.items()}
        ratios = (round(middle[name] / middle[KEYFRONT], 2) for name in (UNPOOLED, LDAPPOOL))
        rows.append([what, *(round(middle[name], 1) for name in CANDIDATES), *ratios])
    return results.Table(
        name="mix",
        columns=[
            *("call", "no pool, ms", "ldappool, ms", "keyfront, ms"),
            *("times no pool", "times ldappool"),
        ],
        rows=rows,
        caption=f"Medians; the directory is {DISTANCE} ms away, Keystone's caches are off.",
    )


def tokens_table(logins: Samples) -> results.Table:
    """Return the tokens, with what was asked of the directory for each."""
    rows: list[list[results.Cell]] = []
    for name, each in logins.items():
        case, one = CASES[name], row(each)
        users = "one user" if case.users == "one" else "each another user"
        times = round(one.seconds * TOKENS, 1), round(one.seconds * 1000, 1)
        rows.append([case.label, users, *times, *(round(count, 2) for count in one[2:])])
    return results.Table(
        name="tokens",
        columns=[
            *("by", "logins", f"{TOKENS} tokens, s", "ms each", "connects each", "BINDs each"),
            "searches each",
        ],
        rows=rows,
        caption="One BIND for each login is what makes a password count; fewer is a password from "
        "memory.",
    )


def findings(logins: Samples) -> list[Finding]:
    """Return what was published, and what is true of it here."""
    one = {name: row(logins[name_of(name, "one", DISTANCE)]) for name in CANDIDATES}
    before, after = (one[name].seconds * TOKENS for name in (UNPOOLED, LDAPPOOL))
    gain = before / after
    ours = one[KEYFRONT]
    return [
        Finding(f"{TOKENS} tokens without pools", _times(PUBLISHED_BEFORE), _times(before)),
        Finding(f"{TOKENS} tokens with the stock pools", _times(PUBLISHED_AFTER), _times(after)),
        Finding(
            "what the pools gain",
            "3 to 5 times",
            f"{number(gain)} times, with {number(one[LDAPPOOL].binds)} BINDs a login",
            gain >= 3,
        ),
        Finding(
            f"{TOKENS} tokens with keyfront_ldap",
            "-",
            f"{number(ours.seconds * TOKENS)} s, with {number(ours.binds)} BINDs a login",
        ),
    ]


def _times(seconds: float) -> str:
    return f"{number(seconds)} s ({seconds / TOKENS * 1000:.0f} ms each)"


def changes(logins: Samples, samples: list[results.Sample]) -> list[Change]:
    """Return what keyfront changes, against the better of the two stock ways."""
    found = []
    for users, words in (("one", "the same user again"), ("many", "each another user")):
        names = {who: name_of(who, users, DISTANCE) for who in CANDIDATES}
        if not all(logins.get(name) for name in names.values()):
            continue
        times = {who: row(logins[name]).seconds * 1000 for who, name in names.items()}
        best = min((UNPOOLED, LDAPPOOL), key=times.__getitem__)
        pairs = ratio(logins, names[KEYFRONT], names[best]).pairs
        found.append(
            less_is_better(
                f"A login of a user in LDAP, {words}",
                times[best],
                LABELS[best],
                times[KEYFRONT],
                "ms",
                # of rates; times are their inverse
                pairs=[1 / pair for pair in pairs],
                because=_MEMORY if best == LDAPPOOL and users == "one" else "",
            )
        )
    for line in mix_table(samples).rows:
        what, unpooled, pooled, ours = line[:4]
        assert isinstance(unpooled, float) and isinstance(pooled, float) and isinstance(ours, float)
        # the logins are told above; the other one asks no directory
        if what not in (LOGIN, CONTROL):
            best, least = (UNPOOLED, unpooled) if unpooled <= pooled else (LDAPPOOL, pooled)
            call = f"With users in LDAP, API call: {what}"
            found.append(less_is_better(call, least, LABELS[best], ours, "ms"))
    return found


def run(world: World, record: results.Record) -> Conclusions:
    """Measure the tokens and the mix."""
    chosen = settings(world)
    record.conditions |= {"tokens": chosen.tokens, "rounds": chosen.rounds}
    record.conditions |= {"distance_ms": DISTANCE, "cache": "off"}
    with ldap_logins.ready(chosen, world.folder()) as bench:
        logins = measure(bench, record, quick=world.options.quick)
    record.tables += [tokens_table(logins), mix_table(record.samples)]
    return Conclusions(
        findings=findings(logins),
        changes=changes(logins, record.samples),
        notes=[
            f"slapd {DISTANCE} ms away instead of Active Directory in a company's network; "
            "Keystone 30 with fernet tokens on SQLite, asked in the process, instead of Juno with "
            "UUID tokens under eventlet.",
            f"{chosen.tokens} tokens of each kind in {chosen.rounds} rounds, told as if {TOKENS}.",
            "Keystone's own caches are off, as they were then.",
            "With use_auth_pool the stock driver does not ask the directory for a password that it "
            "has seen: an old password goes on working. keyfront always asks.",
        ],
    )


TITLE = "500 tokens and a mix of API calls with users in LDAP, by who keeps connections"
EXPERIMENT = Experiment(NAME, TITLE, SOURCE, run)

"""A uWSGI loaded with wrk: what one round says of it, and the tables of all rounds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keyfront.errors import ServerError

from .. import results
from ..lineups.uwsgi import Server
from ..load import wrk
from ..load.measured import Load, percentile
from ..results import Table
from . import ratios
from .comparison import Report


class Sample(NamedTuple):
    """One case in one round.

    :ivar server_cpu: CPU seconds that uWSGI's processes took
    """

    load: Load
    server_cpu: float

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return self.load.rate

    @property
    def p99(self) -> float:
        """Milliseconds within which 99 of 100 answers came."""
        return percentile(self.load.latencies or {}, 0.99)

    @property
    def cpu(self) -> float:
        """CPU seconds per good answer."""
        return self.server_cpu / self.load.good


Samples = dict[str, list[Sample]]


def once(
    server: Server,
    path: str,
    headers: Mapping[str, str],
    *,
    seconds: int,
    connections: int,
    vary: str | None = None,
) -> Sample:
    """Load a server once.

    :param vary: the query before a number that makes each request another one
    """
    before = server.cpu()
    seen = wrk.run(
        f"{server.url}{path}", headers, seconds=seconds, connections=connections, vary=vary
    )
    spent = server.cpu() - before
    if not seen.good:
        raise ServerError(f"{server.url}: no good answer, {seen.failed} errors; {server.tail()}")
    return Sample(seen, spent)


def _digits(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def report(
    samples: Samples,
    wanted: Sequence[tuple[str, str]],
    figures: Mapping[str, str],
    labels: Mapping[str, str],
    *,
    title: str,
    caption: str,
    against: str,
    times: str,
) -> Report:
    """Return rates and ratios in tables, what the goals say, and every round of every case.

    :param wanted: the pairs of cases that have ratios
    :param figures: the name of a column for each figure of a ratio
    :param labels: the words of cases
    :param title: the name of the first column of rates
    :param against: the case of whose rate the last column has multiples
    :param times: the name of that column
    """
    found = list(ratios.ratios(samples, wanted, list(figures)))
    middle = {name: statistics.median(x.rate for x in each) for name, each in samples.items()}
    rows: list[list[results.Cell]] = []
    for name, each in samples.items():
        latencies = sum((Counter(one.load.latencies or {}) for one in each), Counter[int]())
        answers = sum(one.load.good for one in each)
        seconds = sum(one.load.seconds for one in each)
        multiple = middle[name] / middle[against]
        rows.append(
            [
                labels[name],
                f"{round(middle[name], -2 if middle[name] >= 1000 else 0):,.0f}".replace(",", " "),
                *(_digits(percentile(latencies, part)) for part in (0.50, 0.99)),
                sum(one.load.failed for one in each),
                f"{sum(one.server_cpu for one in each) / answers * 1e6:.0f}",
                f"{sum(one.load.generator_cpu for one in each) / seconds:.2f}",
                f"{multiple:.{0 if multiple >= 10 else 1}f}",
            ]
        )
    # the CPU time is that of an answer; of wrk it is the cores that it took
    columns = [title, "per second", "p50, ms", "p99, ms", "errors", "CPU, µs", "wrk", times]
    tables = [
        Table(name="rates", columns=columns, rows=rows, caption=caption),
        ratios.table(found, figures, labels),
    ]
    raw: list[results.Sample] = [
        {
            "case": name,
            "round": number,
            "requests": sample.load.good,
            "seconds": sample.load.seconds,
            "errors": sample.load.failed,
            "p50_ms": percentile(sample.load.latencies or {}, 0.50),
            "p99_ms": sample.p99,
            "server_cpu": sample.server_cpu,
            "generator_cpu": sample.load.generator_cpu,
        }
        for name, each in samples.items()
        for number, sample in enumerate(each)
    ]
    return Report(tables, ratios.in_words(found), raw)

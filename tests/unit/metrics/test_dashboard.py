"""The dashboard: Grafana's own types read all of it, Prometheus takes it, nothing is left out."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from itertools import combinations
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from keyfront.gateway.metrics import collector
from support.programs import program

MONITORING = Path(str(files("keyfront.deploy").joinpath("production/monitoring")))
TEXT = (MONITORING / "grafana.json").read_text(encoding="utf-8")
RULES = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
OPERATE = (Path(__file__).parents[3] / "docs/operate.md").read_text(encoding="utf-8")

DASHBOARD = json.loads(TEXT)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
#: Those of Prometheus itself: whether a node could be read, and which alerts there are.
ITS_OWN = {"up", "ALERTS"}


def asked(text: str) -> set[str]:
    """The metrics that expressions ask for, a histogram by its own name."""
    found = re.findall(r"\b(?:keyfronts?_\w+|up(?=\{)|ALERTS(?=\{))", text)
    return {re.sub(r"(queue_seconds)_(bucket|sum|count)$", r"\1", name) for name in found}


def lost(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """What is in one text and not in the other, by its place."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from lost(value, after.get(name, "nothing"), f"{place}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, value in enumerate(before):
            yield from lost(value, after[index], f"{place}[{index}]")
    elif before != after:
        yield f"{place}: {before!r} became {after!r}"


def test_grafana_knows_every_word_of_it() -> None:
    register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(TEXT))))
    assert list(lost(DASHBOARD, read)) == []


def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": re.sub(r"\[\$__\w+\]", "[1m]", expression)}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    assert len(rules) > 50
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    promtool = str(program("promtool", "prometheus"))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"SUCCESS: {len(rules)} rules found" in done.stdout


def test_it_shows_every_metric_and_no_other() -> None:
    listed = {family.sample for family in collector.FAMILIES}
    assert asked("\n".join(EXPRESSIONS)) == listed | ITS_OWN


def test_what_an_alert_asks_for_is_shown_by_the_panel_that_names_it() -> None:
    alerts = re.findall(r"- alert: (\w+)\n(.*?)\n +labels:", RULES, re.DOTALL)
    assert len(alerts) > 15
    for name, text in alerts:
        shown = {
            metric
            for panel in PANELS if re.search(rf"\b{name}\b", panel["description"])
            for target in panel["targets"] for metric in asked(target["expr"])
        }  # fmt: skip
        assert asked(text) & shown, f"no panel names {name} and shows what it asks for"
        assert asked(text) <= asked("\n".join(EXPRESSIONS))


def test_answered_from_memory_counts_first_validations() -> None:
    (panel,) = [panel for panel in PANELS if panel["title"] == "Answered from memory"]
    (target,) = panel["targets"]
    numerator, denominator = re.findall(r'result=~"([^"]+)"', target["expr"])
    assert numerator.split("|") == ["hits", "node_hits", "known"]
    assert denominator.split("|") == ["hits", "node_hits", "known", "misses"]
    # the alert draws the line where it is drawn here
    assert f'result=~"{numerator}"' in RULES
    assert f'result=~"{denominator}"' in RULES


def test_every_panel_is_of_the_chosen_nodes_and_says_what_it_shows() -> None:
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            selectors = re.findall(r"\{([^}]*)\}", target["expr"])
            assert selectors
            assert all('instance=~"$instance"' in text for text in selectors), panel["title"]


def test_panels_lie_beside_each_other_below_their_row() -> None:
    every = DASHBOARD["panels"]
    assert every[0]["type"] == "row"
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)

    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        return {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }

    for one, other in combinations(every, 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])
    # no gap anywhere: 24 columns wide, and as high as the last panel ends
    filled = set().union(*(cells(panel) for panel in every))
    assert len(filled) == 24 * (1 + max(y for _, y in filled))
    assert max(x for x, _ in filled) == 23


def test_the_runbook_names_rows_and_panels_that_there_are() -> None:
    titles = {panel["title"] for panel in PANELS}
    named = re.findall(r"\bpanels? \*([^*]+)\*", OPERATE)
    assert named
    assert set(named) <= titles
    (rows,) = re.findall(r"a row for each part: ([^.]+)\.", " ".join(OPERATE.split()))
    assert rows.split(", ") == [x["title"] for x in DASHBOARD["panels"] if x["type"] == "row"]


def test_prometheus_takes_the_configuration_of_the_runbook(tmp_path: Path) -> None:
    (lines,) = re.findall(r"\n    # prometheus\.yml\n((?:    .*\n)+)", OPERATE)
    file = tmp_path / "prometheus.yml"
    file.write_text(lines.replace("/etc/prometheus/keyfront.yml", str(MONITORING / "alerts.yml")))
    promtool = str(program("promtool", "prometheus"))
    done = subprocess.run([promtool, "check", "config", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS: 1 rule files found" in done.stdout
    assert "job_name: keyfront\n" in lines


def test_a_node_without_workers_has_no_time_since_its_load() -> None:
    """It tells 0 then, and the panel would show half a century."""
    (panel,) = [panel for panel in PANELS if panel["title"] == "Time since the last load"]
    (target,) = panel["targets"]
    assert re.fullmatch(r"time\(\) - \(\w+\{[^}]*\} > 0\)", target["expr"])

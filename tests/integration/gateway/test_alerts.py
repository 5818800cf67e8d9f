"""The alerts, by Prometheus' own tool: each is fired by its fault, and by no other one's.

Where Prometheus is there, it also loads the rules and reads the metrics of a node by itself.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from http.client import HTTPException
from importlib.resources import files
from pathlib import Path
from urllib.request import urlopen

import pytest

from keyfront.gateway.metrics import collector
from keyfront.gateway.node.counters import NodeCounts
from support.programs import program, running
from support.served import free_port, wait_for

MONITORING = Path(str(files("keyfront.deploy").joinpath("production/monitoring")))
RULES = MONITORING / "alerts.yml"
DASHBOARD = MONITORING / "grafana.json"
OPERATE = Path(__file__).parents[3] / "docs/operate.md"

# Every half minute for 80 minutes.
INTERVAL, SAMPLES, MINUTES = "30s", 160, 75
NODE = 'instance="node1",job="keyfront"'

#: A node that is well, under load: series and values in promtool's notation.
HEALTHY = {
    "up": "1x160",
    "keyfront_workers": "4x160",
    "keyfront_workers_started_total": "4x160",
    "keyfront_workers_outgrown_total": "0+0.01x160",
    "keyfront_part_ok|part=database": "1x160",
    "keyfront_part_ok|part=directory": "1x160",
    "keyfront_draining": "0x160",
    "keyfront_requests_shed_total": "0x160",
    "keyfront_logins_refused_total": "0+1x160",
    "keyfront_queue_seconds_bucket|le=0.001024": "0+2990x160",
    "keyfront_queue_seconds_bucket|le=0.524288": "0+3000x160",
    "keyfront_queue_seconds_bucket|le=4.194304": "0+3000x160",
    "keyfront_queue_seconds_bucket|le=+Inf": "0+3000x160",
    "keyfront_source_up|source=node": "1x160",
    "keyfront_token_cache_requests_total|result=hits": "0+2500x160",
    "keyfront_token_cache_requests_total|result=node_hits": "0+300x160",
    "keyfront_token_cache_requests_total|result=misses": "0+200x160",
    "keyfront_token_cache_requests_total|result=bypassed": "0+5000x160",
    "keyfront_token_cache_changes_under_way": "0 1 0 2 0 1x155",
    "keyfront_token_cache_changes_recovered_total": "3x160",
    "keyfront_token_cache_changes_refused_total": "1x160",
    "keyfront_ldap_servers|state=up": "8x160",
    "keyfront_ldap_servers|state=down": "0x160",
    "keyfront_ldap_logins_total|outcome=accepted": "0+60x160",
    "keyfront_ldap_logins_total|outcome=refused": "0+600x160",
    "keyfront_ldap_logins_total|outcome=failed": "0x160",
    "keyfront_ldap_waiting|pool=auth": "0x160",
    "keyfront_heartbeat_dead_peers_total": "2x160",
}
HEALTHY["keyfront_token_cache_changes_under_way"] = "0 1 0 2 0 1 0 0+0x152"

#: What differs by the fault of each alert.
FAULTS = {
    "KeyfrontMetricsMissing": {"up": "1x140 0x20"},
    "KeyfrontNoWorkers": {"keyfront_workers": "4x140 0x20"},
    "KeyfrontPartAway": {"keyfront_part_ok|part=database": "1x140 0x20"},
    "KeyfrontDraining": {"keyfront_draining": "0x10 1x150"},
    "KeyfrontRequestsShed": {
        "keyfront_requests_shed_total": "0x130 0+60x29",
        # who is refused has waited, too
        "keyfront_queue_seconds_bucket|le=0.001024": "0x160",
        "keyfront_queue_seconds_bucket|le=0.524288": "0x160",
    },
    "KeyfrontLoginsRefused": {"keyfront_logins_refused_total": "0x130 0+60x29"},
    "KeyfrontQueueSlow": {
        "keyfront_queue_seconds_bucket|le=0.001024": "0+1000x160",
        "keyfront_queue_seconds_bucket|le=0.524288": "0+2000x160",
    },
    "KeyfrontWorkersOutgrown": {
        "keyfront_workers_outgrown_total": "0+1x160", "keyfront_workers_started_total": "4+1x160",
    },
    "KeyfrontWorkersRestarting": {"keyfront_workers_started_total": "4+4x160"},
    "KeyfrontCountsUnreadable": {"keyfront_source_up|source=node": "1x140 0x20"},
    "KeyfrontTokenCacheCold": {
        "keyfront_token_cache_requests_total|result=hits": "0+100x160",
        "keyfront_token_cache_requests_total|result=misses": "0+2600x160",
    },
    "KeyfrontChangesStuck": {"keyfront_token_cache_changes_under_way": "0x120 1x40"},
    "KeyfrontChangesRecovered": {"keyfront_token_cache_changes_recovered_total": "3x140 4x20"},
    "KeyfrontChangesRefused": {"keyfront_token_cache_changes_refused_total": "1x146 2x14"},
    "KeyfrontLdapServerDown": {"keyfront_ldap_servers|state=down": "0x140 4x20"},
    "KeyfrontLdapLoginsFail": {"keyfront_ldap_logins_total|outcome=failed": "0x130 0+5x29"},
    "KeyfrontLdapPoolExhausted": {"keyfront_ldap_waiting|pool=auth": "0x130 7x30"},
    "KeyfrontBrokerLost": {"keyfront_heartbeat_dead_peers_total": "2x146 3x14"},
}  # fmt: skip


def _series(values: dict[str, str]) -> list[dict[str, str]]:
    made = []
    for name, numbers in values.items():
        family, _, label = name.partition("|")
        labels = NODE
        if label:
            key, _, value = label.partition("=")
            labels += f',{key}="{value}"'
        made.append({"series": f"{family}{{{labels}}}", "values": numbers})
    return made


def _check(folder: Path, expected: str | None, values: dict[str, str]) -> str:
    """Ask promtool whether exactly this alert is fired; returns what it says if it is not so."""
    tests = []
    for alert in FAULTS:
        test = {"eval_time": f"{MINUTES}m", "alertname": alert}
        tests.append(test)
    asked = {
        "rule_files": [str(RULES)], "evaluation_interval": INTERVAL,
        "tests": [
            {"interval": INTERVAL, "input_series": _series(values), "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": f"{MINUTES}m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{expected}"}}', "value": 1}
                    ] if expected else [],
                }
            ]}
        ],
    }  # fmt: skip
    file = folder / "test.yml"
    file.write_text(json.dumps(asked))
    promtool = str(program("promtool", "prometheus"))
    done = subprocess.run([promtool, "test", "rules", str(file)], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_no_alert_without_a_fault(tmp_path: Path) -> None:
    assert _check(tmp_path, None, HEALTHY) == ""


@pytest.mark.parametrize("alert", FAULTS)
def test_an_alert_is_fired_by_its_fault_and_only_by_it(alert: str, tmp_path: Path) -> None:
    assert FAULTS[alert].keys() <= HEALTHY.keys()
    assert _check(tmp_path, alert, {**HEALTHY, **FAULTS[alert]}) == ""


def test_every_alert_has_a_fault_and_its_part_of_the_runbook() -> None:
    text = RULES.read_text()
    alerts = re.findall(r"- alert: (\w+)", text)
    assert alerts == list(FAULTS)
    runbook = OPERATE.read_text()
    for alert in alerts:
        assert f"runbook: docs/operate.md#{alert.lower()}\n" in text
        assert f"### {alert}\n" in runbook


def test_they_ask_for_metrics_that_there_are() -> None:
    known = {family.sample for family in collector.FAMILIES} | {"keyfront_queue_seconds_bucket"}
    known |= {"keyfront_queue_seconds_sum", "keyfront_queue_seconds_count"}
    for text in (RULES.read_text(), "\n".join(HEALTHY)):
        assert set(re.findall(r"\b(keyfronts?_\w+|keyfront_\w+)", text)) <= known


def test_prometheus_loads_the_rules_and_reads_a_node(tmp_path: Path) -> None:
    prometheus = str(program("prometheus", "prometheus"))
    counts = NodeCounts()
    counts.share(tmp_path / "node")
    counts.begin()
    metrics, port = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "3s", "scrape_timeout": "3s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": "keyfront", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}
        ],
    }
    file = tmp_path / "prometheus.yml"
    file.write_text(json.dumps(config))
    keyfront = [str(Path(sys.prefix, "bin", "keyfront")), "metrics", "--node", f"{tmp_path}/node"]
    keyfront += ["--tokens", str(tmp_path), "--listen", f"127.0.0.1:{metrics}"]
    server = [
        prometheus, f"--config.file={file}", f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip

    def asked(path: str) -> dict[str, object]:
        try:
            with urlopen(f"http://127.0.0.1:{port}/api/v1/{path}") as answer:
                found: dict[str, object] = json.load(answer)["data"]
                return found
        except (OSError, HTTPException, ValueError):
            return {}

    with (
        running(keyfront, tmp_path / "metrics.out", signal.SIGTERM),
        running(server, tmp_path / "prometheus.out", signal.SIGTERM),
    ):
        wait_for(
            lambda: asked("query?query=keyfront_workers").get("result"), "it has read the node"
        )
        found = asked("rules")
        (group,) = found["groups"]  # type: ignore[misc]
        assert {rule["name"] for rule in group["rules"]} == set(FAULTS)
        assert all(rule["health"] in ("ok", "unknown") for rule in group["rules"])
        dashboard = json.loads(DASHBOARD.read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):  # a row has none
                expression = target["expr"].replace("$instance", ".*")
                expression = re.sub(r"\$__\w+", "1m", expression)
                assert asked(f"query?query={_quoted(expression)}"), expression


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text)

"""The objects for the Prometheus operator: they fit its schemas, hold all rules, and route as `gpuwarden init` does."""

import copy
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from deploy.standalone import package_data
from testbed import chart
from testbed.check_release import run_part
from testbed.kubernetes import operator

SITE = {
    "route": {"receiver": "site", "routes": [{"receiver": "pager", "matchers": ['severity="critical"']}]},
    "receivers": [{"name": "site"}, {"name": "pager"}],
}


@pytest.fixture(scope="module")
def objects() -> list[dict[str, Any]]:
    return chart.kustomize(chart.MANIFESTS / "operator")


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def problems(its: dict[str, Any]) -> list[str]:
    """What the schema of the operator refuses."""
    found = jsonschema_rs.validator_for(operator.schema(its["kind"])).iter_errors(its)
    return [f"{its['kind']} {its['metadata']['name']}{each.instance_path}: {each.message}" for each in found]


def test_objects_fit_the_schemas_of_the_operator(objects: list[dict[str, Any]]) -> None:
    assert {each["kind"] for each in objects} == set(operator.KINDS)
    assert [problem for each in objects for problem in problems(each)] == []


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "intervall"), "10s"),
        ("PodMonitor", ("spec", "podMetricsEndpoints", 0, "interval"), "10 s"),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0, "expr"), True),
        ("AlertmanagerConfig", ("spec", "route", "group_wait"), "0s"),
        ("AlertmanagerConfig", ("spec", "receivers", 0, "webhookConfigs", 0, "httpConfig", "credentials_file"), "x"),
    ],
)
def test_schemas_refuse_wrong_fields(
    objects: list[dict[str, Any]], kind: str, path: tuple[str | int, ...], value: object
) -> None:
    its: Any = copy.deepcopy(of_kind(objects, kind)[0])
    where = its
    for each in path[:-1]:
        where = where[each]
    where[path[-1]] = value

    assert len(problems(its)) == 1


@pytest.mark.needs_parts
def test_rules_are_those_that_ship(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    groups = [group for each in of_kind(objects, "PrometheusRule") for group in each["spec"]["groups"]]
    shipped = [group for path in package_data.rules() for group in yaml.safe_load(path.read_text())["groups"]]

    assert sorted(each["name"] for each in groups) == sorted(each["name"] for each in shipped)
    links = {rule["annotations"].pop("runbook_url").rpartition("/")[0] for group in (*groups, *shipped)
             for rule in group["rules"] if "alert" in rule}  # fmt: skip
    assert links == {f"http://{host}:9836/docs/runbooks" for host in ("127.0.0.1", "gpuwarden-remediator.gpuwarden")}
    rules = {group["name"]: group["rules"] for group in groups}
    assert rules == {group["name"]: group["rules"] for group in shipped}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump({"groups": groups}))
    assert run_part("promtool", "check", "rules", str(tmp_path / "all.yaml")) == []


@pytest.mark.needs_parts
@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ({"alertname": "GpuwardenWatchdog", "severity": "none"}, "watchdog"),
        ({"alertname": "GpuwardenJobStalled", "remedy": "restart_worker", "host": "a"}, "remedies"),
        ({"alertname": "GpuwardenDrill", "remedy": "drill", "host": "a"}, "remedies"),
        # A lost host is for people too, so it needs a route of the site.
        (
            {"alertname": "GpuwardenHostLost", "remedy": "hold_lost_host", "host": "a", "severity": "critical"},
            "remedies,pager",
        ),
        # The remediator would refuse these.
        ({"alertname": "OfTeam", "remedy": "unknown", "host": "a"}, "site"),
        ({"alertname": "GpuwardenJobStalled", "remedy": "restart_worker"}, "site"),
        ({"alertname": "GpuwardenExporterDown", "host": "a"}, "site"),
    ],
)
def test_alerts_reach_the_remediator_and_the_routes_of_the_site(
    objects: list[dict[str, Any]], labels: dict[str, str], receivers: str, tmp_path: Path
) -> None:
    config = operator.alertmanager_config(of_kind(objects, "AlertmanagerConfig"), SITE, lambda *_: "token")
    file = tmp_path / "alertmanager.yml"
    file.write_text(yaml.safe_dump(config))
    expected = [f"gpuwarden/gpuwarden-{each}/gpuwarden" if each in ("watchdog", "remedies") else each
                for each in receivers.split(",")]  # fmt: skip

    assert run_part("amtool", "check-config", str(file)) == []
    asked = ["config", "routes", "test", f"--config.file={file}", f"--verify.receivers={','.join(expected)}"]
    assert run_part("amtool", *asked, *(f"{name}={value}" for name, value in labels.items())) == []

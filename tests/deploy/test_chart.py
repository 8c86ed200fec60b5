"""The Helm chart renders the objects of the Kustomize manifests, and refuses wrong values."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml

from gpuwarden import __version__
from testbed import chart
from testbed.kubernetes import helm

Object = dict[str, Any]


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm on the chart."""
    return subprocess.run([str(helm.find()), command, *arguments], capture_output=True, text=True, check=False)


def template(*options: str, space: str = "gpuwarden") -> list[Object]:
    """The objects of the chart."""
    done = run("template", "gpuwarden", str(chart.CHART), f"--namespace={space}", *options)
    assert done.returncode == 0, done.stderr
    return chart.load(done.stdout)


def by_name(objects: Sequence[Object]) -> dict[tuple[str, ...], Object]:
    """Objects by kind, namespace and name."""
    named: dict[tuple[str, ...], Object] = {}
    for each in objects:
        its = each["metadata"]
        named[each["apiVersion"], each["kind"], its.get("namespace", ""), its["name"]] = each
    assert len(named) == len(objects)
    return named


def kustomized(storage: str, options: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], Object]:
    """The objects of an overlay and of optional folders in their namespaces, as Helm should have them.

    The namespace itself is made by `helm install --create-namespace`.
    """
    objects = chart.kustomize(chart.MANIFESTS / "overlays" / chart.STORAGES[storage])
    for name, spaces in options.items():
        for space in spaces:
            for each in chart.kustomize(chart.MANIFESTS / name):
                if each["kind"].startswith("Role"):
                    each["metadata"]["namespace"] = space
                for rule in each.get("rules", ()):
                    if "resourceNames" in rule and name == "demand-gate":
                        rule["resourceNames"] = ["painter"]
                objects.append(each)
    return by_name([each for each in objects if each["kind"] != "Namespace"])


def test_templates_are_up_to_date() -> None:
    """To fix it: `python -m testbed.chart`."""
    assert chart.main(["--check"]) == 0


def test_every_folder_of_manifests_is_in_the_chart() -> None:
    """To fix it: name the folder in OPTIONS of testbed/chart.py, with the value that turns it on."""
    found = {str(each.parent.relative_to(chart.MANIFESTS)) for each in chart.MANIFESTS.rglob("kustomization.yaml")}

    assert found == {"base", *chart.OPTIONS, *(f"overlays/{name}" for name in chart.STORAGES.values())}


@pytest.mark.helm
@pytest.mark.parametrize("storage", chart.STORAGES)
@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([], {}),
        (["admission.enabled=true"], {"admission": [""]}),
        (["taint.enabled=true"], {"taint": [""]}),
        (["evict.namespaces={team-a,team-b}"], {"evict": ["team-a", "team-b"]}),
        (
            ["demandGate.deployments.team-a={painter}", "demandGate.deployments.team-b={painter}"],
            {"demand-gate": ["team-a", "team-b"]},
        ),
        (["operator.enabled=true"], {"operator": [""]}),
    ],
    ids=["default", "admission", "taint", "evict", "demand gate", "operator"],
)
def test_chart_renders_the_objects_of_kustomize(
    storage: str, values: list[str], options: Mapping[str, Sequence[str]]
) -> None:
    """To fix it: `python -m testbed.chart`, and bring deploy/helm/values.yaml up to date."""
    rendered = by_name(template(*(f"--set={each}" for each in (f"storage={storage}", *values))))
    expected = kustomized(storage, options)

    # Instead of a hash in the ConfigMap's name, a checksum restarts the pods.
    node = rendered["apps/v1", "DaemonSet", "gpuwarden", "gpuwarden-node"]
    assert len(node["spec"]["template"]["metadata"].pop("annotations")["checksum/settings"]) == 64
    if "evict" in options:
        settings = rendered["v1", "ConfigMap", "gpuwarden", "gpuwarden-settings"]["data"]
        for program in ("EXPORTER", "REMEDIATOR"):
            assert settings.pop(f"GPUWARDEN_{program}_POD_NAMESPACES") == "team-a,team-b"
    if "demand-gate" in options:
        settings = rendered["v1", "ConfigMap", "gpuwarden", "gpuwarden-settings"]["data"]
        for program in ("EXPORTER", "REMEDIATOR"):
            assert settings.pop(f"GPUWARDEN_{program}_DEMAND_GATE_NAMESPACES") == "team-a,team-b"
    assert set(rendered) == set(expected)
    for name, its in expected.items():
        assert rendered[name] == its, name


@pytest.mark.helm
def test_another_namespace_and_resource_are_used_throughout() -> None:
    values = ["storage=postgres", "admission.enabled=true", "evict.namespaces={team}", "resourceName=example.com/mib"]
    text = yaml.safe_dump_all(template(*(f"--set={each}" for each in values), space="elsewhere"))

    assert "namespace: gpuwarden" not in text
    assert "system:serviceaccount:elsewhere:gpuwarden-node" in text
    assert "gpuwarden/vram-mib" not in text
    assert "'example.com/mib'" in text
    assert "GPUWARDEN_REMEDIATOR_BUDGET_RESOURCE: example.com/mib" in text


@pytest.mark.helm
def test_values_reach_the_pods() -> None:
    values = [
        "image.repository=registry.example/gpuwarden",
        "image.tag=v2",
        "image.pullSecrets[0].name=registry",
        "runtimeClassName=nvidia",
        "priorityClassName=of-mine",
        "resources.executor.limits.memory=1Gi",
        r"nodeSelector.nvidia\.com/gpu\.present=null",
        "nodeSelector.gpu=amd",
    ]
    objects = by_name(template(*(f"--set={each}" for each in values)))
    spec = objects["apps/v1", "DaemonSet", "gpuwarden", "gpuwarden-node"]["spec"]["template"]["spec"]

    containers = {each["name"]: each for each in (*spec["initContainers"], *spec["containers"])}
    assert {each["image"] for each in containers.values()} == {"registry.example/gpuwarden:v2"}
    assert containers["executor"]["resources"]["limits"] == {"memory": "1Gi"}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["runtimeClassName"] == "nvidia"
    assert spec["nodeSelector"] == {"gpu": "amd"}
    assert spec["priorityClassName"] == "of-mine"
    (scope,) = objects["v1", "ResourceQuota", "gpuwarden", "gpuwarden-critical"]["spec"]["scopeSelector"][
        "matchExpressions"
    ]
    assert scope["values"] == ["of-mine"]


@pytest.mark.helm
def test_setting_of_the_user_wins_and_restarts_the_pods() -> None:
    node, settings = (
        ("apps/v1", "DaemonSet", "gpuwarden", "gpuwarden-node"),
        ("v1", "ConfigMap", "gpuwarden", "gpuwarden-settings"),
    )
    before, after = (
        by_name(template(*options))
        for options in ([], ["--set-string=settings.GPUWARDEN_EXPORTER_PODS=off,settings.GPUWARDEN_QUEUE_DB=1000000"])
    )

    assert after[settings]["data"] == {
        **before[settings]["data"],
        "GPUWARDEN_EXPORTER_PODS": "off",
        "GPUWARDEN_QUEUE_DB": "1000000",
    }
    checksums = {
        its[node]["spec"]["template"]["metadata"]["annotations"]["checksum/settings"] for its in (before, after)
    }
    assert len(checksums) == 2


@pytest.mark.helm
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("storage=mysql", "at '/storage': value must be one of 'sqlite', 'postgres'"),
        ("setings.GPUWARDEN_SEATS=on", "additional properties 'setings' not allowed"),
        ("settings.SEATS=on", "'SEATS' does not match pattern '^GPUWARDEN_"),
        ("settings.GPUWARDEN_EXPORTER_PORT=1", "at '/settings/GPUWARDEN_EXPORTER_PORT': got number, want string"),
        ("priorityClassName=", "at '/priorityClassName': '' does not match pattern"),
        ("evict.namespaces=team", "at '/evict/namespaces': got string, want array"),
        ("resources.exporters.limits.memory=1Gi", "at '/resources': additional properties 'exporters' not allowed"),
    ],
)
def test_wrong_value_is_refused_with_its_place(value: str, message: str) -> None:
    done = run("template", "gpuwarden", str(chart.CHART), f"--set={value}")

    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.helm
def test_helm_finds_nothing_to_complain_about() -> None:
    done = run("lint", "--strict", str(chart.CHART))

    assert done.returncode == 0, done.stdout


def test_chart_has_the_version_of_the_project() -> None:
    described = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())

    assert described["version"] == described["appVersion"] == __version__

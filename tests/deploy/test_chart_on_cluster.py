"""The Helm chart on a real cluster: installed with the operator's objects, upgraded and uninstalled."""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from kubernetes.client import CoreV1Api

from deploy.standalone import debian_packages
from testbed import chart
from testbed.kubernetes import helm, operator, pods
from testbed.kubernetes.cluster import Cluster
from testbed.kubernetes.images import BASE
from tests import manifests
from tests.manifests import AS_ALERTMANAGER, SPACE, TOKEN, WEB, Kubectl, ready_pods, seats
from tests.remediator.listening import listening
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.helm, pytest.mark.slow, pytest.mark.needs_parts]

OF_OPERATOR = "podmonitors,prometheusrules,alertmanagerconfigs"
KINDS = f"namespaces,clusterroles,clusterrolebindings,roles,rolebindings,{OF_OPERATOR}"

NODE = "gpuwarden-node"

Helm = Callable[..., str]


@pytest.fixture
def run_helm(cluster: Cluster) -> Helm:
    """Run Helm as the administrator."""

    def run(*arguments: str) -> str:
        command = [str(helm.find()), f"--kubeconfig={cluster.kubeconfig}", f"--namespace={SPACE}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def core(cluster: Cluster) -> CoreV1Api:
    return CoreV1Api(cluster.api())


@pytest.fixture
def kubectl(cluster: Cluster) -> Kubectl:
    return Kubectl(cluster)


@pytest.fixture
def gpu_node(cluster: Cluster) -> Iterator[None]:
    with manifests.gpu_node(cluster):
        yield


@pytest.fixture
def operator_kinds(cluster: Cluster, kubectl: Kubectl, tmp_path: Path) -> Iterator[None]:
    """The cluster knows the kinds of the Prometheus operator."""
    file = tmp_path / "crds.yaml"
    file.write_text(yaml.safe_dump_all(operator.definition(kind) for kind in operator.KINDS))
    kubectl("apply", "--server-side", "-f", str(file))
    for kind, version in operator.KINDS.items():
        path = f"/apis/monitoring.coreos.com/{version}/{kind.lower()}s"
        cluster.wait(partial(cluster.get, path), f"{kind} in the API")
    yield
    kubectl("delete", "-f", str(file))


@contextmanager
def installed(run_helm: Helm, kubectl: Kubectl, *options: str) -> Iterator[str]:
    """A release of the chart. Yields what Helm says."""
    try:
        yield run_helm("install", "gpuwarden", str(chart.CHART), "--create-namespace", *options)
        run_helm("uninstall", "gpuwarden", "--wait")
    finally:
        kubectl("delete", "namespace", SPACE, "--ignore-not-found")


def settings(folder: Path, **values: object) -> str:
    """An option of Helm with the test's image and settings, and more values."""
    repository, _, tag = BASE.rpartition(":")
    image = {"repository": repository, "tag": tag}
    file = folder / "values.yaml"
    file.write_text(json.dumps({"image": image, "settings": dict(manifests.SETTINGS), **values}))
    return f"--values={file}"


def items(kubectl: Kubectl, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(kubectl("get", kind, f"--namespace={SPACE}", "-o", "json"))["items"]
    return found


@contextmanager
def operated(kubectl: Kubectl, cluster: Cluster, address: str, folder: Path) -> Iterator[str]:
    """Prometheus and Alertmanager configured by the operator's objects. The webhook's service is `address`.

    Yields the URL of Prometheus.
    """

    def secret(name: str, key: str) -> str:
        data = CoreV1Api(cluster.api()).read_namespaced_secret(name, SPACE).data
        return str(yaml.safe_load(f"!!binary {data[key]}").decode())

    def program(name: str, config: object, *options: str) -> Sequence[str]:
        text = yaml.safe_dump(config).replace(f"gpuwarden-remediator.{SPACE}:", f"{address}:")
        (folder / f"{name}.yml").write_text(text)
        found = str(debian_packages.find(name))
        return [
            found,
            f"--config.file={folder}/{name}.yml",
            "--web.listen-address=127.0.0.1:0",
            "--log.format=json",
            *options,
        ]

    site = {"route": {"receiver": "site"}, "receivers": [{"name": "site"}]}
    routes = operator.alertmanager_config(items(kubectl, "alertmanagerconfigs"), site, secret)
    groups = [group for each in items(kubectl, "prometheusrules") for group in each["spec"]["groups"]]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
    monitors = items(kubectl, "podmonitors")
    found = items(kubectl, "pods")
    scrapes = [each for its in monitors for each in operator.scrape_configs(its, found, secret)]
    alertmanager = program("alertmanager", routes, f"--storage.path={folder}/a", "--cluster.listen-address=")
    with listening(alertmanager, folder / "alertmanager.log") as receiver:
        target = receiver.removeprefix("http://")
        config = {
            "global": {"evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [target]}]}]},
            "scrape_configs": [{**each, "scrape_interval": "1s"} for each in scrapes],
        }
        prometheus = program("prometheus", config, f"--storage.tsdb.path={folder}/p", "--rules.alert.resend-delay=1s")
        with listening(prometheus, folder / "prometheus.log") as url:
            yield url


def metrics(pod: Any) -> str:
    """The metrics of the webhook."""
    return httpx.get(f"http://{pod.status.pod_ip}:9836/metrics", headers=AS_ALERTMANAGER).text


def names(kubectl: Kubectl) -> set[str]:
    """Names of all objects of `KINDS`."""
    return set(kubectl("get", KINDS, "--all-namespaces", "-o", "name").split())


def query(prometheus: str, promql: str) -> list[dict[str, str]]:
    """Labels of the series that the query returns."""
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": promql}, trust_env=False)
    return [each["metric"] for each in answer.raise_for_status().json()["data"]["result"]]


@pytest.mark.usefixtures("gpu_node", "operator_kinds")
@pytest.mark.behaviour("C9")
def test_chart_is_installed_upgraded_and_uninstalled(
    cluster: Cluster, core: CoreV1Api, kubectl: Kubectl, run_helm: Helm, namespace: str, tmp_path: Path
) -> None:
    before = names(kubectl)
    core.create_namespaced_pod(namespace, pods.pod("tenant"))
    manifests.write_gpus(tmp_path, [{}])
    values = settings(tmp_path, operator={"enabled": True}, evict={"namespaces": [namespace]})

    with installed(run_helm, kubectl, values) as notes:
        assert "kubectl create secret generic gpuwarden-web --namespace gpuwarden" in notes
        assert "alertmanagerConfigMatcherStrategy: {type: None}" in notes
        (node,) = items(kubectl, "daemonsets")
        patch = json.dumps(manifests.patch(node, tmp_path))
        kubectl("patch", f"--namespace={SPACE}", "daemonset/gpuwarden-node", f"--patch={patch}")
        kubectl.secret("gpuwarden-web", f"--from-literal=web.yml={WEB}", f"--from-literal=token={TOKEN}")
        cluster.wait(lambda: ready_pods(core, NODE), "ready pod of the node")
        cluster.wait(lambda: seats(core, cluster) == "14k", "seats of the node")
        assert "gpuwarden-evict" in kubectl("get", "roles", f"--namespace={namespace}", "-o", "name")

        (first,) = ready_pods(core, NODE)
        with operated(kubectl, cluster, first.status.pod_ip, tmp_path) as prometheus:
            eventually(
                lambda: "\ngpuwarden_remediator_watchdog_timestamp_seconds" in metrics(first),
                "the watchdog arrives at the webhook",
                log=(tmp_path / "alertmanager.log").read_text,
            )
            up = eventually(
                lambda: found if len(found := query(prometheus, "up == 1")) == 3 else None, "all programs answer"
            )
            expected = {"__name__": "up", "host": cluster.node}
            jobs = {"gpuwarden-exporter": 29835, "gpuwarden-gateway-host": 29837, "gpuwarden-remediator": 9836}
            assert sorted(up, key=lambda its: its["job"]) == [
                {**expected, "job": job, "instance": f"{first.status.pod_ip}:{port}"} for job, port in jobs.items()
            ]
            info = f'gpuwarden_container_info{{container="{namespace}/tenant/main",host="{cluster.node}"}}'
            eventually(lambda: query(prometheus, info), "the container of a pod has its own name")

        run_helm("upgrade", "gpuwarden", str(chart.CHART), values)
        assert [each.metadata.uid for each in ready_pods(core, NODE)] == [first.metadata.uid]

        changed = {**manifests.SETTINGS, "GPUWARDEN_REMEDIATOR_SEATS": "dry-run"}
        run_helm("upgrade", "gpuwarden", str(chart.CHART), settings(tmp_path, settings=changed))
        (second,) = eventually(
            lambda: [each for each in ready_pods(core, NODE) if each.metadata.uid != first.metadata.uid],
            "a pod with the new settings",
            within_s=90,
            log=lambda: kubectl("describe", "pods,daemonsets", f"--namespace={SPACE}"),
        )
        shown = ["exec", f"--namespace={SPACE}", second.metadata.name, "--container=executor", "--", "sh", "-c"]
        assert kubectl(*shown, "echo $GPUWARDEN_REMEDIATOR_SEATS") == "dry-run\n"
        assert kubectl("get", "roles", f"--namespace={namespace}", "-o", "name") == ""
        assert items(kubectl, OF_OPERATOR) == []
        kubectl.remove_seats()

    # Namespaces of earlier tests may still be ending.
    cluster.wait(lambda: names(kubectl) <= before, "removal of all")

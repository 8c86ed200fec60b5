"""`gpuwarden seats`: figures of nodes and GPUs, problems, and removal."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from remediator.clients.nodes import TAINT
from remediator.commands import seats
from remediator.seats import POLICIES, RESOURCE
from tests.conftest import Cli
from tests.remediator.builders import HOST
from tests.remediator.kubernetes_api import Api, Failure, kubernetes_api, pod
from tests.remediator.prometheus import Scraped, prometheus
from tests.waiting import eventually

pytestmark = pytest.mark.behaviour("C1")

MIB = 2**20


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(seats, "COMES_BACK_S", 0.1)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("GPUWARDEN_REMEDIATOR_PROMETHEUS", "http://127.0.0.1:1")
    with kubernetes_api(tmp_path / "kubeconfig") as api:
        api.name = HOST
        api.capacity[RESOURCE] = "14k"
        api.pods = [pod(8000, HOST), pod(5300, HOST), pod(1, "other")]
        yield api


@pytest.fixture
def prometheus_url(tmp_path: Path) -> Iterator[str]:
    """A Prometheus that knows two GPUs of the node. Two pods are on the first."""
    with Scraped() as host:
        host.series = {
            (name, labels): float(mib * MIB)
            for name, labels, mib in (
                ("gpuwarden_gpu_memory_size_bytes", 'gpu="GPU-0"', 15360),
                ("gpuwarden_gpu_memory_size_bytes", 'gpu="GPU-1"', 15360),
                ("gpuwarden_gpu_memory_used_bytes", 'gpu="GPU-0"', 9000),
                ("gpuwarden_gpu_memory_used_bytes", 'gpu="GPU-1"', 100),
                ("gpuwarden_container_gpu_memory_bytes", 'container="a",gpu="GPU-0"', 4000),
                ("gpuwarden_container_gpu_memory_bytes", 'container="b",gpu="GPU-0"', 5000),
                ("gpuwarden_container_gpu_memory_peak_bytes", 'container="a",gpu="GPU-0"', 7000),
                ("gpuwarden_container_gpu_memory_peak_bytes", 'container="b",gpu="GPU-0"', 5100),
                ("gpuwarden_container_gpu_memory_peak_bytes", 'container="c",gpu="GPU-1"', 90),
                ("gpuwarden_container_gpu_memory_budget_bytes", 'container="a"', 10000),
                ("gpuwarden_container_gpu_memory_budget_bytes", 'container="b"', 8000),
            )
        }
        with prometheus(tmp_path / "prometheus", host.address) as url:
            yield url


@pytest.mark.usefixtures("api")
def test_show_prints_figures_of_each_node(command: Cli) -> None:
    code, said, error = command("seats", "show")

    assert code == 0
    assert said.splitlines()[1].split() == [HOST, "14000", "13300", "700", "-", "-"]
    assert "used and peak are unknown, http://127.0.0.1:1 does not answer" in error


@pytest.mark.needs_parts
@pytest.mark.usefixtures("api")
def test_figures_of_each_gpu_come_from_prometheus(prometheus_url: str, command: Cli) -> None:
    asked = ("seats", "show", "--prometheus", prometheus_url)
    eventually(lambda: "peak 12100" in command(*asked)[1], "Prometheus has the series")

    said = command(*asked)[1].splitlines()
    document = json.loads(command(*asked, "--json")[1])

    assert said[1].split() == [HOST, "14000", "13300", "700", "9100", "12190"]
    assert said[2:] == [
        f"{HOST} GPU-0: 15360 MiB, declared 18000, used 9000, peak 12100",
        f"{HOST} GPU-1: 15360 MiB, declared -, used 100, peak 90",
    ]
    assert (document["used_mib"], document["peak_mib"], len(document["gpus"])) == (9100, 12190, 2)
    code, said_of_check, _ = command("seats", "check", "--prometheus", prometheus_url)
    assert (code, "pods on GPU-0 of box1 declare 18000 MiB and it has 15360" in said_of_check) == (1, True)


@pytest.mark.usefixtures("api")
def test_check_prints_no_problem(command: Cli) -> None:
    code, said, _ = command("seats", "check", "--prometheus", "none")

    assert code == 0
    note, last = said.splitlines()
    assert note.startswith(f"note: {HOST}: drain it before it is rebuilt. A kubelet that starts with an empty")
    assert note.endswith("ends all 2 pods that declare 13300 MiB")
    assert last == "no problem found"


def test_check_finds_what_is_missing(api: Api, command: Cli) -> None:
    del api.capacity[RESOURCE]
    api.policies = ["other"]

    code, said, _ = command("seats", "check", "--json", "--prometheus", "none")
    found = json.loads(said)

    assert (code, found["ok"]) == (1, False)
    assert [each.partition(":")[0] for each in found["problems"]] == [
        f"{HOST} advertises no seats",
        f"{HOST} advertises 0 MiB and its pods declare 13300",
        f"no binding of ValidatingAdmissionPolicy {', '.join(POLICIES)}",
    ]


def test_check_names_a_pod_with_an_invalid_budget(api: Api, command: Cli) -> None:
    api.pods += [pod("1e12", HOST, phase="Pending"), pod("9" * 20, "dead")]

    code, said, _ = command("seats", "check", "--prometheus", "none")

    assert code == 1
    assert f"problem: pod n/p1e12 on {HOST}: the limit of {RESOURCE} is '1000000000000'; expected whole MiB" in said
    assert command("seats", "show")[1].splitlines()[1].split()[:4] == [HOST, "14000", "13300", "700"]


def test_server_without_admission_policies_is_a_note(api: Api, command: Cli) -> None:
    api.failures["bindings"] = [Failure(status=404)]

    code, said, _ = command("seats", "check", "--prometheus", "none")

    assert code == 0
    assert "note: no ValidatingAdmissionPolicies before Kubernetes 1.30" in said


def test_cluster_without_gpu_nodes_is_a_problem(api: Api, command: Cli) -> None:
    api.labels, api.capacity = {}, {}

    code, said, _ = command("seats", "check", "--prometheus", "none")

    assert code == 1
    assert "problem: no node has one of the labels nvidia.com/gpu.present=true" in said
    assert "no node has one of the labels" in command("seats", "show", "--prometheus", "none")[2]


def test_remove_takes_the_key_away(api: Api, command: Cli) -> None:
    code, said, _ = command("seats", "remove", HOST, "other")

    assert (code, RESOURCE in api.capacity, api.capacity["cpu"]) == (0, False, "2")
    assert said.splitlines() == [
        f"{HOST} advertises no seats any more, and its pods run on",
        "other advertised no seats",
    ]
    assert command("seats", "remove", "--all")[1] == "no node advertises seats\n"


@pytest.mark.parametrize("named", [[], ["--all", HOST]])
def test_remove_needs_names_or_all(api: Api, command: Cli, named: list[str]) -> None:
    code, _, error = command("seats", "remove", *named)

    assert (code, error) == (1, "gpuwarden seats: give the names of nodes, or --all\n")
    assert api.capacity[RESOURCE] == "14k"


def test_api_that_refuses_is_a_clear_error(api: Api, command: Cli) -> None:
    api.failures["list"] = [Failure(status=403)]

    code, _, error = command("seats", "show", "--prometheus", "none")

    assert code == 1
    assert "cannot list nodes: HTTP 403: as the test says; grant the account this verb" in error


def test_untaint_removes_the_taint_of_faulty_gpus_alone(api: Api, command: Cli) -> None:
    foreign = {"key": TAINT["key"], "effect": "NoExecute"}
    api.taints = [foreign, TAINT]
    api.failures["patch"] = [Failure(status=409), Failure(status=409)]  # the kubelet writes the status

    assert command("seats", "untaint", "--all")[:2] == (0, f"{HOST} may get new pods: its taint is removed\n")
    assert api.taints == [foreign]
    assert command("seats", "untaint", HOST)[:2] == (0, f"{HOST} had no taint of a faulty GPU\n")
    assert command("seats", "untaint")[2] == "gpuwarden seats: give the names of nodes, or --all\n"

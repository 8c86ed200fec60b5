"""A hung worker in a pod without a database: its pod is evicted, and the next pod completes its job.

Worker and gateway are those of the documentation and the manifests. The other programs run on this host.
"""

import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from kubernetes import client

from deploy.standalone.stack import CHECKOUT, Chain, Plan
from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator.clients.exporter import ExporterClient
from remediator.ledger.ledger import Ledger
from remediator.plan import ContainerState
from testbed import workers
from testbed.demo.job_body import Script
from testbed.gpu_simulator import SimulatedGpus, Slot
from testbed.kubernetes import pods
from testbed.kubernetes.cluster import Cluster
from testbed.kubernetes.images import BASE
from testbed.stage import FAST, Stage, with_action
from testbed.workers import QUEUE, WorkerOptions
from tests import manifests
from tests.tenants import Tenants, pod_settings
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.needs_parts, pytest.mark.slow]

WORKER: Final = "trainer"
STALL_TIMEOUT_S: Final = 6.0
SCRIPT: Final = Script(picture="pod", steps=6, wedge_attempts=1, wedge_after_step=3)


def stateful_set(run: Path, data: Path) -> dict[str, Any]:
    """The worker of docs/how-to/kubernetes.md, with the demo's job. The folder of state files is `run`."""
    page = (CHECKOUT / "docs/how-to/kubernetes.md").read_text()
    (text,) = re.findall(r"<!-- file: worker.yaml -->\n```yaml\n(.*?)```", page, re.DOTALL)
    its: dict[str, Any] = yaml.safe_load(text)
    template = its["spec"]["template"]
    manifests.move_volumes(template["spec"], {manifests.STATE: run})
    template["spec"]["terminationGracePeriodSeconds"] = 0
    for each in (*template["spec"]["initContainers"], *template["spec"]["containers"]):
        each["image"] = BASE
    for each in template["spec"]["initContainers"]:
        each["command"] = ["sh", "-c", shlex.join(each["command"])]  # busybox has `chown` in its shell
    (container,) = template["spec"]["containers"]
    job = ["--queue", QUEUE, "--handler", workers.BODY, "--heartbeat-s", "2"]
    container["command"] = [pods.python(), "-m", *(each for each in container["command"] if each != "tasks"), *job]
    container["env"] += [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-sim-pod"},
        {"name": "GPUWARDEN_DEMO_DATA", "value": "/data"},
    ]
    container["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    template["spec"]["volumes"].append({"name": "data", "hostPath": {"path": str(data)}})
    pods.with_project(template)
    return its


@pytest.fixture(scope="module")
def scene(work: Path, cluster: Cluster) -> Iterator[tuple[Stage, Tenants, ContainerState]]:
    """The chain after the job of the worker has completed."""
    run, data = work / "run", work / "data"
    for each in (run, data):
        each.mkdir()
    os.chown(data, 1000, 1000)  # the worker is not root
    namespace = cluster.new_namespace()
    with ExitStack() as stack:
        stack.callback(cluster.delete_namespace, namespace)
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in pod_settings(cluster, namespace).items():
            environment.setenv(name, value)
        slots = [Slot(worker=WORKER, gpus=("GPU-sim-pod",))]
        gpus = stack.enter_context(SimulatedGpus(work / "gpus.json", directory=run, slots=slots))
        plan = Plan(work=work, host=cluster.node, docker=None, simulate_gpu=work / "gpus.json", armed=True)
        plan = replace(plan, intervals=FAST, ram_idle_mib=24)
        chain = stack.enter_context(Chain(plan))
        store = stack.enter_context(closing(JobStore.open(chain.queue_url)))
        ledger = stack.enter_context(closing(Ledger.open(chain.ledger_url)))
        witness = stack.enter_context(closing(ExporterClient(chain.exporter_url)))
        fleet = workers.ProcessFleet(
            [], workers.HostPaths(directory=run, queue=work / "queue", data=data), queues={}, options=WorkerOptions()
        )
        found = Stage(
            slots=slots, fleet=fleet, gpus=gpus, chain=chain, store=store, ledger=ledger, witness=witness, data=data
        )
        tenants = Tenants(cluster, namespace)
        settings, gateway = manifests.gateway({manifests.STATE: run, manifests.DATA: work})
        tenants.core.create_namespaced_config_map(namespace, settings)
        tenants.core.create_namespaced_pod(namespace, gateway)
        client.AppsV1Api(tenants.api).create_namespaced_stateful_set(namespace, stateful_set(run, data))
        first = tenants.running(WORKER, "worker")
        job_id = found.submit(SCRIPT, now=time.time(), stall_timeout_s=STALL_TIMEOUT_S)
        eventually(
            lambda: store.job(job_id).state is State.COMPLETED and not ledger.episodes.list_open(),
            "the job is restarted and completes",
            within_s=180,
            log=lambda: chain.log_tail("execute", 30) + str(found.journal(WORKER)),
        )
        yield found, tenants, first


@pytest.mark.behaviour("A2")
@pytest.mark.behaviour("A8")
def test_hung_worker_pod_is_evicted_and_the_next_pod_completes_its_job(
    scene: tuple[Stage, Tenants, ContainerState],
) -> None:
    stage, tenants, first = scene
    (episode,) = with_action([each for each in stage.ledger.reports.newest() if each.worker == WORKER])
    text = "\n".join(f"{entry.act} {entry.what}: {entry.message}" for entry in stage.journal(WORKER))

    assert (episode.outcome, stage.store.job(1).attempt) == ("fixed", 2)
    assert [each.metadata.uid for each in tenants.named(WORKER)] != [first.incarnation.partition("@")[0]]
    pod = tenants.core.read_namespaced_pod("gateway", tenants.namespace)
    page = httpx.get(f"http://{pod.status.pod_ip}:29837/metrics").text
    done = re.findall(r'^gpuwarden_gateway_requests_total{operation="(.*)",outcome="done"}', page, re.MULTILINE)
    assert {"register", "claim", "complete"} <= set(done)
    assert ((stage.chain.directory / WORKER).stat().st_uid, (stage.chain.directory / "host").stat().st_uid) == (1000, 0)
    for step in ("did fence", "decided stop", "saw free: dead", "did requeue", "replaces it and is ready"):
        assert step in text

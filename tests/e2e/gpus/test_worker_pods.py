"""A hung worker in a pod: its pod is evicted, its job is settled, and the next pod completes it."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from kubernetes import client

from deploy.standalone.stack import Chain, Plan
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
from testbed.stage import FAST, Stage, with_action
from testbed.workers import QUEUE, WorkerOptions
from tests.tenants import MANAGED, Tenants, pod_settings
from tests.waiting import eventually

pytestmark = [pytest.mark.kube, pytest.mark.needs_parts, pytest.mark.slow]

WORKER: Final = "trainer"
STALL_TIMEOUT_S: Final = 6.0
SCRIPT: Final = Script(picture="pod", steps=6, wedge_attempts=1, wedge_after_step=3)


def worker_pod(paths: dict[str, Path]) -> dict[str, object]:
    """The template of the worker's pod. Paths of the host by the path in the pod."""
    command = workers._worker_command(
        WORKER, queue=QUEUE, store="sqlite:////queue/queue.db", options=WorkerOptions(heartbeat_s=2.0)
    )
    its = pods.with_project(pods.pod(WORKER, [pods.python(), *command], labels={"app": WORKER, **MANAGED}))
    (container,) = its["spec"]["containers"]
    container["env"] += [
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-sim-pod"},
        {"name": "GPUWARDEN_DEMO_DATA", "value": "/data"},
    ]
    for number, (inside, path) in enumerate(paths.items()):
        its["spec"]["volumes"].append({"name": f"v{number}", "hostPath": {"path": str(path)}})
        container["volumeMounts"].append({"name": f"v{number}", "mountPath": inside})
    return {"metadata": its["metadata"], "spec": its["spec"] | {"restartPolicy": "Always"}}


@pytest.fixture(scope="module")
def scene(work: Path, cluster: Cluster) -> Iterator[tuple[Stage, Tenants, ContainerState]]:
    """The chain after the job of the worker has completed."""
    run, data = work / "run", work / "data"
    for each in (run / WORKER, data):
        each.mkdir(parents=True)
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
        paths = {
            f"/run/gpuwarden/{WORKER}": run / WORKER,
            "/run/gpuwarden/host": run / "host",
            "/queue": work / "queue",
            "/data": data,
        }
        tenants = Tenants(cluster, namespace)
        about = {"serviceName": WORKER, "replicas": 1, "selector": {"matchLabels": {"app": WORKER}}}
        client.AppsV1Api(tenants.api).create_namespaced_stateful_set(
            namespace, {"metadata": {"name": WORKER}, "spec": about | {"template": worker_pod(paths)}}
        )
        first = tenants.running(WORKER)
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
    for step in ("did fence", "decided stop", "saw free: dead", "did requeue", "replaces it and is ready"):
        assert step in text

"""The cable of a host, or of Prometheus, is cut under jobs, commands and a task. Work is held, and ends once.

The left host reports to the central gateway, or is scraped as the right host is.
The left host's wall clock is ten minutes ahead, and the right host's ten minutes behind.
"""

import time
from collections.abc import Iterator
from typing import Final

import pytest

from gpuwarden.job import FINAL, State
from testbed import network_namespaces
from testbed.network_namespaces import NoNetwork
from testbed.postgres import Postgres
from tests.e2e.hosts.fleet import Door, Fleet, Times, ended, fleet, killed

pytestmark = [
    pytest.mark.needs_network,
    pytest.mark.needs_parts,
    pytest.mark.needs_postgres,
    pytest.mark.needs_compiler,
    pytest.mark.slow,
]

AHEAD_S: Final = {"left": 600, "right": -600}
BUDGET_S: Final = 550.0
"""Of every job: less than the difference of the clocks."""

BODY: Final = "tests.e2e.hosts.held_body:load"
GPU: Final = "GPU-left"
SHORT: Final = Times(lost_after_s=30, lease_s=120, heartbeat_s=1, scrape_s=1)
"""A host's gateway sends its heartbeats every 10 s."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((SHORT, Door.REPORTED), id="short"),
        pytest.param((Times(), Door.SCRAPED), id="default", marks=pytest.mark.nightly),
    ],
)
def hosts(
    tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("cables")
    with network_namespaces.network() as network:
        if isinstance(network, NoNetwork):
            pytest.skip(network.reason)
        times, door = request.param
        with fleet(folder, network, postgres, "cables", times=times) as found:
            found.add("left", "train", "shell-0", "shell-1", door=door, ahead_s=AHEAD_S["left"])
            found.add("right", "train", "spare", door=Door.SCRAPED, ahead_s=AHEAD_S["right"])
            found.start_monitor()
            found.arm("hold_lost_host")
            found.work("left", "train", "--queue", "jobs", "--handler", BODY, "--gpus", GPU)
            for name in ("shell-0", "shell-1"):
                found.work("left", name, "--queue", "commands", "--commands")
            yield found


def work_right(hosts: Fleet) -> None:
    """Start the right host's worker, which takes the same jobs as the left host's."""
    if "train of right" not in hosts.running:
        hosts.work("right", "train", "--queue", "jobs", "--handler", BODY)


def await_scrapes(hosts: Fleet) -> None:
    """Wait until all hosts are scraped. A Prometheus that was restarted shows old samples for five minutes."""
    fresh = f"time() - timestamp(gpuwarden_exporter_info) < {2 * hosts.times.scrape_s + 1}"
    hosts.until(lambda: len(hosts.query(fresh)) == 3, "all hosts are scraped")


def await_history(hosts: Fleet) -> None:
    """Wait until all hosts were scraped long enough to be lost."""
    await_scrapes(hosts)
    long = f"count_over_time(gpuwarden_exporter_info[1h]) * {hosts.times.scrape_s} > {hosts.times.lost_after_s + 15}"
    hosts.until(lambda: len(hosts.query(long)) == 3, "for long", within_s=2 * hosts.times.lost_within_s)


@pytest.mark.behaviour("D1")
@pytest.mark.behaviour("D4")
@pytest.mark.behaviour("D6")
def test_work_on_a_host_that_is_cut_off_is_held_and_ends_once(hosts: Fleet) -> None:
    job, command, task = (hosts.held(name) for name in ("job", "command", "task"))
    job_id = hosts.submit(job, queue="jobs", budget_s=BUDGET_S)
    command_id = hosts.submit_command(command, exit_code=0, queue="commands", budget_s=BUDGET_S)
    task_process = hosts.start_task("left", task)
    hosts.until(lambda: [each.words() for each in (job, command, task)] == [["start"]] * 3, "all of them work")
    work_right(hosts)
    hosts.work("right", "spare", "--queue", "spare", "--handler", BODY, "--gpus", GPU)  # a second host key on its GPU
    done = hosts.held("done")
    done.release()
    hosts.reaches(hosts.submit(done, queue="spare"), State.COMPLETED)  # the control: both workers may use the GPU
    await_history(hosts)
    known = f'gpuwarden_job_id{{host="left"}} == {job_id} or gpuwarden_job_id{{host="left"}} == {command_id}'
    known_task = f'gpuwarden_task_info{{host="left", task="123", pid="{task_process.pid}"}}'
    hosts.until(lambda: len(hosts.query(f"{known} or {known_task}")) == 3, "Prometheus knows all of them")
    held = [hosts.store.job(each) for each in (job_id, command_id)]

    hosts.hosts["left"].cut()
    hosts.until(
        lambda: all(hosts.is_in(each, State.HOST_LOST) for each in (job_id, command_id)),
        "the host is lost",
        within_s=hosts.times.lost_within_s,
    )
    on_gpu, other = hosts.submit(done, queue="spare"), hosts.submit(done, queue="jobs")
    hosts.reaches(other, State.COMPLETED)
    assert hosts.is_in(on_gpu, State.QUEUED), "no other worker gets the GPU"
    assert [hosts.store.job(each).state for each in (job_id, command_id)] == [State.HOST_LOST] * 2
    assert hosts.alerts('alertname="GpuwardenHostLost"') == {"GpuwardenHostLost of left"}
    assert hosts.query('gpuwarden_gateway_host_lost{host="left"} == 1')
    assert not hosts.query(f'up{{host="left"}} == 1 or {known_task}')
    assert task_process.poll() is None

    hosts.hosts["left"].heal()
    for its in (job_id, command_id):
        hosts.reaches(its, State.RUNNING)
    hosts.until(lambda: hosts.query(known_task), "the task is known again")
    hosts.reaches(on_gpu, State.COMPLETED)
    for each in (job, command, task):
        each.release()
    for its in (job_id, command_id):
        hosts.reaches(its, State.COMPLETED)
    assert task_process.wait(30) == 0
    hosts.until(lambda: not hosts.query(known_task), "the task has ended")

    assert [each.words() for each in (job, command, task)] == [["start", "end"]] * 3
    for was in held:
        now = hosts.store.job(was.job_id)
        assert (now.attempt, now.reclaims, now.watchdog_retries) == (1, 0, 0)
        assert now.claimed_at == was.claimed_at


@pytest.mark.behaviour("D8")
def test_exit_code_of_a_command_decides_after_a_cut_and_a_restart_of_the_controller(hosts: Fleet) -> None:
    works, fails = hosts.held("works"), hosts.held("fails")
    working = hosts.submit_command(works, exit_code=0, queue="commands", budget_s=BUDGET_S)
    failing = hosts.submit_command(fails, exit_code=3, queue="commands", budget_s=BUDGET_S)
    hosts.until(lambda: [each.words() for each in (works, fails)] == [["start"]] * 2, "both commands work")

    hosts.hosts["left"].cut()
    killed(hosts.running["central"])
    ended(hosts.running["monitor"])
    for each in (works, fails):
        each.release()
    hosts.until(lambda: [each.words() for each in (works, fails)] == [["start", "end"]] * 2, "both commands end")
    hosts.start_central()
    hosts.start_monitor()
    assert FINAL.isdisjoint(hosts.store.job(each).state for each in (working, failing))
    hosts.hosts["left"].heal()

    hosts.reaches(working, State.COMPLETED)
    hosts.reaches(failing, State.FAILED)
    assert "exit code 3" in str(hosts.store.job(failing).reason)
    assert [hosts.store.job(each).attempt for each in (working, failing)] == [1, 1]


@pytest.mark.behaviour("D4")
def test_nothing_is_lost_while_prometheus_is_cut_off(hosts: Fleet) -> None:
    job, command = hosts.held("unseen job"), hosts.held("unseen command")
    work_right(hosts)
    job_id = hosts.submit(job, queue="jobs", budget_s=BUDGET_S)
    command_id = hosts.submit_command(command, exit_code=0, queue="commands", budget_s=BUDGET_S)
    hosts.until(lambda: [each.words() for each in (job, command)] == [["start"]] * 2, "both work")
    await_history(hosts)

    cut_at_s = time.monotonic()
    hosts.hosts["monitor"].cut()
    unseen_s = hosts.times.lost_after_s + 15
    hosts.until(lambda: time.monotonic() - cut_at_s > unseen_s, "the cut is long", within_s=2 * unseen_s)
    assert [hosts.store.job(each).state for each in (job_id, command_id)] == [State.RUNNING] * 2
    hosts.hosts["monitor"].heal()
    await_scrapes(hosts)
    assert [hosts.store.job(each).state for each in (job_id, command_id)] == [State.RUNNING] * 2
    for each in (job, command):
        each.release()
    for its in (job_id, command_id):
        hosts.reaches(its, State.COMPLETED)

    since = f"{time.monotonic() - cut_at_s:.0f}s"
    doors = 'up{job=~"gpuwarden-exporter|gpuwarden-reports", host!="monitor"}'
    unseen = hosts.query(f"count_over_time(({doors} == 0)[{since}:1s]) > {hosts.times.lost_after_s}")
    assert len(unseen) >= 2, "it saw neither host for long"
    assert hosts.alerts('alertname="GpuwardenHostLost"', ago=since) == set()
    assert [hosts.store.job(each).attempt for each in (job_id, command_id)] == [1, 1]


def test_clocks_that_differ_by_ten_minutes_change_no_verdict(hosts: Fleet) -> None:
    work_right(hosts)
    beats = "max by (host) (gpuwarden_worker_heartbeat_timestamp_seconds) - time()"
    hosts.until(lambda: {"left", "right"} <= {each["metric"]["host"] for each in hosts.query(beats)}, "both beat")
    ahead_s = {each["metric"]["host"]: 60 * round(float(each["value"][1]) / 60) for each in hosts.query(beats)}
    assert {name: ahead_s[name] for name in AHEAD_S} == AHEAD_S
    assert hosts.alerts('remedy!="", alertname!="GpuwardenHostLost"') == set()

    late = [hosts.held("late left"), hosts.held("late right")]
    job_ids = [hosts.submit(each, queue="jobs", budget_s=3) for each in late]  # the control
    over = "GpuwardenJobOverBudget"
    hosts.until(
        lambda: hosts.alerts(f'alertname="{over}"') == {f"{over} of left", f"{over} of right"},
        "both jobs are over their budgets",
    )
    for each in late:
        each.release()
    for job_id in job_ids:
        hosts.reaches(job_id, State.COMPLETED)

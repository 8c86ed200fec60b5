"""A faulty worker is locked, a faulty run is blocked, and the right people get one mail each: through real parts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from deploy.standalone.stack import Chain, Plan
from gpuwarden.format import operator_name
from gpuwarden.job import ItemState, State
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from testbed.stage import FAST, with_action
from tests.mailbox import Mailbox, mail_server
from tests.waiting import eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.slow]

HOST: Final = "box1"
WORKERS: Final = ("bad", "five", "mixed", "good", "fine")
ITEMS: Final = [f"{n:03}" for n in range(60)]

TASKS: Final = """
import os, time
from pathlib import Path
from gpuwarden import Queue, current

queue = Queue()
nature, go = os.environ["NATURE"], Path("go")
ended = 0

def wait():
    while not go.exists():
        time.sleep(0.05)

def fail():
    time.sleep(0.3)
    raise RuntimeError("no such device")

@queue.job()
def render():
    global ended
    for item in current().items():
        with item:
            ended += 1
            if nature == "bad" or item.name.startswith("broken"):
                fail()
            if nature == "five":  # fails five items and does not finish the sixth
                time.sleep(3600) if ended > 5 else fail()
            if nature == "mixed" and ended > 1:  # finishes one item and fails eight
                time.sleep(3600) if ended > 9 else fail()
            if nature in ("good", "fine") and ended > 1:
                wait()
"""


@dataclass(frozen=True, kw_only=True)
class Farm:
    """A pipeline, and workers that process the items of a run, each after its nature."""

    chain: Chain
    store: JobStore
    ledger: Ledger
    folder: Path
    mail: Mailbox
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def submit(
        self, run_id: str, items: list[str], *options: str, jobs: int, machine: str = "", notify: str = ""
    ) -> None:
        """Submit a run with the command, with `$GPUWARDEN_WRANGLE_RUNS` set to `machine`.

        The first job has the address `notify`.
        """
        job = {"queue": "gpu", "payload": {"task": "render"}}
        specification = {str(n): {**job, "notify": notify} if notify and n == 0 else job for n in range(jobs)}
        self.store.items.add(run_id, items, now=self.store.now())
        subprocess.run(
            [
                *(sys.executable, "-m", "gpuwarden", "runs", "submit", "-", *options),
                *("--queue-db", self.chain.queue_url),
            ],
            input=json.dumps({"run": run_id, "jobs": specification}),
            env={**os.environ, "GPUWARDEN_WRANGLE_RUNS": machine},
            stdout=subprocess.DEVNULL,
            text=True,
            timeout=180,
            check=True,
        )

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.workers[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gpuwarden", "worker", "run", "tasks", "--name", name),
                    *("--runtime-dir", str(self.chain.directory), "--queue-db", self.chain.queue_url),
                ],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env={**os.environ, "NATURE": name, "PYTHONPATH": str(self.folder)},
            )

    def start_replica(self) -> None:
        """Start a second `serve` on the same ledger."""
        directory = self.chain.plan.work
        with (self.folder / "replica.log").open("wb") as log:
            self.workers["replica"] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gpuwarden", "remediator", "serve", "--port", "0"),
                    *("--ledger", self.chain.ledger_url, "--queue-db", self.chain.queue_url),
                    *("--runtime-dir", str(self.chain.directory)),
                    *("--web-config-file", str(directory / "remediator-web.yml")),
                ],
                stdout=log,
                stderr=log,
            )

    def until(self, holds: Callable[[], object], what: str) -> None:
        def log() -> str:
            accounts = [str(self.ledger.reports.get(each.episode_id)) for each in self.ledger.reports.newest()]
            logs = [each.read_text() for each in self.folder.glob("*.log")]
            return "\n".join([*accounts, *logs, self.chain.log_tail("execute"), self.chain.log_tail("serve")])

        eventually(holds, what, within_s=90, log=log)

    def actions(self, run_id: str) -> list[str]:
        """The actions about a run in the ledger."""
        found = [
            self.ledger.reports.get(each.episode_id) for each in self.ledger.reports.newest() if each.worker == run_id
        ]
        return [entry.message for episode in found if episode for entry in episode.entries if entry.act == "did"]

    def locked_workers(self) -> list[str]:
        return [each.worker for each in self.store.admin.workers(now=self.store.now()) if each.locked_at is not None]


@pytest.fixture(scope="module")
def farm(work: Path) -> Iterator[Farm]:
    """A farm whose first run has one worker of each nature."""
    folder = work / "farm"
    folder.mkdir()
    (folder / "tasks.py").write_text(TASKS)
    with ExitStack() as stack:
        mail = stack.enter_context(mail_server())
        addresses = work / "notify.toml"
        addresses.write_text(
            f'mail_server = "{mail.url}"\nadministrators = ["ops@example.com"]\n'
            '[submitters]\n"*" = "{user}@example.com"\n'
        )
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("GPUWARDEN_REMEDIATOR_NOTIFY_FILE", str(addresses))
        chain = stack.enter_context(
            Chain(Plan(work=work, host=HOST, docker=None, simulate_gpu=None, armed=True, intervals=FAST))
        )
        store = stack.enter_context(closing(JobStore.open(chain.queue_url)))
        ledger = stack.enter_context(closing(Ledger.open(chain.ledger_url)))
        found = Farm(chain=chain, store=store, ledger=ledger, folder=folder, mail=mail)
        found.start_replica()
        found.submit("r1", ITEMS, jobs=len(WORKERS), machine="1")
        for name in WORKERS:
            found.start(name)
        yield found
        for process in found.workers.values():
            process.kill()
            process.wait()


@pytest.mark.behaviour("B1")
@pytest.mark.behaviour("B2")
@pytest.mark.behaviour("B6")
def test_only_the_worker_that_fails_every_item_is_locked(farm: Farm) -> None:
    farm.until(farm.locked_workers, "the faulty worker is locked")
    farm.until(lambda: farm.workers["bad"].poll() == 77, "the worker stops because it lost its claim")
    farm.start("bad")  # as a supervisor does
    failed = 'gpuwarden_queue_run_items_failed{run="r1"}'
    farm.until(lambda: counts(farm, failed) == {"five": 5, "mixed": 8}, "the others have failed their items")
    (farm.folder / "go").touch()
    held = 3  # two workers hold one each, and the stopped worker holds one until its end is known
    done = len(ITEMS) - held
    farm.until(
        lambda: farm.store.items.counts("r1")[ItemState.DONE] >= done, "other workers process the items that it failed"
    )

    farm.until(
        lambda: [each.outcome for each in with_action(farm.ledger.reports.newest())] == ["fixed"],
        "the alert has ended",
    )
    assert farm.actions("r1") == ["lock bad on box1; inform the administrator"]
    assert farm.locked_workers() == ["bad"]
    assert {each.worker for each in farm.store.items.of_run("r1") if each.state is ItemState.DONE} == {
        "good",
        "fine",
        "mixed",
    }
    fired = 'max_over_time(ALERTS{alertname="GpuwardenItemsFailing"}[1h])'
    assert counts(farm, fired) == {"bad": 1}, "the alert fired for no other worker"
    farm.until(lambda: farm.mail.mails, "the administrators get a mail")
    (mail,) = farm.mail.mails
    assert (mail.to, mail.subject) == ("ops@example.com", "[gpuwarden] worker bad of box1 is locked")
    assert mail.text.rstrip().endswith("run gpuwarden worker unlock bad --host box1")


@pytest.mark.behaviour("B3")
@pytest.mark.behaviour("B7")
def test_run_that_fails_on_every_worker_is_blocked(farm: Farm) -> None:
    (farm.folder / "go").touch()
    farm.submit("r2", [f"broken-{n:03}" for n in range(200)], "--wrangle", jobs=2, notify="own@example.com")

    farm.until(lambda: farm.actions("r2"), "the executor acts")

    assert farm.actions("r2") == ["block it; inform the submitter"]
    jobs = [each for each in farm.store.jobs() if each.run_id == "r2"]
    assert [each.state for each in jobs] == [State.BLOCKED] * 2
    assert {"good", "fine"}.isdisjoint(farm.locked_workers())
    submitter = f"{operator_name().partition('@')[0]}@example.com"
    farm.until(lambda: len(farm.mail.mails) >= 3, "the job's own address and the submitter get a mail each")
    own, other = sorted(each.job_id for each in jobs)
    mails = {each.to: each for each in farm.mail.mails}
    assert mails["own@example.com"].subject == f"[gpuwarden] job {own} is blocked"
    assert mails[submitter].subject == f"[gpuwarden] job {other} is blocked"
    assert mails[submitter].text.rstrip().endswith("run gpuwarden wrangle forgive r2")


@pytest.mark.behaviour("B7")
def test_run_that_opts_out_is_not_blocked(farm: Farm) -> None:
    for name in ("good", "fine"):
        farm.workers[name].wait(90)  # the blocked run has taken its job
        farm.start(name)
    farm.submit("r3", [f"broken-{n:03}" for n in range(40)], "--no-wrangle", jobs=2, machine="1")

    farm.until(lambda: farm.store.items.counts("r3")[ItemState.FAILED] == 40, "every item has failed")

    assert farm.actions("r3") == []
    assert "r3" not in {each.worker for each in farm.ledger.reports.newest()}
    assert {"good", "fine"}.isdisjoint(farm.locked_workers())


@pytest.mark.behaviour("B8")
def test_no_other_mail_was_sent(farm: Farm) -> None:
    farm.until(lambda: farm.ledger.notices.unsent().waiting == 0, "no notice waits")

    assert len(farm.mail.mails) == 3, farm.mail.mails
    logs = "".join(each.read_text() for each in farm.folder.glob("replica.log")) + farm.chain.log_tail("serve", 10_000)
    assert logs.count("notification sent") == 3
    assert "remediator ready" in logs
    assert farm.workers["replica"].poll() is None


def counts(farm: Farm, query: str) -> dict[str, float]:
    """Query Prometheus; return the values by worker."""
    return {each["metric"]["worker"]: float(each["value"][1]) for each in farm.chain.query(query)}

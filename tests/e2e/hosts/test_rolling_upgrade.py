"""Two hosts on one PostgreSQL are upgraded one after the other while alerts arrive. None is lost or acted on twice.

The newer version is a copy of this tree with another version number and one more revision for each schema. Each host
has a separate pipeline. A poster also sends alerts to each webhook all the time, and like Alertmanager sends an alert
again until the answer is 202.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, LiteralString

import httpx
import psycopg
import pytest

from deploy.standalone.stack import CHECKOUT
from gpuwarden import __version__
from gpuwarden.db.migrate import newest_revision
from gpuwarden.job import JobId, State
from gpuwarden.queue.schema import QUEUE as QUEUE_TABLES
from remediator.ledger.reports import EpisodeHistory
from remediator.ledger.schema import LEDGER
from remediator.plan import OVER
from testbed.demo.job_body import Script
from testbed.docker_engine import NoEngine
from testbed.gpu_simulator import Slot
from testbed.postgres import Postgres
from testbed.stage import Stage, stage
from testbed.workers import Database, ProcessFleet
from tests.asking import PLAIN
from tests.remediator.builders import payload, sent
from tests.waiting import LATE_S, eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.needs_postgres, pytest.mark.nightly]

SILENCE_S: Final = 3.0
GRACE_S: Final = 4.0
"""Between SIGTERM and SIGKILL. A worker that stalls with the GIL ends only at SIGKILL, so its stop lasts this long."""

TIMEOUT_S: Final = 600.0
"""So long that no host settles a job of the other."""

NEWER: Final = "99.0.0"
NEWER_REVISIONS: Final = {schema.name: f"{int(newest_revision(schema)) + 1:04}" for schema in (LEDGER, QUEUE_TABLES)}
REVISION: Final = '''"""The change of the next release."""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{before}"


def upgrade() -> None:
    op.add_column("{table}", sa.Column("of_the_next_release", sa.String))
'''

HOSTS: Final = ("left", "right")
BEFORE, MEANWHILE, MIDST, BEHIND, STEADY = "before", "meanwhile", "midst", "behind", "steady"
"""Workers. They stall before the upgrade, during the upgrade of their host, during their stop while the other host is
upgraded, and while their host is older. `steady` runs on each host and gets alerts without a reason."""

PLACES: Final = {BEFORE: "left", MEANWHILE: "left", MIDST: "right", BEHIND: "right"}
STALL: Final = Script(
    picture="wedge", load_s=0.2, load_mib=2, steps=3, step_s=0.1, wedge_attempts=1, wedge_after_step=1
)
AGAIN: Final = {
    "executor": ("remediator", "execute"),
    "webhook": ("remediator", "serve"),
}
"""Programs of the older version that are started on the host that is not upgraded yet."""

GONE: Final = {"incarnation": "gone-long-ago", "job_id": "999999", "attempt": "1"}


@dataclass(eq=False, kw_only=True)
class Poster:
    """Posts new alerts to the webhook of one host, each until it is accepted."""

    place: Stage
    host: str
    phase: str = "both older"
    answers: dict[str, set[object]] = field(default_factory=dict)
    """The answers in each phase: status codes, or the names of HTTP errors."""

    accepted: list[str] = field(default_factory=list)
    stop_event: threading.Event = field(default_factory=threading.Event)
    request_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held from a request to its answer, so that the phase cannot change between them."""

    def run(self) -> None:
        number = 0
        while not self.stop_event.wait(0.5) or len(self.accepted) < number:
            number = max(number, len(self.accepted) + 1)
            labels = {"host": self.host, "worker": worker(self.host, STEADY), **GONE}
            if self._post(payload(sent(f"{self.host}-{number}", **labels))) == httpx.codes.ACCEPTED:
                self.accepted.append(f"{self.host}-{number}")

    def enter(self, phase: str) -> None:
        with self.request_lock:
            self.phase = phase

    def _post(self, body: Mapping[str, Any]) -> object:
        chain = self.place.chain
        token = chain.token_file.read_text(encoding="ascii")
        url, headers = f"{chain.remediator_url}/api/v1/alerts", {"Authorization": f"Bearer {token}"}
        answer: object
        with self.request_lock:
            try:
                answer = httpx.post(
                    url, json=body, headers=headers, trust_env=False, verify=PLAIN, timeout=LATE_S
                ).status_code
            except httpx.HTTPError as error:
                answer = type(error).__name__
            self.answers.setdefault(self.phase, set()).add(answer)
        return answer


@dataclass(frozen=True, kw_only=True)
class Exit:
    """The exit code and the last output line of a program that must end."""

    code: int
    last: str


@dataclass(kw_only=True)
class Upgrade:
    """Observations during the upgrade, and the two hosts afterwards."""

    places: Mapping[str, Stage]
    database: Database
    posters: Mapping[str, Poster]
    jobs: dict[str, JobId] = field(default_factory=dict)
    incarnations: dict[str, str] = field(default_factory=dict)
    """The incarnation of each worker when it stalled."""

    fixed_before: bool = False
    newer_command: Exit | None = None
    """A command of the newer version, before its first program has run."""

    older_executor: Exit | None = None
    """The older executor of the right host, after the upgrade of the left host."""

    restarted_programs: dict[str, Exit] = field(default_factory=dict)
    """Older programs that were started again on the right host."""

    untouched: bool = False
    """Whether the older programs began nothing for the worker `behind`."""

    fixed_by_newer: bool = False
    """Whether the newer executor of the left host fixed a worker while the right host was older."""

    def episode(self, name: str) -> EpisodeHistory:
        """The episode that fixed the worker. An alert that is sent again may open another one, without an action."""
        episodes = self.places["left"].ledger.reports.newest(last=10_000)
        mine = [each for each in episodes if each.worker == worker(PLACES[name], name)]
        assert {each.outcome for each in mine} <= {"fixed", "superseded", "unconfirmed"}
        (found,) = [each for each in mine if each.outcome == "fixed"]
        return found

    def done(self, name: str) -> bool:
        place = self.places[PLACES[name]]
        closed = "SELECT 1 FROM episodes WHERE worker = %s AND closed_at IS NOT NULL"
        is_done = place.store.job(self.jobs[name]).state is State.COMPLETED
        return is_done and bool(self.ask(closed, worker(PLACES[name], name)))

    def ask(self, statement: LiteralString, *values: str) -> list[tuple[Any, ...]]:
        with closing(psycopg.connect(self.database.url.replace("+psycopg", ""))) as connection:
            return connection.execute(statement, values).fetchall()

    def until(self, holds: Callable[[], object], what: str, within_s: float = 120) -> None:
        def log() -> str:
            return "\n".join(place.chain.log_tail("execute") for place in self.places.values())

        eventually(holds, what, within_s=within_s, log=log)

    def stall(self, name: str) -> None:
        """Submit a job that stalls a worker."""
        place = self.places[PLACES[name]]
        job_id = place.submit(STALL, now=place.store.now(), stall_timeout_s=SILENCE_S, queue=worker(PLACES[name], name))
        self.jobs[name] = job_id
        self.incarnations[name] = place.fleet.incarnation(worker(PLACES[name], name))

    def run_program(self, host: str, *arguments: str) -> Exit:
        """Run a program on this host until it ends."""
        chain = self.places[host].chain
        variables = {
            "GPUWARDEN_RUNTIME_DIR": str(chain.directory),
            "GPUWARDEN_REMEDIATOR_LEDGER": chain.ledger_url,
            "GPUWARDEN_QUEUE_DB": chain.queue_url,
            "GPUWARDEN_REMEDIATOR_WEB_CONFIG_FILE": str(chain.web_config_file),
            "GPUWARDEN_REMEDIATOR_PORT": "0",
        }
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "gpuwarden", *arguments],
            cwd=chain.plan.work,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return Exit(code=ended.returncode, last=ended.stderr.strip().rpartition("\n")[2])


def worker(host: str, name: str) -> str:
    return f"gpuwarden-{host}-{name}"


def next_release(folder: Path) -> Path:
    """Copy this tree as the next release: another version number, and one more column in a table of each schema."""
    for package in ("gpuwarden", "exporter", "remediator"):
        shutil.copytree(CHECKOUT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / "gpuwarden" / "__init__.py"
    about.write_text(about.read_text().replace(f'__version__ = "{__version__}"', f'__version__ = "{NEWER}"'))
    for schema, package, table in ((LEDGER, "remediator", "episodes"), (QUEUE_TABLES, "gpuwarden", "jobs")):
        revision = NEWER_REVISIONS[schema.name]
        text = REVISION.format(revision=revision, before=newest_revision(schema), table=table)
        (folder / package / "migrations" / "versions" / f"r{revision}_next.py").write_text(text)
        with (folder / package / "schema.py").open("a") as tables:
            tables.write(f'{table.upper()}.append_column(Column("of_the_next_release", String))\n')
    return folder


@contextmanager
def version(tree: Path) -> Iterator[None]:
    """Start programs from this tree."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tree))
        yield


def upgrade_host(place: Stage, tree: Path, upgrade: Upgrade) -> None:
    """Upgrade as in docs/how-to/several-hosts.md: stop the host's programs, install the newer version, start them."""
    for part in ("execute", "serve", "exporter"):
        place.chain.stop(part)
    assert isinstance(place.fleet, ProcessFleet)
    place.fleet.install(tree)
    with version(tree):
        for part in ("exporter", "execute", "serve"):
            place.chain.start(part)
    for part in ("execute", "serve"):
        upgrade.until(partial(is_newer, place, part), f"{part} is the newer version")


def read_version(place: Stage, part: str) -> str:
    """The version that the last started program logged; "" before that."""
    lines = [line for line in place.chain.log(part).splitlines() if ' ready"' in line]
    return "" if not lines else str(json.loads(lines[-1])["version"])


def is_newer(place: Stage, part: str) -> bool:
    return read_version(place, part) == NEWER


def suspend_executor(upgrade: Upgrade, place: Stage) -> None:
    """Suspend an executor outside of a transaction: the newer version would wait for the locks of one."""
    pid = place.chain.pid("execute")
    at_work = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND state <> 'idle'"

    def suspended() -> bool:
        place.chain.signal("execute", signal.SIGSTOP)
        if not upgrade.ask(at_work, f"gpuwarden pid {pid}"):
            return True
        place.chain.signal("execute", signal.SIGCONT)
        return False

    upgrade.until(suspended, "the executor is suspended between two transactions")


@pytest.fixture(scope="module")
def upgraded(work: Path, postgres: Postgres) -> Iterator[Upgrade]:
    """Run the whole upgrade in order. The tests check the observations."""
    postgres.create("rolling")
    database = Database(server=postgres, name="rolling")
    newer = next_release(work / "newer")
    with ExitStack() as stack:
        places = {host: stack.enter_context(start_host(work, host, database)) for host in HOSTS}
        posters = {host: Poster(place=place, host=host) for host, place in places.items()}
        upgrade = Upgrade(places=places, database=database, posters=posters)
        for place in places.values():
            place.start_workers()
        with posting(posters):
            run_older_hosts(upgrade)
            upgrade_left_host(upgrade, newer)
            run_right_host_behind(upgrade)
            upgrade_host(places["right"], newer, upgrade)
            enter_phase(upgrade, "both newer")
            upgrade.until(lambda: all(upgrade.done(name) for name in PLACES), "every job is fixed", within_s=90)
        upgrade.until(
            lambda: not places["left"].ledger.episodes.list_open() and not list_new_alerts(upgrade),
            "every episode is closed",
        )
        yield upgrade
    postgres.drop(database.name)


def run_older_hosts(upgrade: Upgrade) -> None:
    """Control: a stalled worker is fixed before any upgrade. Then the stop of the next one begins, which takes long."""
    right = upgrade.places["right"]
    upgrade.stall(BEFORE)
    upgrade.until(lambda: upgrade.done(BEFORE), "the first worker is fixed")
    upgrade.fixed_before = {read_version(place, "execute") for place in upgrade.places.values()} == {__version__}
    upgrade.stall(MIDST)
    stopping = "SELECT 1 FROM intents WHERE kind = 'free' AND stage = 'stopping'"
    upgrade.until(lambda: upgrade.ask(stopping), "the stop has begun")
    suspend_executor(upgrade, right)


def upgrade_left_host(upgrade: Upgrade, newer: Path) -> None:
    left = upgrade.places["left"]
    upgrade.stall(MEANWHILE)
    enter_phase(upgrade, "left is upgraded")
    with version(newer):
        upgrade.newer_command = upgrade.run_program("left", "ledger", "list")
    upgrade_host(left, newer, upgrade)


def run_right_host_behind(upgrade: Upgrade) -> None:
    """Resume the older executor, which has an unprocessed alert in its inbox."""
    right = upgrade.places["right"]
    enter_phase(upgrade, "right is behind")
    upgrade.stall(BEHIND)
    accepted, behind_worker = "SELECT 1 FROM alerts WHERE labels ->> 'worker' = %s", worker("right", BEHIND)
    upgrade.until(lambda: upgrade.ask(accepted, behind_worker), "the older webhook has accepted the alert")
    right.chain.signal("execute", signal.SIGCONT)
    upgrade.until(lambda: "execute" in right.chain.ended(), "the older executor has ended")
    upgrade.older_executor = Exit(code=right.chain.ended()["execute"], last=right.chain.log_tail("execute", lines=1))
    upgrade.restarted_programs = {name: upgrade.run_program("right", *arguments) for name, arguments in AGAIN.items()}
    upgrade.until(lambda: upgrade.done(MEANWHILE), "the newer executor of the left host fixes its worker")
    upgrade.fixed_by_newer = True
    begun = upgrade.ask("SELECT 1 FROM intents JOIN episodes USING (episode_id) WHERE worker = %s", behind_worker)
    upgrade.untouched = not begun and right.fleet.incarnation(behind_worker) == upgrade.incarnations[BEHIND]
    enter_phase(upgrade, "right is upgraded")


def start_host(work: Path, host: str, database: Database) -> AbstractContextManager[Stage]:
    workers = [worker(host, name) for name, its_host in PLACES.items() if its_host == host] + [worker(host, STEADY)]
    return stage(
        work / host,
        NoEngine(reason="the version of supervised processes is that of their tree"),
        [Slot(worker=each, gpus=(f"GPU-{each}",)) for each in workers],
        host=host,
        database=database,
        data=work / "data",
        armed=True,
        stop_grace_s=GRACE_S,
        settle_timeout_s=TIMEOUT_S,
        restart_timeout_s=TIMEOUT_S,
        sweep_interval_s=1.0,
        capture_s=0.0,
        queues={each: each for each in workers},
    )


@contextmanager
def posting(posters: Mapping[str, Poster]) -> Iterator[None]:
    threads = [threading.Thread(target=poster.run) for poster in posters.values()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for poster in posters.values():
            poster.stop_event.set()
        for thread in threads:
            thread.join(60)


def enter_phase(upgrade: Upgrade, name: str) -> None:
    for poster in upgrade.posters.values():
        poster.enter(name)


def list_new_alerts(upgrade: Upgrade) -> list[tuple[Any, ...]]:
    return upgrade.ask("SELECT alert_id FROM alerts WHERE state = 'new'")


# --- the upgraded host


def test_stalled_worker_is_fixed_before_the_upgrade(upgraded: Upgrade) -> None:
    assert upgraded.fixed_before
    assert upgraded.episode(BEFORE).outcome == "fixed"


def test_newer_command_changes_no_tables_and_says_what_to_start_first(upgraded: Upgrade) -> None:
    assert upgraded.newer_command is not None
    assert upgraded.newer_command.code == 1
    known, found = NEWER_REVISIONS["ledger"], newest_revision(LEDGER)
    assert f"tables of another version (revision {found}; this one knows {known})" in upgraded.newer_command.last
    assert "start this version's programs first" in upgraded.newer_command.last


def test_first_newer_program_upgrades_the_tables(upgraded: Upgrade) -> None:
    found = {
        "ledger": upgraded.ask("SELECT version_num FROM gpuwarden_ledger_version"),
        "queue": upgraded.ask("SELECT version_num FROM gpuwarden_queue_version"),
    }

    assert found == {name: [(revision,)] for name, revision in NEWER_REVISIONS.items()}
    assert upgraded.ask("SELECT of_the_next_release FROM episodes LIMIT 1") == [(None,)]


# --- the host that is not upgraded yet


def test_older_webhook_accepts_alerts_on_newer_tables(upgraded: Upgrade) -> None:
    answers = upgraded.posters["right"].answers

    assert answers["left is upgraded"] == answers["right is behind"] == {202}


def test_older_executor_exits_with_1_and_begins_nothing(upgraded: Upgrade) -> None:
    assert upgraded.older_executor is not None
    assert upgraded.older_executor.code == 1
    newer, known = NEWER_REVISIONS["ledger"], newest_revision(LEDGER)
    assert (
        f"are of a newer gpuwarden (revision {newer}; this one knows {known}): upgrade" in upgraded.older_executor.last
    )
    assert upgraded.untouched


@pytest.mark.parametrize("name", AGAIN)
def test_older_program_does_not_start_on_newer_tables(upgraded: Upgrade, name: str) -> None:
    ended = upgraded.restarted_programs[name]

    assert ended.code == 1
    assert "newer gpuwarden" in ended.last
    assert "upgrade this program" in ended.last


def test_newer_executor_fixes_a_worker_while_the_other_host_is_older(upgraded: Upgrade) -> None:
    assert upgraded.fixed_by_newer


# --- the result


@pytest.mark.parametrize("name", PLACES)
def test_each_stalled_worker_is_fixed_once(upgraded: Upgrade, name: str) -> None:
    place, job = upgraded.places[PLACES[name]], upgraded.places["left"].store.job(upgraded.jobs[name])

    assert upgraded.episode(name).outcome == "fixed"
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.COMPLETED, 2, 1, 0)
    log = (place.data / f"{worker(PLACES[name], name)}.log").read_text()
    assert log.count('"worker ready"') == 2, "started by the test, and restarted once"


def test_stop_that_runs_during_the_upgrade_happens_once(upgraded: Upgrade) -> None:
    episode = upgraded.places["left"].ledger.reports.get(upgraded.episode(MIDST).episode_id)
    assert episode is not None

    entries = [f"{entry.act} {entry.what}" for entry in episode.entries]

    assert [entries.count(step) for step in ("decided begin", "decided stop", "did stop")] == [1, 1, 1]
    assert entries.count("did start") <= 1, "its supervisor may start it before the executor asks"
    log = (upgraded.places["right"].data / f"{worker('right', MIDST)}.log").read_text()
    assert log.count('"worker ready"') == 2, "started by the test, and once by its supervisor"


def test_worker_with_unconfirmed_alerts_is_not_touched(upgraded: Upgrade) -> None:
    for host, place in upgraded.places.items():
        log = (place.data / f"{worker(host, STEADY)}.log").read_text()
        assert log.count('"worker ready"') == 1


def test_every_accepted_alert_belongs_to_a_closed_episode(upgraded: Upgrade) -> None:
    found = dict(
        upgraded.ask(
            "SELECT a.fingerprint, count(*) FROM alerts a JOIN episodes e USING (episode_id) "
            "WHERE a.state = 'linked' AND e.closed_at IS NOT NULL AND e.outcome IS NOT NULL GROUP BY a.fingerprint"
        )
    )

    for poster in upgraded.posters.values():
        assert set(poster.answers) == {
            "both older", "left is upgraded", "right is behind", "right is upgraded", "both newer"
        }  # fmt: skip
        assert len(poster.accepted) > 20
        assert {each: found.get(each) for each in poster.accepted} == dict.fromkeys(poster.accepted, 1)


def test_every_intent_has_ended_and_none_is_doubled(upgraded: Upgrade) -> None:
    intents = upgraded.ask("SELECT kind, key, stage FROM intents")

    assert {stage for _, _, stage in intents} <= set(OVER)
    assert len({(kind, key) for kind, key, _ in intents}) == len(intents)
    restarts = upgraded.ask(
        "SELECT e.worker, count(*) FROM intents i JOIN episodes e USING (episode_id) "
        "WHERE i.kind = 'free' AND i.stage = 'done' GROUP BY e.worker"
    )
    assert dict(restarts) == {worker(host, name): 1 for name, host in PLACES.items()}

"""Two hosts on one PostgreSQL are upgraded one after the other while alerts come: nothing is lost, nothing done twice.

The newer version is a copy of this tree with a number of its own and a revision more for each schema, as the next
release will have. Each host has a chain of its own; besides its Alertmanager, somebody posts to each webhook without a
pause, as Alertmanager does: what is answered with 202 is not sent again.
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
from testbed.workers import Database
from tests.asking import PLAIN
from tests.remediator.builders import payload, sent
from tests.waiting import LATE_S, eventually

pytestmark = [pytest.mark.needs_parts, pytest.mark.needs_postgres, pytest.mark.nightly]

SILENCE_S: Final = 3.0
GRACE_S: Final = 4.0
"""Between SIGTERM and SIGKILL: a wedge that holds Python's lock heeds only the second, and is being stopped so long."""
BOUND_S: Final = 600.0
"""No host settles for the other meanwhile: each finishes what is its own."""

NEWER: Final = "99.0.0"
NEWER_REVISIONS: Final = {schema.name: f"{int(newest_revision(schema)) + 1:04}" for schema in (LEDGER, QUEUE_TABLES)}
REVISION: Final = '''"""What the next release adds."""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{before}"


def upgrade() -> None:
    op.add_column("{table}", sa.Column("of_the_next_release", sa.String))
'''

HOSTS: Final = ("left", "right")
BEFORE, MEANWHILE, MIDST, BEHIND, STEADY = "before", "meanwhile", "midst", "behind", "steady"
"""Workers, each of one host: wedged while all is old; while its host is upgraded; while the upgrade of the other host
comes in the middle of its stop; while its own host is behind. And one of each host that is accused without reason."""

PLACES: Final = {BEFORE: "left", MEANWHILE: "left", MIDST: "right", BEHIND: "right"}
WEDGE: Final = Script(
    picture="wedge", load_s=0.2, load_mib=2, steps=3, step_s=0.1, wedge_attempts=1, wedge_after_step=1
)
AGAIN: Final = {
    "its executor": ("remediator", "execute"),
    "its webhook": ("remediator", "serve"),
}
"""What is tried with the older version on the host that is behind."""

GONE: Final = {"incarnation": "gone-long-ago", "job_id": "999999", "attempt": "1"}


@dataclass(eq=False, kw_only=True)
class Poster:
    """Posts to one host's webhook, again and again, alerts that are new to it; each until it was accepted."""

    place: Stage
    host: str
    phase: str = "both older"
    answers: dict[str, set[object]] = field(default_factory=dict)
    """What was answered in each phase: status codes, or the name of what kept it from being answered."""

    accepted: list[str] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)
    asking: threading.Lock = field(default_factory=threading.Lock)
    """Held from a question to its answer, so that no phase ends between the two."""

    def go_on(self) -> None:
        number = 0
        while not self.ending.wait(0.5) or len(self.accepted) < number:
            number = max(number, len(self.accepted) + 1)
            labels = {"host": self.host, "worker": worker(self.host, STEADY), **GONE}
            if self._post(payload(sent(f"{self.host}-{number}", **labels))) == httpx.codes.ACCEPTED:
                self.accepted.append(f"{self.host}-{number}")

    def enter(self, phase: str) -> None:
        with self.asking:
            self.phase = phase

    def _post(self, body: Mapping[str, Any]) -> object:
        chain = self.place.chain
        token = chain.token_file.read_text(encoding="ascii")
        url, headers = f"{chain.remediator_url}/api/v1/alerts", {"Authorization": f"Bearer {token}"}
        answer: object
        with self.asking:
            try:
                answer = httpx.post(
                    url, json=body, headers=headers, trust_env=False, verify=PLAIN, timeout=LATE_S
                ).status_code
            except httpx.HTTPError as error:
                answer = type(error).__name__
            self.answers.setdefault(self.phase, set()).add(answer)
        return answer


@dataclass(frozen=True, kw_only=True)
class Said:
    """How a program that was not to go on has ended, and what it said last."""

    code: int
    last: str


@dataclass(kw_only=True)
class Upgrade:
    """What was seen on the way, and the two hosts as they are afterwards."""

    places: Mapping[str, Stage]
    database: Database
    posters: Mapping[str, Poster]
    jobs: dict[str, JobId] = field(default_factory=dict)
    lives: dict[str, str] = field(default_factory=dict)
    """What ran of each worker when it had wedged."""

    mended_before: bool = False
    ahead: Said | None = None
    """A command of the newer version that asks, before the first of its programs has run."""

    behind: Said | None = None
    """The right host's older executor, once the left one had been upgraded."""

    again: dict[str, Said] = field(default_factory=dict)
    """The older programs, started on the right host once more."""

    untouched: bool = False
    """Whether nothing was begun for what had wedged behind it, when it had ended and been started again."""

    mended_beside: bool = False
    """Whether the left host's newer executor mended while the right host was behind."""

    def story(self, name: str) -> EpisodeHistory:
        """How it was mended. An alert that comes again right afterwards opens another, which finds nothing to do."""
        stories = self.places["left"].ledger.reports.newest(last=10_000)
        its = [each for each in stories if each.worker == worker(PLACES[name], name)]
        assert {each.outcome for each in its} <= {"mended", "superseded", "unconfirmed"}
        (found,) = [each for each in its if each.outcome == "mended"]
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

    def wedge(self, name: str) -> None:
        """Give a worker the job that it will wedge with."""
        place = self.places[PLACES[name]]
        job_id = place.submit(WEDGE, now=place.store.now(), stall_timeout_s=SILENCE_S, queue=worker(PLACES[name], name))
        self.jobs[name] = job_id
        self.lives[name] = place.fleet.incarnation(worker(PLACES[name], name))

    def says(self, host: str, *arguments: str) -> Said:
        """How a program on this host ends by itself."""
        chain = self.places[host].chain
        told = {
            "GPUWARDEN_RUNTIME_DIR": str(chain.directory),
            "GPUWARDEN_REMEDIATOR_LEDGER": chain.ledger_url,
            "GPUWARDEN_QUEUE_DB": chain.queue_url,
            "GPUWARDEN_REMEDIATOR_WEB_CONFIG_FILE": str(chain.web_config_file),
            "GPUWARDEN_REMEDIATOR_PORT": "0",
        }
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "gpuwarden", *arguments],
            cwd=chain.plan.work,
            env={**os.environ, **told},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return Said(code=ended.returncode, last=ended.stderr.strip().rpartition("\n")[2])


def worker(host: str, name: str) -> str:
    return f"gpuwarden-{host}-{name}"


def next_release(folder: Path) -> Path:
    """This tree as its next release may be: another number, and a column more in a table of each."""
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
    """What is started meanwhile is of this tree."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tree))
        yield


def upgrade_host(place: Stage, tree: Path, upgrade: Upgrade) -> None:
    """As docs/postgresql.md has it: end the host's programs, install the newer version, start them."""
    for part in ("execute", "serve", "exporter"):
        place.chain.stop(part)
    commands = place.chain.plan.processes
    assert commands is not None
    mine, its = (f'PYTHONPATH = "{folder}"' for folder in (CHECKOUT, tree))
    before = commands.read_text()
    assert mine in before
    commands.write_text(before.replace(mine, its))
    with version(tree):
        for part in ("exporter", "execute", "serve"):
            place.chain.start(part)
    for part in ("execute", "serve"):
        upgrade.until(partial(is_newer, place, part), f"its {part} is the newer one")


def runs(place: Stage, part: str) -> str:
    """Of which version the program is that was started last, as it says itself; "" until it has."""
    lines = [line for line in place.chain.log(part).splitlines() if ' ready"' in line]
    return "" if not lines else str(json.loads(lines[-1])["version"])


def is_newer(place: Stage, part: str) -> bool:
    return runs(place, part) == NEWER


def suspend_in_peace(upgrade: Upgrade, place: Stage) -> None:
    """Suspend a host's executor while it has no transaction open, for whose locks the newer version would wait."""
    pid = place.chain.pid("execute")
    at_work = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND state <> 'idle'"

    def suspended() -> bool:
        place.chain.signal("execute", signal.SIGSTOP)
        if not upgrade.ask(at_work, f"gpuwarden pid {pid}"):
            return True
        place.chain.signal("execute", signal.SIGCONT)
        return False

    upgrade.until(suspended, "it is suspended between two transactions")


@pytest.fixture(scope="module")
def upgraded(work: Path, postgres: Postgres) -> Iterator[Upgrade]:
    """Everything that happens, in order; the tests judge what was seen."""
    postgres.create("rolling")
    database = Database(server=postgres, name="rolling")
    newer = next_release(work / "newer")
    with ExitStack() as stack:
        places = {host: stack.enter_context(a_host(work, host, database)) for host in HOSTS}
        posters = {host: Poster(place=place, host=host) for host, place in places.items()}
        upgrade = Upgrade(places=places, database=database, posters=posters)
        for place in places.values():
            place.start_workers()
        with posting(posters):
            all_are_old(upgrade)
            the_left_is_upgraded(upgrade, newer)
            the_right_is_behind(upgrade)
            upgrade_host(places["right"], newer, upgrade)
            phase(upgrade, "both newer")
            upgrade.until(lambda: all(upgrade.done(name) for name in PLACES), "all are mended", within_s=90)
        upgrade.until(lambda: not places["left"].ledger.episodes.list_open() and not waiting(upgrade), "all is over")
        yield upgrade
    postgres.drop(database.name)


def all_are_old(upgrade: Upgrade) -> None:
    """The control: wedged before any upgrade, it is mended. Then the next one is stopped, which takes its time."""
    right = upgrade.places["right"]
    upgrade.wedge(BEFORE)
    upgrade.until(lambda: upgrade.done(BEFORE), "the first is mended")
    upgrade.mended_before = {runs(place, "execute") for place in upgrade.places.values()} == {__version__}
    upgrade.wedge(MIDST)
    its = "SELECT 1 FROM intents WHERE kind = 'free' AND stage = 'stopping'"
    upgrade.until(lambda: upgrade.ask(its), "it is being stopped")
    suspend_in_peace(upgrade, right)


def the_left_is_upgraded(upgrade: Upgrade, newer: Path) -> None:
    left = upgrade.places["left"]
    upgrade.wedge(MEANWHILE)
    phase(upgrade, "left is upgraded")
    with version(newer):
        upgrade.ahead = upgrade.says("left", "ledger", "list")
    upgrade_host(left, newer, upgrade)


def the_right_is_behind(upgrade: Upgrade) -> None:
    """Its executor goes on only now, with a wedge in its inbox that it has not looked at."""
    right = upgrade.places["right"]
    phase(upgrade, "right is behind")
    upgrade.wedge(BEHIND)
    accepted, its = "SELECT 1 FROM alerts WHERE labels ->> 'worker' = %s", worker("right", BEHIND)
    upgrade.until(lambda: upgrade.ask(accepted, its), "the older webhook has accepted what wedges behind it")
    right.chain.signal("execute", signal.SIGCONT)
    upgrade.until(lambda: "execute" in right.chain.ended(), "the older executor has ended")
    upgrade.behind = Said(code=right.chain.ended()["execute"], last=right.chain.log_tail("execute", lines=1))
    upgrade.again = {name: upgrade.says("right", *arguments) for name, arguments in AGAIN.items()}
    upgrade.until(lambda: upgrade.done(MEANWHILE), "the left one's newer executor mends")
    upgrade.mended_beside = True
    begun = upgrade.ask("SELECT 1 FROM intents JOIN episodes USING (episode_id) WHERE worker = %s", its)
    upgrade.untouched = not begun and right.fleet.incarnation(its) == upgrade.lives[BEHIND]
    phase(upgrade, "right is upgraded")


def a_host(work: Path, host: str, database: Database) -> AbstractContextManager[Stage]:
    workers = [worker(host, name) for name, its in PLACES.items() if its == host] + [worker(host, STEADY)]
    return stage(
        work / host,
        NoEngine(because="supervised processes are of the version that starts them"),
        [Slot(worker=each, gpus=(f"GPU-{each}",)) for each in workers],
        host=host,
        database=database,
        data=work / "data",
        armed=True,
        stop_grace_s=GRACE_S,
        settle_timeout_s=BOUND_S,
        restart_timeout_s=BOUND_S,
        sweep_interval_s=1.0,
        capture_s=0.0,
        queues={each: each for each in workers},
    )


@contextmanager
def posting(posters: Mapping[str, Poster]) -> Iterator[None]:
    threads = [threading.Thread(target=poster.go_on) for poster in posters.values()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for poster in posters.values():
            poster.ending.set()
        for thread in threads:
            thread.join(60)


def phase(upgrade: Upgrade, name: str) -> None:
    for poster in upgrade.posters.values():
        poster.enter(name)


def waiting(upgrade: Upgrade) -> list[tuple[Any, ...]]:
    return upgrade.ask("SELECT alert_id FROM alerts WHERE state = 'new'")


# --- the upgraded host


def test_before_it_a_wedge_is_mended_by_the_older_programs(upgraded: Upgrade) -> None:
    assert upgraded.mended_before
    assert upgraded.story(BEFORE).outcome == "mended"


def test_a_command_of_the_newer_version_changes_no_tables_and_says_what_to_do_first(upgraded: Upgrade) -> None:
    assert upgraded.ahead is not None
    assert upgraded.ahead.code == 1
    known, found = NEWER_REVISIONS["ledger"], newest_revision(LEDGER)
    assert f"tables of another version (revision {found}; this one knows {known})" in upgraded.ahead.last
    assert "start this version's programs first" in upgraded.ahead.last


def test_the_first_program_of_the_newer_version_brings_the_tables_up(upgraded: Upgrade) -> None:
    found = {
        "ledger": upgraded.ask("SELECT version_num FROM gpuwarden_ledger_version"),
        "queue": upgraded.ask("SELECT version_num FROM gpuwarden_queue_version"),
    }

    assert found == {name: [(revision,)] for name, revision in NEWER_REVISIONS.items()}
    assert upgraded.ask("SELECT of_the_next_release FROM episodes LIMIT 1") == [(None,)]


# --- the host that is behind


def test_the_older_webhook_goes_on_accepting_while_its_host_is_behind(upgraded: Upgrade) -> None:
    answers = upgraded.posters["right"].answers

    assert answers["left is upgraded"] == answers["right is behind"] == {202}


def test_the_older_executor_ends_with_1_says_what_to_do_and_has_begun_nothing(upgraded: Upgrade) -> None:
    assert upgraded.behind is not None
    assert upgraded.behind.code == 1
    newer, known = NEWER_REVISIONS["ledger"], newest_revision(LEDGER)
    assert f"are of a newer gpuwarden (revision {newer}; this one knows {known}): upgrade" in upgraded.behind.last
    assert upgraded.untouched


@pytest.mark.parametrize("name", AGAIN)
def test_no_program_of_the_older_version_starts_on_the_newer_tables(upgraded: Upgrade, name: str) -> None:
    said = upgraded.again[name]

    assert said.code == 1
    assert "newer gpuwarden" in said.last
    assert "upgrade this program" in said.last


def test_the_newer_executor_of_the_other_host_mends_meanwhile(upgraded: Upgrade) -> None:
    assert upgraded.mended_beside


# --- what comes of all of it


@pytest.mark.parametrize("name", PLACES)
def test_each_wedge_is_mended_once(upgraded: Upgrade, name: str) -> None:
    place, job = upgraded.places[PLACES[name]], upgraded.places["left"].store.job(upgraded.jobs[name])

    assert upgraded.story(name).outcome == "mended"
    assert (job.state, job.attempt, job.watchdog_retries, job.reclaims) == (State.COMPLETED, 2, 1, 0)
    log = (place.data / f"{worker(PLACES[name], name)}.log").read_text()
    assert log.count('"worker ready"') == 2, "started by us, and started again once"


def test_what_was_being_stopped_as_the_tables_became_newer_is_stopped_once(upgraded: Upgrade) -> None:
    story = upgraded.places["left"].ledger.reports.get(upgraded.story(MIDST).episode_id)
    assert story is not None

    told = [f"{entry.act} {entry.what}" for entry in story.entries]

    assert [told.count(step) for step in ("decided begin", "decided stop", "did stop", "did start")] == [1, 1, 1, 1]


def test_a_worker_that_was_accused_without_reason_was_never_touched(upgraded: Upgrade) -> None:
    for host, place in upgraded.places.items():
        log = (place.data / f"{worker(host, STEADY)}.log").read_text()
        assert log.count('"worker ready"') == 1


def test_whatever_was_accepted_in_any_phase_came_to_its_end(upgraded: Upgrade) -> None:
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


def test_nothing_is_owed_and_no_target_was_promised_anything_twice(upgraded: Upgrade) -> None:
    intents = upgraded.ask("SELECT kind, key, stage FROM intents")

    assert {stage for _, _, stage in intents} <= set(OVER)
    assert len({(kind, key) for kind, key, _ in intents}) == len(intents)
    frees = upgraded.ask(
        "SELECT e.worker, count(*) FROM intents i JOIN episodes e USING (episode_id) "
        "WHERE i.kind = 'free' AND i.stage = 'done' GROUP BY e.worker"
    )
    assert dict(frees) == {worker(host, name): 1 for name, host in PLACES.items()}

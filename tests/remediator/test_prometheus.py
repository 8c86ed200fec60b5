"""A second opinion of a real Prometheus with the project's own rules, what the executor makes of it, and its curves.

Ledger and queue are real. The host that Prometheus scrapes publishes what a test sets, and what the executor has to its
host is played: see `world`.
"""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator import curves, execute, plan
from remediator import prometheus as module
from remediator.curves import Said
from remediator.execute import Executor, Hands
from remediator.ledger import Ledger
from remediator.opinion import Opinion, Policy, Verdict
from remediator.plan import Episode
from remediator.prometheus import Prometheus
from remediator.queues.builtin import BuiltinQueue
from tests.remediator import builders as build
from tests.remediator import prometheus as real
from tests.remediator.builders import HOST
from tests.remediator.prometheus import Answering, Scraped
from tests.remediator.test_execute import PACE, arm, story, to_the_end, told, turn, wedged
from tests.remediator.test_execute import silent_server as silent_in_world
from tests.remediator.world import World
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts

EPISODE = build.episode(rules=frozenset({"GpuwardenJobStalled"}))
SERVER = build.server_episode(rules=frozenset({"GpuwardenServerUnanswering"}))
NOBODY = "http://127.0.0.1:9"
FRESH_S = 60.0


@pytest.fixture
def backend() -> str:
    """What is asked, and what is held for it, is the same on both databases."""
    return "sqlite"


@pytest.fixture(scope="module")
def scraped() -> Iterator[Scraped]:
    with Scraped() as host:
        yield host


@pytest.fixture(scope="module")
def running(scraped: Scraped, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real.prometheus(tmp_path_factory.mktemp("prometheus") / "its", scraped.address) as url:
        yield url


@pytest.fixture
def host(scraped: Scraped, running: str) -> Iterator[Scraped]:
    """The host that Prometheus scrapes; what a test before has set is forgotten."""
    scraped.series = None
    with closing(Prometheus([running], fresh_s=FRESH_S)) as its:
        eventually(
            lambda: all("no sample" in its.ask(episode).because for episode in (EPISODE, SERVER)), "it sees nothing"
        )
        yield scraped


@pytest.fixture
def asked(running: str) -> Iterator[Prometheus]:
    with closing(Prometheus([running], fresh_s=FRESH_S)) as its:
        yield its


def says(prometheus: Prometheus, verdict: Verdict, episode: Episode = EPISODE) -> Opinion:
    """What it says, once it is that."""
    return eventually(lambda: said if (said := prometheus.ask(episode)).verdict is verdict else None, verdict)


# --- what it says


def test_it_confirms_a_wedge_by_the_rule_that_it_has_loaded(host: Scraped, asked: Prometheus, running: str) -> None:
    host.series = real.wedge()

    said = says(asked, Verdict.CONFIRMS)

    assert said.because.startswith(f"{running} confirms: GpuwardenJobStalled holds still, at 130, by samples ")


def test_it_denies_the_wedge_of_a_worker_that_beats_again(host: Scraped, asked: Prometheus) -> None:
    host.series = real.wedge()
    says(asked, Verdict.CONFIRMS)

    host.series = real.wedge(silent_s=1.0)

    assert "GpuwardenJobStalled does not hold any more" in says(asked, Verdict.DENIES).because


def test_a_wedge_of_another_attempt_or_incarnation_confirms_nothing(host: Scraped, asked: Prometheus) -> None:
    host.series = real.wedge(job_id=8)
    says(asked, Verdict.CONFIRMS, replace(EPISODE, job_id=8))
    assert asked.ask(EPISODE).verdict is Verdict.DENIES

    host.series = real.wedge(incarnation="i2")
    says(asked, Verdict.CONFIRMS, replace(EPISODE, incarnation="i2"))
    assert asked.ask(EPISODE).verdict is Verdict.DENIES


def test_it_tells_of_a_server_by_the_containers_own_incarnation(host: Scraped, asked: Prometheus) -> None:
    host.series = real.silent_server()
    says(asked, Verdict.CONFIRMS, SERVER)
    assert asked.ask(replace(SERVER, incarnation=build.REBORN)).verdict is Verdict.DENIES

    host.series = real.silent_server(unanswered_s=0.0)
    says(asked, Verdict.DENIES, SERVER)


def test_a_host_that_it_cannot_scrape_any_more_is_not_taken_for_one_that_is_well(
    host: Scraped, asked: Prometheus
) -> None:
    host.series = real.wedge()
    says(asked, Verdict.CONFIRMS)

    host.series = None

    assert "it has no sample of the target" in says(asked, Verdict.SILENT).because


def test_samples_that_are_older_than_allowed_neither_confirm_nor_deny(
    host: Scraped, asked: Prometheus, running: str
) -> None:
    for silent_s, verdict in ((130.0, Verdict.CONFIRMS), (1.0, Verdict.DENIES)):
        host.series = real.wedge(silent_s=silent_s)
        says(asked, verdict)

        with closing(Prometheus([running], fresh_s=-1.0)) as demanding:
            said = demanding.ask(EPISODE)

        assert (said.verdict, "newest sample of the target" in said.because) == (Verdict.SILENT, True)


def test_a_rule_that_it_has_not_loaded_is_no_denial(host: Scraped, asked: Prometheus) -> None:
    host.series = real.wedge(silent_s=1.0)
    says(asked, Verdict.DENIES)

    said = asked.ask(replace(EPISODE, rules=frozenset({"ACustomRule"})))

    assert (said.verdict, "no rule that accused the target: ACustomRule" in said.because) == (Verdict.SILENT, True)


def test_a_prometheus_that_does_not_label_its_targets_with_their_host_is_no_denial(tmp_path: Path) -> None:
    with Scraped() as host, real.prometheus(tmp_path / "p", host.address, host_label="box") as url:
        host.series = real.wedge()
        with closing(Prometheus([url], fresh_s=FRESH_S)) as its:
            said = eventually(lambda: said if "host" in (said := its.ask(EPISODE)).because else None, "it tells why")

    assert said.verdict is Verdict.SILENT


@pytest.mark.parametrize("alive_first", [True, False], ids=["the first answers", "the second answers"])
def test_one_of_two_that_is_dead_does_not_matter(host: Scraped, running: str, alive_first: bool) -> None:
    host.series = real.wedge()
    with closing(Prometheus([running, NOBODY] if alive_first else [NOBODY, running], fresh_s=FRESH_S)) as both:
        said = says(both, Verdict.CONFIRMS)

    assert sorted(each.verdict for each in said.answers) == ["confirms", "silent"]
    assert f"{NOBODY} does not tell: All connection attempts failed" in said.because


# --- the curves that it has

BEAT = "gpuwarden_job_beat_age_seconds"
USE = "gpuwarden_container_gpu_utilization_ratio"
RAM = "gpuwarden_container_memory_bytes"


def all_said(prometheus: Prometheus, **place: Any) -> tuple[list[Said], list[str]]:
    """What each of them says of the minute before now, and what is noted of it."""
    now = time.time()
    sought = curves.seek(replace(EPISODE, opened_at=now), build.evidence(**place), now=now, around_s=60.0)
    said = prometheus.curves(sought, within_s=5.0).result(10.0)
    return list(said), list(curves.choose(sought, said)[1])


def values(prometheus: Prometheus, metric: str, **place: Any) -> list[float | None]:
    """What the first that has it knows of one figure, a second from point to point."""
    found = [each for said in all_said(prometheus, **place)[0] for each in said.curves if each.metric == metric]
    return list(found[0].values) if found else []


def known(prometheus: Prometheus, metric: str, **place: Any) -> list[float]:
    return [value for value in values(prometheus, metric, **place) if value is not None]


def test_its_curves_show_a_beat_that_stopped_and_a_host_that_was_not_seen_is_a_gap_and_no_zero(
    host: Scraped, asked: Prometheus, running: str
) -> None:
    still = {(USE, 'container="its",gpu="GPU-0"'): 0.0, (RAM, 'container="its"'): 2.0**30}
    host.series = {(BEAT, 'container="its",worker="w1"'): 1.0, **still}
    eventually(lambda: known(asked, BEAT, container="its")[-1:] == [1.0], "it beats")
    host.series = {(BEAT, 'container="its",worker="w1"'): 130.0, **still}
    eventually(lambda: known(asked, BEAT, container="its")[-1:] == [130.0], "it is silent")
    host.series = None
    eventually(lambda: values(asked, BEAT, container="its")[-1] is None, "it is not seen")

    (said,), notes = all_said(asked, container="its")

    beat, use, ram = (next(each.values for each in said.curves if each.metric == metric) for metric in (BEAT, USE, RAM))
    assert sorted({value for value in beat if value is not None}) == [1.0, 130.0]
    assert beat.index(1.0) < beat.index(130.0)
    assert (beat[0], beat[-1]) == (None, None)
    assert (set(use), set(ram)) == ({None, 0.0}, {None, round(2**30, -4)})
    assert notes == [f"no curve of heartbeat age, GPU memory of GPU-0: {running} has no sample of it then"]


def test_a_sample_is_not_repeated_once_it_is_older_than_allowed(host: Scraped, running: str) -> None:
    """A sample with a time of its own is repeated for five minutes, as are the last before Prometheus is stopped."""
    with (
        closing(Prometheus([running], fresh_s=2.0)) as strict,
        closing(Prometheus([running], fresh_s=60.0)) as lenient,
    ):
        host.series = {(RAM, 'container="once"'): f"5 {int(time.time() * 1000)}"}
        eventually(lambda: known(strict, RAM, container="once"), "it is there")
        host.series = {}

        eventually(lambda: values(strict, RAM, container="once")[-1:] == [None], "it is too old")
        assert values(lenient, RAM, container="once")[-1] == 5.0


def test_a_hostile_name_finds_its_own_curve_and_nobody_elses(host: Scraped, asked: Prometheus) -> None:
    hostile = 'c1"} or {container="other"} #\\'
    on_the_page = hostile.replace("\\", "\\\\").replace('"', '\\"')
    host.series = {(RAM, f'container="{on_the_page}"'): 7.0, (RAM, 'container="other"'): 9.0}

    eventually(lambda: known(asked, RAM, container="other"), "it is scraped")
    assert set(known(asked, RAM, container=hostile)) == {7.0}
    assert known(asked, RAM, container=hostile + "\n\ud800") == []


def test_of_a_pair_of_which_one_is_stopped_the_other_tells(host: Scraped, running: str) -> None:
    host.series = {(RAM, 'container="c1"'): 7.0}
    with closing(Prometheus([NOBODY, running], fresh_s=FRESH_S)) as both:
        eventually(lambda: known(both, RAM), "the other one tells")

        (dead, alive), notes = all_said(both)

    assert (dead.curves, dead.why[RAM], alive.why) == ([], "All connection attempts failed", {})
    assert not any("RAM" in note for note in notes)


# --- answers that no Prometheus gives


class Fixed(Answering):
    def __init__(self, status: int, body: bytes) -> None:
        super().__init__()
        self.said = status, body

    def answer(self, _: str) -> tuple[int, bytes]:
        return self.said


class Dripping(Answering):
    """A byte now and then, for ever."""

    def reply(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        while True:
            request.wfile.write(b" ")
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("status", "body", "because"),
    [(503, b"starting", "it says 503: starting"), (302, b"", "it says 302"), (200, b"<html>", "cannot be read")],
)
def test_what_is_no_answer_of_the_api_is_silence(status: int, body: bytes, because: str) -> None:
    with Fixed(status, body) as server, closing(Prometheus([server.url], fresh_s=FRESH_S)) as its:
        said = its.ask(EPISODE)

    assert (said.verdict, because in said.because) == (Verdict.SILENT, True)


def test_an_answer_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_MAX_BYTES", 1000)
    with Fixed(200, b" " * 1001) as server, closing(Prometheus([server.url], fresh_s=FRESH_S)) as its:
        assert "larger than 1000 bytes" in its.ask(EPISODE).because


def test_an_answer_is_bounded_in_time_however_it_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.3)
    with Dripping() as server, closing(Prometheus([server.url], fresh_s=FRESH_S)) as its:
        assert its.ask(EPISODE).because == f"{server.url} does not tell: no answer within 0.3 s"


def test_its_password_is_told_to_it_and_to_nobody_else() -> None:
    with (
        Fixed(401, b"who?") as server,
        closing(Prometheus([f"http://ann:secret@{server.address}"], fresh_s=FRESH_S)) as its,
    ):
        said = its.ask(EPISODE)

    assert said.because == f"{server.url} does not tell: it says 401: who?"


def test_no_label_of_an_alert_is_put_into_what_prometheus_is_asked(host: Scraped, running: str) -> None:
    hostile = 'w1"} or vector(1) #'
    episode = replace(EPISODE, worker=hostile, host=hostile, incarnation=hostile)
    host.series = real.wedge()
    rules = {"name": "GpuwardenJobStalled", "query": "up == 2", "labels": {"remedy": "restart_worker"}}

    class Recording(Answering):
        def answer(self, path: str) -> tuple[int, bytes]:
            empty = {"resultType": "vector", "result": []}
            data = {"groups": [{"rules": [rules]}]} if path.startswith("/api/v1/rules") else empty
            return 200, json.dumps({"status": "success", "data": data}).encode()

    with Recording() as server, closing(Prometheus([server.url, running], fresh_s=FRESH_S)) as its:
        said = its.ask(episode)

    assert [each.verdict for each in said.answers] == [Verdict.SILENT, Verdict.SILENT]
    assert server.asked == [
        "/api/v1/rules?type=alert&exclude_alerts=true ",
        "/api/v1/query query=up+%3D%3D+2&timeout=5s",
        "/api/v1/query query=time%28%29+-+timestamp%28gpuwarden_worker_info%29&timeout=5s",
    ]


# --- what the executor makes of it


@pytest.fixture
def works(ledger: Ledger, store: JobStore) -> Iterator["Works"]:
    with ExitStack() as stack:
        yield Works(ledger, store, stack)


class Works:
    """Executors that ask Prometheus."""

    def __init__(self, ledger: Ledger, store: JobStore, stack: ExitStack) -> None:
        self._ledger, self._store, self._stack = ledger, store, stack

    def __call__(self, world: World, *urls: str, policy: Policy = Policy.HEED, armed: bool = True) -> Executor:
        arm(self._ledger, armed=armed)
        prometheus = self._stack.enter_context(closing(Prometheus(urls, fresh_s=FRESH_S))) if urls else None
        hands = Hands(
            witness=world,  # type: ignore[arg-type]
            queue=BuiltinQueue(self._store),
            actuators={"docker": world},
            prometheus=prometheus,
        )
        return Executor(self._ledger, host=HOST, hands=hands, pace=replace(PACE, prometheus_policy=policy))


ACCOUNT = [
    "saw alert firing",
    "saw prometheus",
    "decided begin",
    "did fence",
    "decided stop",
    "did stop",
    "saw free: dead",
    "did requeue",
    "decided start",
    "did start",
    "saw free: done",
    "decided close: mended",
]


def seen(ledger: Ledger) -> list[str]:
    return [entry.because for entry in story(ledger).entries if entry.step == "prometheus"]


@pytest.fixture
def at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus is asked each time that its opinion is wanted."""
    monkeypatch.setattr(execute, "OPINION_S", 0.0)


def test_what_it_confirms_is_begun_and_who_was_asked_stands_in_the_account(
    ledger: Ledger, store: JobStore, host: Scraped, asked: Prometheus, running: str, works: Works
) -> None:
    world = wedged(ledger, store)
    host.series = real.wedge(job_id=1)
    says(asked, Verdict.CONFIRMS, replace(EPISODE, job_id=1))

    to_the_end(works(world, running, policy=Policy.REQUIRE), ledger)

    assert told(ledger) == ACCOUNT
    assert f"{running} confirms: GpuwardenJobStalled holds still" in seen(ledger)[0]


@pytest.mark.usefixtures("at_each_look")
def test_what_it_denies_waits_untouched_and_is_begun_once_it_confirms(
    ledger: Ledger, store: JobStore, host: Scraped, asked: Prometheus, running: str, works: Works
) -> None:
    world = wedged(ledger, store)
    episode = replace(EPISODE, job_id=1)
    host.series = real.wedge(silent_s=1.0, job_id=1)
    says(asked, Verdict.DENIES, episode)
    executor = works(world, running)

    for _ in range(3):
        turn(executor, ledger)

    assert told(ledger) == ["saw alert firing", "saw prometheus", "decided wait: prometheus_denies"]
    assert [each.reason for each in ledger.held()] == ["prometheus_denies"]
    assert (world.boxes["w1"].calls, store.job(1).state) == ([], State.RUNNING)

    host.series = real.wedge(job_id=1)
    says(asked, Verdict.CONFIRMS, episode)
    to_the_end(executor, ledger)

    assert told(ledger) == [*ACCOUNT[:2], "decided wait: prometheus_denies", *ACCOUNT[1:]]
    assert [said.split(" ")[1] for said in seen(ledger)] == ["denies:", "confirms:"]
    assert world.boxes["w1"].calls == ["stop", "start"]


def test_advice_is_recorded_and_holds_nothing(
    ledger: Ledger, store: JobStore, host: Scraped, asked: Prometheus, running: str, works: Works
) -> None:
    world = wedged(ledger, store)
    host.series = real.wedge(silent_s=1.0, job_id=1)
    says(asked, Verdict.DENIES, replace(EPISODE, job_id=1))

    to_the_end(works(world, running, policy=Policy.ADVISE), ledger)

    assert told(ledger) == ACCOUNT
    assert "denies" in seen(ledger)[0]


def test_a_dead_prometheus_is_heeded_by_acting_on_local_evidence(ledger: Ledger, store: JobStore, works: Works) -> None:
    world = wedged(ledger, store)

    to_the_end(works(world, NOBODY, policy=Policy.HEED), ledger)

    assert told(ledger) == ACCOUNT
    assert seen(ledger) == [f"{NOBODY} does not tell: All connection attempts failed"]


@pytest.mark.usefixtures("at_each_look")
def test_a_dead_prometheus_that_is_required_is_waited_for_until_it_or_another_answers(
    ledger: Ledger, store: JobStore, host: Scraped, asked: Prometheus, running: str, works: Works
) -> None:
    world = wedged(ledger, store)
    executor = works(world, NOBODY, policy=Policy.REQUIRE)
    for _ in range(3):
        turn(executor, ledger)
    assert told(ledger) == ["saw alert firing", "saw prometheus", "decided wait: prometheus_silent"]
    assert (world.boxes["w1"].calls, store.job(1).state) == ([], State.RUNNING)

    host.series = real.wedge(job_id=1)
    says(asked, Verdict.CONFIRMS, replace(EPISODE, job_id=1))
    to_the_end(works(world, NOBODY, running, policy=Policy.REQUIRE), ledger)

    assert world.boxes["w1"].calls == ["stop", "start"]


def test_one_that_is_not_to_be_asked_is_not_asked(ledger: Ledger, store: JobStore, works: Works) -> None:
    world = wedged(ledger, store)

    to_the_end(works(world, NOBODY, policy=Policy.IGNORE), ledger)

    assert told(ledger) == [line for line in ACCOUNT if line != "saw prometheus"]


def test_a_dry_run_asks_too_and_does_not_say_that_it_would_act_on_what_is_denied(
    ledger: Ledger, store: JobStore, host: Scraped, asked: Prometheus, running: str, works: Works
) -> None:
    world = wedged(ledger, store)
    host.series = real.wedge(silent_s=1.0, job_id=1)
    says(asked, Verdict.DENIES, replace(EPISODE, job_id=1))

    turn(works(world, running, armed=False), ledger)
    assert told(ledger) == ["saw alert firing", "saw prometheus", "decided wait: prometheus_denies"]

    turn(works(world, NOBODY, armed=False), ledger)
    assert told(ledger)[3:] == ["saw prometheus", "would act", "decided wait: dry_run"]


def test_a_server_that_it_denies_after_the_promise_is_not_stopped(
    ledger: Ledger, host: Scraped, asked: Prometheus, running: str, works: Works, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = silent_in_world(ledger)
    box = world.boxes["w1"]
    first = works(world)
    with monkeypatch.context() as killed:
        killed.setattr(first, "_free", killed_before_the_stop)
        turn(first, ledger)
    assert told(ledger)[-1] == "decided begin"

    host.series = {
        (name, labels.replace("c1", "w1").replace(build.KEY, box.incarnation)): value
        for (name, labels), value in real.silent_server(unanswered_s=1.0).items()
    }
    says(asked, Verdict.DENIES, replace(SERVER, worker="w1", incarnation=box.incarnation))
    for _ in range(2):
        turn(works(world, running), ledger)

    assert told(ledger)[2:4] == ["saw prometheus", "decided wait: prometheus_denies"]
    assert box.calls == []

    to_the_end(works(world, NOBODY), ledger)
    assert box.calls == ["stop", "start"]


def killed_before_the_stop(_: Episode, step: plan.Step) -> None:
    raise GpuwardenError(f"ends here, before {step}")

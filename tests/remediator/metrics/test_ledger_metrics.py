"""Metrics of the ledger: the meaning of each value on both databases, and the documented list."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from remediator import reference
from remediator.ledger.counters import DURATION_BOUNDS_S
from remediator.ledger.ledger import Ledger
from remediator.metrics.ledger import SERIES, STAGES, LedgerCollector, Watchdog
from remediator.notify.notifier import Notifier
from remediator.plan import Kind, Outcome, Stage, Wait
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order
from remediator.webhook.intake import Inbox
from remediator.webhook.reconcile import Reconciler
from tests.remediator.builders import HOST, NOW, REBORN, alert, server_alert
from tests.remediator.ledger.test_chain import drill_alert
from tests.remediator.ledger.test_ledger import BEGIN, REFUSAL, accept, advance, begins, begun, opened, read
from tests.waiting import together

pytestmark = pytest.mark.both_databases

TOOK = "episode_duration_seconds"


def page(ledger: Ledger, host: str = HOST) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(LedgerCollector(ledger, host))
    return registry


def figure(ledger: Ledger, series: str, host: str = HOST, **labels: str) -> float | None:
    return page(ledger, host).get_sample_value(f"gpuwarden_remediator_{series}", labels)


def closed(ledger: Ledger, *, received: float, at: float, outcome: Outcome = Outcome.FIXED, **labels: Any) -> None:
    """A closed episode whose alert was taken 0.5 s after it arrived."""
    ledger.inbox.accept([alert(**labels)], [], now=received)
    ledger.inbox.take_new(labels.get("host", HOST), now=received + 0.5)
    ledger.episodes.close(ledger.episodes.list_open()[-1].episode_id, outcome, Reason.DONE, "it is over", now=at)


# --- durations


def test_duration_counts_from_the_first_alert_to_the_close(ledger: Ledger) -> None:
    closed(ledger, received=NOW, at=NOW + 2)
    closed(ledger, received=NOW + 100, at=NOW + 145.5)
    closed(ledger, received=NOW + 200, at=NOW + 200 + 1801)
    closed(ledger, received=NOW + 300, at=NOW + 301, outcome=Outcome.SUPERSEDED)
    accept(ledger, alert())  # still open

    within = {le: figure(ledger, f"{TOOK}_bucket", outcome="fixed", le=le) for le in ("1.0", "2.0", "30.0", "60.0")}
    assert within == {"1.0": 0, "2.0": 1, "30.0": 1, "60.0": 2}
    assert figure(ledger, f"{TOOK}_bucket", outcome="fixed", le="1800.0") == 2
    assert figure(ledger, f"{TOOK}_bucket", outcome="fixed", le="+Inf") == 3
    assert figure(ledger, f"{TOOK}_count", outcome="fixed") == 3
    assert figure(ledger, f"{TOOK}_sum", outcome="fixed") == 2 + 45.5 + 1801
    assert figure(ledger, f"{TOOK}_bucket", outcome="superseded", le="1.0") == 1


def test_later_alerts_do_not_change_the_duration(ledger: Ledger) -> None:
    ledger.inbox.accept([alert("a")], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)
    ledger.inbox.accept([alert("a"), alert("b")], [], now=NOW + 9)
    ledger.inbox.take_new(HOST, now=NOW + 9)

    ledger.episodes.close(1, Outcome.FIXED, Reason.DONE, "", now=NOW + 10)

    assert figure(ledger, f"{TOOK}_sum", outcome="fixed") == 10


def test_duration_of_a_delayed_episode_counts_from_its_own_alert(ledger: Ledger) -> None:
    ledger.inbox.accept([alert(attempt="1")], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)
    ledger.inbox.accept([alert(attempt="2")], [], now=NOW + 5)
    ledger.inbox.take_new(HOST, now=NOW + 5)
    ledger.episodes.close(1, Outcome.FIXED, Reason.DONE, "", now=NOW + 20)
    ledger.inbox.take_new(HOST, now=NOW + 20)

    ledger.episodes.close(2, Outcome.SUPERSEDED, Reason.DONE, "", now=NOW + 21)

    assert figure(ledger, f"{TOOK}_sum", outcome="fixed") == 20
    assert figure(ledger, f"{TOOK}_sum", outcome="superseded") == 16


def test_duration_is_never_negative(ledger: Ledger) -> None:
    closed(ledger, received=NOW, at=NOW - 3600)

    assert figure(ledger, f"{TOOK}_bucket", outcome="fixed", le="1.0") == 1
    assert figure(ledger, f"{TOOK}_sum", outcome="fixed") == 0


def test_host_counts_its_own_episodes(ledger: Ledger) -> None:
    closed(ledger, received=NOW, at=NOW + 2)
    closed(ledger, received=NOW, at=NOW + 7, host="box2")

    assert figure(ledger, f"{TOOK}_sum", outcome="fixed") == 2
    assert figure(ledger, f"{TOOK}_sum", host="box2", outcome="fixed") == 7


# --- intents


def test_intents_are_counted_by_kind_and_stage_with_zeros(ledger: Ledger) -> None:
    nothing = {(kind, stage): 0.0 for kind, stages in STAGES.items() for stage in stages}
    assert intents(ledger) == nothing

    _, free, _ = begun(ledger)
    assert intents(ledger) == {**nothing, (Kind.FREE, Stage.PLANNED): 1, (Kind.SETTLE, Stage.PLANNED): 1}

    advance(ledger, free, Stage.STOPPING)
    assert intents(ledger) == {**nothing, (Kind.FREE, Stage.STOPPING): 1, (Kind.SETTLE, Stage.PLANNED): 1}
    assert figure(ledger, "intents", host="box2", kind="free", stage="stopping") == 0


def intents(ledger: Ledger) -> dict[tuple[str, str], float]:
    (family,) = [each for each in page(ledger).collect() if each.name == "gpuwarden_remediator_intents"]
    return {(sample.labels["kind"], sample.labels["stage"]): sample.value for sample in family.samples}


def test_age_of_the_oldest_open_intent_is_published_by_stage(ledger: Ledger) -> None:
    now = time.time()
    assert ages(ledger) == {}
    first, second = opened(ledger), opened(ledger, worker="w2")
    assert begins(ledger, first, BEGIN, now=now - 500)
    assert begins(ledger, second, replace(BEGIN, free_key="another", settle_key="8/1"), now=now - 90)
    assert ages(ledger) == {("free", "planned"): 500, ("settle", "planned"): 500}, "the oldest of each"

    free, settle = read(ledger, first).free, read(ledger, first).settle
    assert free is not None
    assert settle is not None
    assert advance(ledger, free, Stage.STOPPING, now=now)
    assert ages(ledger) == {("free", "stopping"): 500, ("free", "planned"): 90, ("settle", "planned"): 500}
    assert advance(ledger, replace(free, stage=Stage.STOPPING), Stage.DONE, now=now)
    assert advance(ledger, settle, Stage.ABANDONED, now=now)
    assert ages(ledger) == {("free", "planned"): 90, ("settle", "planned"): 90}

    ledger.intents.withdraw(second.episode_id, Reason.UNCONFIRMED, "all is well", now=now)
    assert ages(ledger) == {}
    assert figure(ledger, "intent_age_seconds", host="box2", kind="free", stage="planned") is None


def test_age_of_an_intent_is_never_negative(ledger: Ledger) -> None:
    assert begins(ledger, opened(ledger), BEGIN, now=time.time() + 3600)

    assert ages(ledger) == {("free", "planned"): 0, ("settle", "planned"): 0}


def ages(ledger: Ledger) -> dict[tuple[str, str], float]:
    """Ages rounded down to 10 s."""
    (family,) = [each for each in page(ledger).collect() if each.name == "gpuwarden_remediator_intent_age_seconds"]
    return {(each.labels["kind"], each.labels["stage"]): each.value // 10 * 10 for each in family.samples}


def test_refused_quarantine_counts_until_it_is_done_or_its_episode_closed(ledger: Ledger) -> None:
    def refused(host: str = HOST) -> float | None:
        return figure(ledger, "quarantines_refused", host=host)

    arm(ledger)
    first, second = opened(ledger), opened(ledger, worker="w2")
    for episode in (first, second):
        ledger.journal.record(episode.episode_id, "failed", "requeue", "database is locked", now=NOW)
    assert refused() == 0

    for episode in (first, second):
        ledger.journal.record(episode.episode_id, "failed", "quarantine", "database is locked", now=NOW)
        ledger.journal.record(episode.episode_id, "failed", "stop", "the engine said no", now=NOW + 1)
    assert (refused(), refused("box2")) == (2, 0)

    ledger.journal.record(first.episode_id, "did", "quarantine", "", now=NOW + 2)
    assert refused() == 1
    ledger.journal.record(first.episode_id, "failed", "quarantine", "for another GPU", now=NOW + 3)
    assert refused() == 2
    for episode in (first, second):
        ledger.episodes.close(episode.episode_id, Outcome.FIXED, Reason.DONE, "", now=NOW + 4)
    assert refused() == 0


def test_refused_quarantine_of_an_earlier_stage_does_not_count(ledger: Ledger) -> None:
    arm(ledger)
    episode = opened(ledger)
    assert begins(ledger, episode, BEGIN, now=NOW)
    (found,) = ledger.episodes.list_open()
    assert found.free is not None
    assert advance(ledger, found.free, Stage.STOPPING, now=NOW + 1)
    ledger.journal.record(episode.episode_id, "failed", "quarantine", "database is locked", now=NOW + 2)
    assert figure(ledger, "quarantines_refused") == 1

    assert advance(ledger, replace(found.free, stage=Stage.STOPPING), Stage.STOPPING, now=NOW + 3)
    assert figure(ledger, "quarantines_refused") == 1, "a repeated stop is the same stage"

    assert advance(ledger, replace(found.free, stage=Stage.STOPPING), Stage.DEAD, now=NOW + 4)
    assert figure(ledger, "quarantines_refused") == 0
    ledger.journal.record(episode.episode_id, "failed", "quarantine", "database is locked", now=NOW + 5)
    assert figure(ledger, "quarantines_refused") == 1


def test_refused_quarantine_counts_only_while_its_remedy_is_armed(ledger: Ledger) -> None:
    def refused() -> float | None:
        return figure(ledger, "quarantines_refused")

    def order(act: Act, **about: Any) -> None:
        ledger.orders.give(Order(act=act, at=time.time(), who="ann", reason="", **about))

    arm(ledger)
    for worker in ("w1", "w2"):
        episode = opened(ledger, worker=worker)
        ledger.journal.record(episode.episode_id, "failed", "quarantine", "database is locked", now=NOW)
    order(Act.PAUSE, until=time.time() + 3600)
    assert refused() == 2, "a pause does not hold a begun restart"
    order(Act.DISARM, remedy="recycle_container")
    order(Act.DISARM, host="box2")
    assert refused() == 2, "another remedy, and another host"

    order(Act.DISARM, remedy="restart_worker", host=HOST)
    assert refused() == 0
    order(Act.ASK, remedy="restart_worker")
    assert refused() == 2
    order(Act.DISARM)
    assert refused() == 0


def arm(ledger: Ledger) -> None:
    ledger.orders.give(Order(act=Act.ARM, at=NOW, who="ann", reason=""))


# --- backlog


def test_backlog_age_is_that_of_the_oldest_new_alert_or_absent(ledger: Ledger) -> None:
    assert figure(ledger, "backlog_age_seconds") is None
    now = time.time()
    ledger.inbox.accept([alert("a", host="box2")], [REFUSAL], now=now - 500)
    assert figure(ledger, "backlog_age_seconds") is None, "another host takes them"

    ledger.inbox.accept([alert("b")], [], now=now - 90)
    ledger.inbox.accept([alert("c")], [], now=now - 10)

    age = figure(ledger, "backlog_age_seconds")
    assert age is not None
    assert 90 <= age < 150
    ledger.inbox.take_new(HOST, now=now)
    assert figure(ledger, "backlog_age_seconds") is None


def test_backlog_age_is_never_negative(ledger: Ledger) -> None:
    ledger.inbox.accept([alert()], [], now=time.time() + 3600)

    assert figure(ledger, "backlog_age_seconds") == 0


# --- duplicates


def test_firing_alerts_of_an_open_episode_are_duplicates(ledger: Ledger) -> None:
    accept(ledger, alert("a"), alert("z", worker="w2"))
    assert figure(ledger, "alerts_duplicate_total") == 0

    accept(ledger, alert("a"))
    accept(ledger, alert("b", condition="health"))
    assert figure(ledger, "alerts_duplicate_total") == 2

    accept(ledger, alert("a", firing=False))
    ledger.inbox.accept([], [REFUSAL], now=NOW)
    assert figure(ledger, "alerts_duplicate_total") == 2, "resolved and refused alerts do not count"

    ledger.episodes.close(1, Outcome.FIXED, Reason.DONE, "", now=NOW + 1)
    accept(ledger, alert("a"))
    assert figure(ledger, "alerts_duplicate_total") == 2, "it opened another episode"
    assert figure(ledger, "alerts_duplicate_total", host="box2") == 0


def test_duplicate_that_later_opens_an_episode_still_counts(ledger: Ledger) -> None:
    accept(ledger, alert("a", attempt="1"))
    accept(ledger, alert("a", attempt="2"))
    assert figure(ledger, "alerts_duplicate_total") == 1

    ledger.episodes.close(1, Outcome.FIXED, Reason.DONE, "", now=NOW + 1)
    assert figure(ledger, "alerts_duplicate_total") == 1
    ledger.inbox.take_new(HOST, now=NOW + 2)
    assert len(ledger.episodes.list_open()) == 1
    assert figure(ledger, "alerts_duplicate_total") == 1


# --- many episodes


def history(ledger: Ledger) -> None:
    """Episodes, intents and alerts in every counted state."""
    _, free, settle = begun(ledger)
    assert advance(ledger, free, Stage.DONE)
    assert advance(ledger, settle, Stage.FENCED)
    assert advance(ledger, replace(settle, stage=Stage.FENCED), Stage.DONE)
    accept(ledger, alert("a"), alert("b", attempt="2"))
    ledger.inbox.accept([alert("z", worker="w3", firing=False)], [REFUSAL], now=NOW)
    ledger.episodes.close(1, Outcome.FIXED, Reason.DONE, "", now=NOW + 40)
    ledger.inbox.take_new(HOST, now=NOW + 41)
    second = ledger.episodes.list_open()[-1]
    assert begins(ledger, second, replace(BEGIN, free_key=REBORN, settle_key="7/2"), now=NOW + 42)
    ledger.intents.withdraw(second.episode_id, Reason.UNCONFIRMED, "all is well", now=NOW + 43)
    ledger.episodes.close(second.episode_id, Outcome.UNCONFIRMED, Reason.DONE, "", now=NOW + 5000)
    third = opened(ledger, worker="w4")
    assert begins(ledger, third, replace(BEGIN, free_key="another", settle_key=None), now=NOW)
    ledger.journal.record_dry_run(third.episode_id, "would", now=NOW)


def test_totals_count_every_record(ledger: Ledger) -> None:
    history(ledger)

    before = ledger.reports.totals(HOST)

    assert before.alerts == {("accepted", ""): 5, ("refused", "other_host"): 1}
    assert before.duplicates == 2
    assert before.steps == {("did", "s"): 3, ("would", "act"): 1}
    assert before.outcomes == {("fixed", "stall"): 1, ("unconfirmed", "stall"): 1}
    assert before.intents == {
        ("free", "done"): 1, ("free", "planned"): 1, ("free", "withdrawn"): 1,
        ("settle", "done"): 1, ("settle", "withdrawn"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["sqlite"], indirect=True)
def test_cost_of_a_scrape_does_not_grow_with_the_ledger(ledger: Ledger) -> None:
    def work_of_a_scrape() -> int:
        return len(steps_of(ledger, lambda: ledger.reports.totals(HOST)))

    history(ledger)
    closed(ledger, received=NOW, at=NOW + 1, worker="past")
    before = work_of_a_scrape()

    for n in range(60):
        closed(ledger, received=NOW, at=NOW + 1, worker=f"past{n}")
    assert ledger.reports.totals(HOST).outcomes["fixed", "stall"] == 62
    assert work_of_a_scrape() <= 1.2 * before


def steps_of(ledger: Ledger, act: Callable[[], object]) -> list[None]:
    """One entry per ten instructions of SQLite's virtual machine."""
    steps: list[None] = []
    with ledger._engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
    driver.set_progress_handler(lambda: steps.append(None), 10)
    act()
    driver.set_progress_handler(None, 0)
    assert steps, "it used that connection"
    return steps


def test_concurrent_closes_are_all_counted(ledger: Ledger, ledger_url: str) -> None:
    accept(ledger, *(alert(f"f{n}", worker=f"w{n}") for n in range(4)))
    episodes = [each.episode_id for each in ledger.episodes.list_open()]

    def works(mine: Sequence[int]) -> None:
        with closing(Ledger.open(ledger_url, host=HOST)) as own:
            for episode_id in mine:
                for step in ("stop", "start", "fence", "requeue"):
                    own.journal.record(episode_id, "did", step, "", now=NOW)
                own.inbox.accept([], [REFUSAL], now=NOW)
                own.episodes.close(episode_id, Outcome.FIXED, Reason.DONE, "", now=NOW + 3)

    answers = together(*(partial(works, episodes[n:] + episodes[:n]) for n in range(4)))

    assert answers == [None] * 4
    totals = ledger.reports.totals(HOST)
    assert totals.steps == {("did", step): 16 for step in ("stop", "start", "fence", "requeue")}
    assert totals.outcomes == {("fixed", "stall"): 4}
    assert (totals.took["fixed"].count, totals.took["fixed"].sum_s) == (4, 12.0)
    assert totals.alerts == {("accepted", ""): 4, ("refused", "other_host"): 16}


# --- the documented list


def test_restart_that_was_given_up_is_published_until_its_episode_is_closed(ledger: Ledger) -> None:
    given_up = Wait(reason=Reason.GIVEN_UP, message="it does not run")
    accept(ledger, alert(), server_alert(), alert("b", worker="w2"), alert("c", host="box2"))
    ledger.inbox.take_new("box2", now=NOW)
    numbers = {(each.host, each.worker): each.episode_id for each in ledger.episodes.list_open()}
    for host, target in ((HOST, "w1"), (HOST, "c1"), ("box2", "w1")):
        ledger.journal.wait(numbers[host, target], given_up, now=NOW)
    ledger.journal.wait(numbers[HOST, "w2"], Wait(reason=Reason.STARTING, message="it starts"), now=NOW)

    before = targets(ledger)
    ledger.episodes.close(numbers[HOST, "w1"], Outcome.PARTLY, Reason.ACKNOWLEDGED, "by ann", now=NOW + 5)

    assert before == {("w1", ""), ("", "c1")}
    assert targets(ledger) == {("", "c1")}


def targets(ledger: Ledger) -> set[tuple[str, str]]:
    (family,) = (each for each in page(ledger).collect() if each.name == "gpuwarden_remediator_given_up_seconds")
    return {(sample.labels["worker"], sample.labels["container"]) for sample in family.samples}


def test_every_published_series_is_listed(ledger: Ledger, tmp_path: Path) -> None:
    closed(ledger, received=NOW, at=NOW + 2)
    opened(ledger)
    assert begins(ledger, ledger.episodes.list_open()[-1], BEGIN, now=NOW)
    ledger.journal.record_dry_run(2, "would", now=NOW)
    ledger.journal.wait(2, Wait(reason=Reason.CIRCUIT_BREAKER, message="the circuit breaker is open"), now=NOW)
    ledger.executors.beat(host=HOST, pid=1, armed=True, started_at=NOW, errors=0, now=NOW)
    third = opened(ledger, worker="w3")
    ledger.journal.wait(third.episode_id, Wait(reason=Reason.GIVEN_UP, message="it does not run"), now=NOW)
    drill = ledger.chain.start([HOST], who="ann", timeout_s=60.0)[0]
    ledger.inbox.accept([drill_alert(drill.drill_id)], [], now=NOW)
    ledger.inbox.take_new(HOST, now=NOW)
    ledger.inbox.accept([alert()], [], now=NOW)
    registry = page(ledger)
    Reconciler([], Inbox(ledger, host=HOST), alerts_max=1, registry=registry)
    watchdog = Watchdog(ledger)
    watchdog.mark(now=NOW)
    registry.register(watchdog)
    (tmp_path / "notify.toml").touch()
    registry.register(Notifier(ledger, tmp_path / "notify.toml"))
    ledger.notices.notify_administrators(key="k", kind="chain", title="dead", text="dead", now=NOW)
    ledger.notices.expand(1, now=NOW)
    parcel = ledger.notices.claim("administrator 0", now=NOW)
    assert parcel is not None
    ledger.notices.mark_failed(parcel, "refused", now=NOW)

    found = published(registry)

    # Published by the webhook: tests/dashboards reads the first from the page, test_app the others.
    listed = {name: (its.kind, frozenset(its.labels)) for name, its in SERIES.items()}
    for name in (
        "webhook_rejected_total",
        "wrangle_activation_items",
        "executor_down_after_seconds",
        "intent_overdue_after_seconds",
    ):
        del listed[f"gpuwarden_remediator_{name}"]
    assert found == listed


def published(registry: CollectorRegistry) -> Mapping[str, tuple[str, frozenset[str]]]:
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        if family.name.endswith("_created"):
            continue
        assert family.samples, family.name
        labels = frozenset(family.samples[0].labels) - {"le"}
        found[family.name + "_total" * (family.type == "counter")] = (family.type, labels)
    return found


@pytest.mark.parametrize("name", SERIES)
def test_every_series_is_described(name: str) -> None:
    its = SERIES[name]

    assert its.meaning.endswith(".")
    assert f"| `{name}` | {its.kind} |" in reference.metrics_page()


def test_histogram_bounds_are_ascending() -> None:
    assert list(DURATION_BOUNDS_S) == sorted(set(DURATION_BOUNDS_S))

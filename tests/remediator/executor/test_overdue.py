"""What comes to no end is told to people: only the engine and the GPUs are played."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from gpuwarden.db import engine as db_engine
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from tests.asking import PLAIN
from tests.remediator.builders import alert
from tests.remediator.executor.builders import LIMITS, PACE, executor, looping, running, story, told, wedged
from tests.remediator.prometheus import prometheus
from tests.remediator.webhook.test_app import serving
from tests.remediator.world import Box, World
from tests.waiting import eventually

pytestmark = pytest.mark.needs_parts

OVERDUE_S = 5
"""As little as may be set."""


def alerts(prometheus_url: str, name: str) -> Callable[[], set[str]]:
    """Where an alert is, and its kind and stage where it has them; not one that is only kept for lost scrapes."""

    def look() -> set[str]:
        answer = httpx.get(f"{prometheus_url}/api/v1/alerts", trust_env=False, verify=PLAIN).raise_for_status()
        found = [
            {**each["labels"], "state": each["state"]}
            for each in answer.json()["data"]["alerts"]
            if each["labels"]["alertname"] == name and "keepFiringSince" not in each
        ]
        return {" ".join(each[name] for name in ("state", "kind", "stage") if name in each) for each in found}

    return look


def test_a_stop_that_the_engine_refuses_for_ever_is_told_until_it_ends(tmp_path: Path, store: JobStore) -> None:
    with (
        serving(tmp_path / "serve", "--intent-overdue-s", str(OVERDUE_S)) as (served, _),
        prometheus(tmp_path / "prometheus", served.url.removeprefix("http://")) as url,
    ):
        overdue = alerts(url, "GpuwardenIntentOverdue")
        world = wedged(served.ledger, store)
        box = world.boxes["w1"]
        box.unkillable = True
        with looping(executor(served.ledger, store, world)):
            eventually(served.ledger.episodes.list_open, "the alert is taken up")
            eventually(lambda: "failed stop" in told(served.ledger), "the engine has refused")
            assert overdue() == set(), "nothing is owed for long"

            wanted = {"firing free stopping", "firing settle fenced"}
            eventually(lambda: overdue() == wanted, "people are told", within_s=60)

            assert served.ledger.episodes.list_open(), "it is tried again all the time"
            box.unkillable = False
            eventually(lambda: overdue() == set(), "it has come to an end", within_s=60)
            eventually(lambda: outcome(served.ledger) == "mended", "and was mended")


def test_a_refused_quarantine_is_alerted(tmp_path: Path, store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue's file is locked from the stop on, and the GPU of what was stopped is lost."""
    monkeypatch.setattr(db_engine, "BUSY_TIMEOUT_S", 0.02)
    patient = JobStore.open(store._engine.url.render_as_string(hide_password=False))
    with (
        serving(tmp_path / "serve") as (served, _),
        prometheus(tmp_path / "prometheus", served.url.removeprefix("http://")) as url,
        closing(patient),
        closing(
            sqlite3.connect(str(store._engine.url.database), isolation_level=None, check_same_thread=False)
        ) as lock,
    ):
        refused = alerts(url, "GpuwardenQuarantineRefused")
        job_id = running(store)
        lost = alert(job_id=str(job_id), alertname="GpuwardenJobGpuLost", trip="health")
        served.ledger.inbox.accept([lost], [], now=served.ledger.now())
        world = World(Box(worker="w1", job_id=job_id))
        world.gpu_lost = True

        def before_stop(_: Box) -> None:
            lock.execute("BEGIN IMMEDIATE")

        world.before_stop = before_stop
        pace = replace(PACE, limits=replace(LIMITS, settle_bound_s=0.3))
        with looping(executor(served.ledger, patient, world, pace=pace)):
            eventually(lambda: refused() == {"pending"}, "people are to be told in a minute", within_s=60)
            assert "saw free: dead" in told(served.ledger)
            assert "did quarantine" not in told(served.ledger)

            lock.execute("ROLLBACK")
            eventually(lambda: refused() == set(), "the queue has taken it", within_s=60)
            eventually(lambda: outcome(served.ledger) == "mended", "and it goes on")
        assert [each.gpu for each in store.gpu_quarantine.quarantined()] == ["GPU-0"]


def outcome(ledger: Ledger) -> str | None:
    return story(ledger).outcome

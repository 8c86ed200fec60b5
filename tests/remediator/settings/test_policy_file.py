"""The policy file: valid and invalid contents, reloads, and the effect on remedies."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import State
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.main import command
from remediator.plan import Subject, Unconfirmed
from remediator.remedies import REMEDIES
from remediator.remedies.guards import SafetyLimits
from remediator.settings import policy_file as module
from remediator.settings.policy_file import JobRemedyPolicy, Policies, PolicyFile, RemedyPolicy
from tests.remediator.builders import server_alert
from tests.remediator.executor.builders import (
    PACE,
    executor,
    history,
    journal,
    silent_server,
    stalled_job,
    to_the_end,
    turn,
)
from tests.remediator.executor.test_timers import BOUND_S, Clocks, clocks, lingering, look_on

__all__ = ["clocks"]  # a fixture


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "policy.toml"


def write(path: Path, text: str) -> None:
    """Replace the file atomically."""
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


def read(path: Path, text: str) -> PolicyFile:
    write(path, text)
    return PolicyFile(path)


def test_every_remedy_that_restarts_has_a_table() -> None:
    without_restart = {Subject.GPU, Subject.HOST, Subject.ON_DEMAND, Subject.RUN}
    assert Policies.model_fields.keys() == {
        name for name, its in REMEDIES.items() if its.subject not in without_restart
    }
    assert isinstance(Policies().of("restart_worker"), JobRemedyPolicy)
    assert not isinstance(Policies().of("restart_container"), JobRemedyPolicy)


def test_empty_file_sets_nothing(path: Path) -> None:
    assert read(path, "").now() == Policies()


def test_table_applies_only_to_its_remedy(path: Path) -> None:
    text = """
        [restart_worker]
        unconfirmed = "hold"
        retries_max = 1
        cooldown_s = 900
        [restart_container]
        cooldown_s = 0
    """

    its = read(path, text).now()

    assert its.restart_worker == JobRemedyPolicy(unconfirmed=Unconfirmed.HOLD, retries_max=1, cooldown_s=900.0)
    assert its.restart_container == RemedyPolicy(cooldown_s=0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[restart_wroker]", "unknown table: 'restart_wroker'; known: restart_worker, restart_"),
        ("[restart_worker]\nhold = true", "unknown name in [restart_worker]: 'hold'; known: cooldown_s, unco"),
        ('[restart_container]\nunconfirmed = "hold"', "known: cooldown_s"),
        ('[restart_worker]\nunconfirmed = "wait"', "restart_worker.unconfirmed = 'wait': Input should"),
        ("[restart_worker]\nretries_max = -1", "restart_worker.retries_max = -1: "),
        ('[restart_worker]\nretries_max = "3"', "restart_worker.retries_max = '3': "),
        ("[restart_worker]\ncooldown_s = nan", "restart_worker.cooldown_s = nan"),
        ("restart_worker = 1", "restart_worker = 1: "),
        ("[restart_worker", "cannot be read"),
        ("#" * (64 * 1024 + 1), "is larger than 65536 bytes"),
    ],
    ids=[
        "unknown table", "unknown name", "name of another table", "unknown choice", "negative", "text", "NaN",
        "not a table", "not TOML", "too large",
    ],
)  # fmt: skip
def test_invalid_file_is_refused_with_the_expected_values(path: Path, text: str, reason: str) -> None:
    with pytest.raises(GpuwardenError) as refused:
        read(path, text)

    assert str(refused.value).startswith((f"invalid policy file {path}: ", f"policy file {path} "))
    assert reason in str(refused.value)


def test_valid_change_is_loaded_and_an_invalid_one_ignored(path: Path) -> None:
    its = read(path, "[restart_worker]\ncooldown_s = 1")

    write(path, "[restart_worker]\ncooldown_s = 2")
    assert its.now().restart_worker.cooldown_s == 2
    with capture_logs() as logs:
        write(path, "[restart_worker]\ncooldown_s = -3")
        assert [its.now().restart_worker.cooldown_s for _ in range(3)] == [2, 2, 2]
        path.unlink()
        assert its.now().restart_worker.cooldown_s == 2
        write(path, "[restart_worker]\ncooldown_s = 4")
        assert its.now().restart_worker.cooldown_s == 4

    assert [each["event"] for each in logs] == ["policy reload failed, old policy in use", "policy reloaded"]
    assert "restart_worker.cooldown_s = -3" in logs[0]["reason"]


def test_invalid_policy_file_prevents_the_start(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuwarden.logs.configure", lambda **_: None)
    (tmp_path / "host").write_text("box1\n")
    write(path, "[restart_worker]\nhold = true")
    databases = ("--ledger", f"sqlite:///{tmp_path}/l.db", "--queue-db", f"sqlite:///{tmp_path}/q.db")
    options = ("--runtime-dir", str(tmp_path), *databases, "--docker", "none", "--policy", str(path))

    with pytest.raises(GpuwardenError, match=r"unknown name in \[restart_worker\]: 'hold'"):
        command(["execute", *options])


# --- effects


def test_job_with_an_unconfirmed_exit_is_held_by_policy(
    ledger: Ledger, store: JobStore, clocks: Clocks, path: Path
) -> None:
    policy = read(path, '[restart_worker]\nunconfirmed = "hold"')
    works = executor(ledger, store, lingering(ledger, store), policy=policy)
    turn(works, ledger)
    look_on(works, ledger, clocks, for_s=10 * BOUND_S)

    assert store.job(1).state is State.FENCING
    assert [each.reason for each in ledger.reports.list_held()] == ["exit_unconfirmed"]
    assert "saw free: abandoned" in journal(ledger)

    write(path, '[restart_worker]\nunconfirmed = "requeue"')
    look_on(works, ledger, clocks, for_s=10)

    assert store.job(1).state is State.QUEUED
    assert history(ledger).wait_reason == "given_up"


def test_operator_cancels_a_held_job(ledger: Ledger, store: JobStore, clocks: Clocks, path: Path) -> None:
    policy = read(path, '[restart_worker]\nunconfirmed = "hold"')
    works = executor(ledger, store, lingering(ledger, store), policy=policy)
    turn(works, ledger)
    look_on(works, ledger, clocks, for_s=10 * BOUND_S)

    store.admin.cancel(store.job(1).job_id, now=store.now(), reason="its host was switched off")
    look_on(works, ledger, clocks, for_s=5)

    assert (store.job(1).state, history(ledger).wait_reason) == (State.CANCELLED, "given_up")


def test_retries_max_of_a_remedy_overrides_the_option(ledger: Ledger, store: JobStore, path: Path) -> None:
    works = executor(ledger, store, stalled_job(ledger, store), policy=read(path, "[restart_worker]\nretries_max = 0"))

    to_the_end(works, ledger)

    assert PACE.limits.retries_max == 3
    assert store.job(1).state is State.FAILED


def test_cooldown_of_a_remedy_overrides_the_option(ledger: Ledger, store: JobStore, path: Path) -> None:
    pace = replace(PACE, safety_limits=SafetyLimits(cooldown_s=300.0))
    world = silent_server(ledger)
    box = world.boxes["w1"]
    works = executor(ledger, store, world, settings=pace, policy=read(path, "[restart_worker]\ncooldown_s = 0"))
    to_the_end(works, ledger)
    box.hung = True
    ledger.inbox.accept([server_alert("again", container="w1", incarnation=box.incarnation)], [], now=time.time())

    turn(works, ledger)
    assert [each.reason for each in ledger.reports.list_held()] == ["cooldown"]

    write(path, "[restart_container]\ncooldown_s = 0")
    to_the_end(works, ledger)
    assert box.calls == ["stop", "start", "stop", "start"]

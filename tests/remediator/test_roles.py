"""A worker's database role attacks the ledger: it cannot write it, and what others write there starts no action."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import insert, make_url

from gpuwarden.cli.main import main
from gpuwarden.db.transactions import writing
from gpuwarden.queue import JobStore
from remediator.ledger.ledger import Ledger
from remediator.ledger.schema import EPISODES, INTENTS
from remediator.plan import Stage
from testbed.postgres import Postgres
from tests.remediator.builders import HOST
from tests.remediator.executor.builders import executor, turn
from tests.remediator.test_main import execute, refused, run_until_sigterm, runtime_dir
from tests.remediator.world import Box, World

__all__ = ["execute", "run_until_sigterm", "runtime_dir"]

INTENT = (
    "INSERT INTO intents (episode_id, kind, key, host, stage, created_at, entered_at, data) SELECT 1, 'free', 'k', "
)
ATTACKS = {
    "arm every host": "INSERT INTO standing_orders (at, act, topic, who, reason) VALUES (1, 'arm', 'arming', 'x', '')",
    "insert an intent": f"{INTENT} 'box1', 'stopping', 1, 1, '{{}}'",
    "take the tables": "ALTER TABLE intents OWNER TO CURRENT_USER",
}


@pytest.fixture
def roles(postgres: Postgres, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
    """URLs of queue and ledger as `gpuwarden init-db` creates them."""
    names = [f"{part}_{uuid4().hex[:8]}" for part in ("queue", "ledger")]
    options = [postgres.url("postgres"), "--queue", names[0], "--ledger", names[1]]
    assert main(["init-db", *options]) == 0
    first = capsys.readouterr()
    assert main(["init-db", *options]) == 0, "it can be repeated"
    assert capsys.readouterr().out == "", "the passwords are kept"
    urls = [line.partition("=")[2] for line in first.err.splitlines()]
    assert [line.split(":")[2:4] for line in first.out.splitlines()] == [[name, name] for name in names]
    assert all(len(line.split(":")[4]) == 48 for line in first.out.splitlines())
    yield urls[0], urls[1]
    for name in names:
        postgres.drop(name)
        with psycopg.connect(postgres.url("postgres").replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f"DROP ROLE {name}".encode())


def of_role(url: str, role: str) -> str:
    return make_url(url).set(drivername="postgresql", username=make_url(role).username).render_as_string()


@pytest.mark.needs_postgres
@pytest.mark.parametrize("statement", ATTACKS.values(), ids=ATTACKS)
def test_role_of_the_queue_cannot_write_the_ledger(roles: tuple[str, str], statement: str) -> None:
    queue, ledger = roles
    JobStore.open(queue).close()
    with closing(Ledger.open(ledger, host=HOST)) as found:
        with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
            psycopg.connect(of_role(ledger, queue)).execute(statement.encode())

        assert main(["arm", "--ledger", of_role(ledger, queue)]) == 1
        assert not found.orders.current().armed(host=HOST, remedy="restart_worker")


@pytest.mark.needs_postgres
def test_role_of_the_queue_enrols_hosts_and_that_of_the_ledger_does_not(
    roles: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    queue, ledger = roles

    assert main(["host", "enrol", "box1", "--queue-db", queue]) == 0
    assert capsys.readouterr().out.startswith("gpuwarden_host_")

    for act in (["enrol", "box2"], ["rotate", "box1"], ["list"]):
        assert main(["host", *act, "--queue-db", of_role(queue, ledger)]) == 1
        out, err = capsys.readouterr()
        assert (out, "permission denied for database" in err) == ("", True)


@pytest.mark.needs_postgres
def test_programs_refuse_one_role_for_queue_and_ledger(
    roles: tuple[str, str], runtime_dir: Any, run_until_sigterm: Callable[..., int]
) -> None:
    queue, ledger = roles
    JobStore.open(queue).close()

    def program(role: str, *databases: str, more: tuple[str, ...] = ()) -> list[str]:
        urls = ["--ledger", databases[0], "--queue-db", databases[1]]
        web = ["--web-config-file", str(runtime_dir / "web.yml"), "--port", "0"] if role == "serve" else []
        return ["remediator", role, "--runtime-dir", str(runtime_dir), *urls, *web, *more]

    for role in ("execute", "serve"):
        code, said = refused(program(role, queue, queue))
        assert code == 1
        assert "may write the ledger too" in said[0]
        assert "gpuwarden init-db" in said[0]
    with closing(Ledger.open(ledger)) as found:
        assert run_until_sigterm(program("execute", ledger, queue), up=found.executors.last_beats) == 0
    with closing(Ledger.open(queue)) as found:
        shared = program("execute", queue, queue, more=("--allow-shared-role",))
        assert run_until_sigterm(shared, up=found.executors.last_beats) == 0


BOXES: dict[str, dict[str, Any]] = {
    "healthy": {"hung": False},
    "healthy, not managed": {"hung": False, "managed": False},
    "hung, not managed": {"managed": False},
    "healthy, without a worker": {"hung": False, "job_id": None, "attempt": None},
    "stopped, not managed": {"running": False, "managed": False},
}


@pytest.mark.parametrize("backend", [pytest.param("postgresql", marks=pytest.mark.needs_postgres)], indirect=True)
@pytest.mark.parametrize("remedy", ["restart_worker", "restart_container"])
@pytest.mark.parametrize("about", BOXES.values(), ids=BOXES)
def test_forged_intents_act_on_no_container(
    ledger: Ledger, store: JobStore, about: dict[str, Any], remedy: str
) -> None:
    """The role writes the ledger, as with `--allow-shared-role`. It arms the host, and inserts one intent per stage."""
    subject, condition = ("worker", "stall") if remedy == "restart_worker" else ("server", "server")
    box = Box(worker="w1", **about)
    world = World(box)
    for stage in (Stage.PLANNED, Stage.STOPPING, Stage.DEAD, Stage.STARTING):
        with writing(ledger._engine) as connection:
            episode = {
                "remedy": remedy, "condition": condition, "host": HOST, "subject": subject, "worker": "w1",
                "incarnation": "i1" if subject == "worker" else box.incarnation, "job_id": box.job_id,
                "attempt": box.attempt, "opened_at": time.time(), "dry_run_recorded": False,
            }  # fmt: skip
            episode_id = connection.scalar(insert(EPISODES).values(episode).returning(EPISODES.c.episode_id))
            data = {"kind": "docker", "handle": box.handle, "name": "w1", "gpus": ["GPU-0"], "pids": [], "cgroup": None}
            free = {
                "episode_id": episode_id, "kind": "free", "key": box.incarnation, "host": HOST, "stage": stage,
                "created_at": time.time(), "entered_at": time.time(), "data": data,
            }  # fmt: skip
            connection.execute(insert(INTENTS).values(free))
        works = executor(ledger, store, world)

        for _ in range(5):
            turn(works, ledger)

        assert box.calls == []
        with writing(ledger._engine) as connection:
            connection.execute(INTENTS.delete())
            connection.execute(EPISODES.update().values(closed_at=time.time()))

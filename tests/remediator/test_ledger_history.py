"""The ledger's tables go down to an older version and up again: what is kept, what is lost, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import JSON, Boolean, Engine, Float, Integer, MetaData, insert, select, text

from gpuwarden import history
from gpuwarden.cli import main
from gpuwarden.database import connect
from gpuwarden.history import InTheWayError, WouldLoseError
from remediator.alert import Alert
from remediator.capture import Captured
from remediator.ledger import Ledger
from remediator.plan import Outcome, Wait
from remediator.schema import LEDGER, METADATA
from tests.remediator.builders import HOST, NOW, alert, host_alert, server_alert, tenant_alert

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")

Rows = dict[str, list[dict[str, Any]]]


def go(url: str, to: str | None = None, *, losing: bool = True) -> str:
    return history.migrate(url, LEDGER, to=to, losing=losing)


def reflected(engine: Engine) -> MetaData:
    tables = MetaData()
    tables.reflect(engine, only=lambda name, _: name in METADATA.tables)
    return tables


def fill(engine: Engine) -> None:
    """Two rows in every table there is, with something in every column."""
    with engine.begin() as connection:
        for table in reflected(engine).sorted_tables:
            for n in (1, 2):
                row: dict[str, Any] = {}
                for column in table.columns:
                    row[column.name] = f"{column.name} {n}"
                    for kind, value in ((JSON, {"host": f"host {n}"}), (Integer, n), (Float, n / 2), (Boolean, True)):
                        if isinstance(column.type, kind):
                            row[column.name] = value
                row |= {"subject": "worker"} if "subject" in row else {}
                # As the way up to 0002 sets it.
                row |= {"host": f"host {n}"} if table.name == "alerts" and "host" in row else {}
                connection.execute(insert(table).values(**row))


def rows(engine: Engine) -> Rows:
    with engine.connect() as connection:
        return {
            table.name: [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]
            for table in reflected(engine).sorted_tables
        }


def shared(some: Rows, others: Rows) -> tuple[Rows, Rows]:
    columns = {
        name: set(some[name][0]) & set(others[name][0])
        for name in set(some) & set(others)
        if some[name] and others[name]
    }

    def cut(of: Rows) -> Rows:
        return {name: [{key: row[key] for key in row if key in columns[name]} for row in of[name]] for name in columns}

    return cut(some), cut(others)


def differences(engine: Engine) -> list[Any]:
    """Of the ledger's tables: the queue's may be there too."""
    with engine.connect() as connection:
        found = compare_metadata(
            MigrationContext.configure(connection, opts={"compare_server_default": True}), METADATA
        )
    return [
        each for each in found if each[0] not in ("remove_table", "remove_index") or each[1].name in METADATA.tables
    ]


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_an_older_version_wrote_is_there_again_after_the_way_up_and_down(ledger_url: str, revision: str) -> None:
    engine = connect(ledger_url)
    go(ledger_url, "none")
    go(ledger_url, revision)
    fill(engine)
    before = rows(engine)

    go(ledger_url)
    assert differences(engine) == []
    known, still = shared(before, rows(engine))
    assert known == still
    assert set(known) == set(before)
    go(ledger_url, revision)

    assert rows(engine) == before
    engine.dispose()


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_what_both_versions_know_outlives_the_way_down_and_up(ledger_url: str, revision: str) -> None:
    engine = connect(ledger_url)
    go(ledger_url)
    fill(engine)
    before = rows(engine)

    go(ledger_url, revision)
    known, still = shared(before, rows(engine))
    assert known == still
    assert {"episodes", "alerts", "intents", "journal", "executors"} <= set(known)
    go(ledger_url)

    known, still = shared(known, rows(engine))
    assert known == still
    engine.dispose()


def test_an_open_episode_about_a_server_keeps_the_tables_up_and_a_closed_one_is_named(
    ledger: Ledger, ledger_url: str
) -> None:
    ledger.accept([server_alert()], [], now=NOW)
    with pytest.raises(InTheWayError, match="1 alerts have not been taken up yet, and may be about servers"):
        go(ledger_url, "0003")
    ledger.take_new(HOST, now=NOW)
    with pytest.raises(InTheWayError, match="1 episodes about servers, tenants or hosts are open"):
        go(ledger_url, "0003")
    ledger.close_episode(1, Outcome.MENDED, "all is well", now=NOW)

    with pytest.raises(WouldLoseError, match="that 1 closed episodes were about servers, tenants or hosts"):
        go(ledger_url, "0003", losing=False)
    assert go(ledger_url, "0003") == "the ledger was of revision 0008 and is of 0003 now"


@pytest.mark.parametrize("about", [host_alert(), tenant_alert()], ids=["a host", "a tenant"])
@pytest.mark.parametrize("revision", ["0007", "0003"])
def test_an_open_episode_about_a_host_or_a_tenant_keeps_the_tables_up_and_a_closed_one_is_named(
    ledger: Ledger, ledger_url: str, about: Alert, revision: str
) -> None:
    ledger.accept([about], [], now=NOW)
    with pytest.raises(
        InTheWayError, match="1 alerts have not been taken up yet, and may be about hosts, tenants or runs"
    ):
        go(ledger_url, revision)
    ledger.take_new(HOST, now=NOW)
    with pytest.raises(InTheWayError, match="1 episodes about hosts, tenants or runs are open"):
        go(ledger_url, revision)
    ledger.accept([replace(about, firing=False)], [], now=NOW)
    ledger.take_new(HOST, now=NOW)
    ledger.close_episode(1, Outcome.MENDED, "all is well", now=NOW)

    with pytest.raises(WouldLoseError, match="what 1 closed episodes were about: the older version knows neither"):
        go(ledger_url, revision, losing=False)
    assert go(ledger_url, revision) == f"the ledger was of revision 0008 and is of {revision} now"


def test_what_was_captured_is_named_before_it_is_lost(ledger: Ledger, ledger_url: str) -> None:
    ledger.accept([alert()], [], now=NOW)
    ledger.take_new(HOST, now=NOW)
    (episode,) = ledger.open_episodes(HOST)
    document: dict[str, Any] = {"processes": [], "cut_short": None, "curves": []}
    assert ledger.keep(episode, Captured(armed=False, took_s=0.1, document=document), now=NOW)

    with pytest.raises(WouldLoseError, match=r"what was captured before 1 stops \(`gpuwarden ledger evidence`\)"):
        go(ledger_url, "0004", losing=False)
    assert go(ledger_url, "0004") == "the ledger was of revision 0008 and is of 0004 now"


def test_what_is_armed_or_paused_is_named_before_it_is_forgotten(
    ledger: Ledger, ledger_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.accept([alert()], [], now=NOW)
    ledger.take_new(HOST, now=NOW)
    assert main(["arm", "--ledger", ledger_url, "--yes"]) == 0
    capsys.readouterr()

    assert main(["ledger", "--ledger", ledger_url, "migrate", "--to", "0002"]) == 1
    assert "  1 orders, and with them what is armed, paused or braked" in capsys.readouterr().err
    assert main(["ledger", "--ledger", ledger_url, "migrate", "--to", "0002", "--yes"]) == 0
    assert main(["ledger", "--ledger", ledger_url, "list"]) == 1
    assert "has tables of another version (revision 0002; this one knows 0008)" in capsys.readouterr().err
    assert main(["ledger", "--ledger", ledger_url, "migrate"]) == 0

    assert capsys.readouterr().out == "the ledger was of revision 0002 and is of 0008 now\n"
    assert not ledger.orders().given
    assert [episode.worker for episode in ledger.open_episodes(HOST)] == ["w1"]


def test_what_asks_for_approval_is_a_dry_run_to_an_older_version_and_never_armed_by_what_came_before(
    ledger: Ledger, ledger_url: str
) -> None:
    ledger.accept([alert()], [], now=NOW)
    ledger.take_new(HOST, now=NOW)
    assert main(["arm", "--ledger", ledger_url, "--yes"]) == 0
    assert main(["arm", "--ledger", ledger_url, "--yes", "--approval"]) == 0
    ledger.wait(1, Wait(reason="approval", because="asks", asks="k"), now=NOW)
    assert main(["approve", "--ledger", ledger_url, "1"]) == 0

    with pytest.raises(WouldLoseError, match="that 1 orders arm with approval: the older version takes each"):
        go(ledger_url, "0005", losing=False)
    with pytest.raises(WouldLoseError, match="what people answered 1 times when they were asked"):
        go(ledger_url, "0005", losing=False)
    assert main(["maintenance", "start", "--ledger", ledger_url, "--for", "1h"]) == 0
    with pytest.raises(WouldLoseError, match="1 maintenances: the older version acts in them"):
        go(ledger_url, "0005", losing=False)
    go(ledger_url, "0005")
    go(ledger_url)

    assert not ledger.orders().armed(host=HOST, remedy="restart_worker")
    assert [each.act for each in ledger.orders_given(since=0.0)] == ["arm", "disarm"]


def test_a_ledger_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--ledger", f"sqlite:///{tmp_path}/none.db", "migrate"]) == 1

    assert "there is no ledger at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_the_first_version_goes_up_from_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/old.db"
    go(url, "0001")
    engine = connect(url)
    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {LEDGER.version_table}"))
    engine.dispose()

    assert go(url) == "the ledger was of revision 0001 and is of 0008 now"

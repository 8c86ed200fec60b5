"""The ledger's first revision makes the tables of `remediator.schema`, and `ledger migrate` makes no ledger."""

from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine

from gpuwarden import history
from gpuwarden.cli import main
from gpuwarden.database import connect
from remediator.schema import LEDGER, METADATA


def differences(engine: Engine) -> list[Any]:
    """Of the ledger's tables: the queue's may be there too."""
    with engine.connect() as connection:
        found = compare_metadata(
            MigrationContext.configure(connection, opts={"compare_server_default": True}), METADATA
        )
    return [
        each for each in found if each[0] not in ("remove_table", "remove_index") or each[1].name in METADATA.tables
    ]


def test_the_first_revision_makes_the_tables_of_the_schema_and_unmakes_them(ledger_url: str) -> None:
    engine = connect(ledger_url)
    history.migrate(ledger_url, LEDGER, to="none", losing=True)
    assert {each[0] for each in differences(engine)} >= {"add_table"}

    history.migrate(ledger_url, LEDGER, to=None, losing=False)

    assert differences(engine) == []
    engine.dispose()


def test_a_ledger_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--ledger", f"sqlite:///{tmp_path}/none.db", "migrate"]) == 1

    assert "there is no ledger at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

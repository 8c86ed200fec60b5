"""A person's way to an older version of the tables, and back: what would be lost is told first.

A revision in `migrations/versions` says what is lost where it is undone, and what is in the way of that: `LOSES` and
`REFUSES`, each a query that counts and what to say where it counts any. They are asked while all newer tables still
stand, in the transaction that would undo the revision.
"""

import argparse
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Final

from sqlalchemy import Connection, text

from gpuwarden.database import NOTHING, Schema, connect
from gpuwarden.errors import GpuwardenError

_ONCE_MORE: Final = "a program of this version that is started afterwards brings the tables up again"


class WouldLoseError(GpuwardenError):
    """Going down loses what the message names, and nobody has agreed to that."""


class InTheWayError(GpuwardenError):
    """The older version could not live with what the message names."""


def migrate(url: str, schema: Schema, *, to: str | None, losing: bool) -> str:
    """Bring tables to a revision, up or down; a sentence about what was done.

    Args:
        url: the database.
        schema: whose tables.
        to: the revision; the newest when not given, `NOTHING` to remove the tables.
        losing: whether a person has agreed to lose what the older version does not know.

    Raises:
        WouldLoseError: it goes down, and nobody has agreed.
        InTheWayError: it goes down, and the older version could not live with what is there.
        DatabaseError: the database refused, or is of a newer gpuwarden.
    """

    def agree(connection: Connection, undone: Sequence[ModuleType]) -> None:
        aim = to or NOTHING
        if because := [line for each in undone for line in _told(connection, each, "REFUSES")]:
            raise InTheWayError(f"the {schema.name} cannot go down to {aim}:\n" + "\n".join(f"  {x}" for x in because))
        if not losing:
            lost = [line for each in undone for line in _told(connection, each, "LOSES")] or ["nothing that is there"]
            raise WouldLoseError(
                f"the {schema.name} going down to {aim} would lose:\n"
                + "\n".join(f"  {each}" for each in lost)
                + f"\nEnd the programs that use it, then say --yes; {_ONCE_MORE}."
            )

    from gpuwarden.revisions import migrate_to  # noqa: PLC0415 - Alembic is slow to import, and seldom needed

    engine = connect(url)
    try:
        found, now = migrate_to(engine, schema, to, agree=agree)
    finally:
        engine.dispose()
    if found == now:
        return f"the {schema.name} is of revision {now or NOTHING}: nothing to do"
    return f"the {schema.name} was of revision {found or NOTHING} and is of {now or NOTHING} now"


def add_migrate(parser: argparse.ArgumentParser) -> None:
    """The options of a `migrate` command."""
    parser.add_argument(
        "--to", metavar="REVISION", help=f"0001 and so on, or {NOTHING} to remove the tables; the newest if not given"
    )
    parser.add_argument("--yes", action="store_true", help="go down although something is lost by it")


def command(url: str, schema: Schema, arguments: argparse.Namespace) -> int:
    """`gpuwarden queue migrate` and `gpuwarden ledger migrate`."""
    print(migrate(url, schema, to=arguments.to, losing=arguments.yes))
    return 0


def _told(connection: Connection, revision: ModuleType, name: str) -> Iterator[str]:
    questions: Sequence[tuple[str, str]] = getattr(revision, name, ())
    for question, sentence in questions:
        if count := connection.scalar(text(question)):
            yield sentence.format(count)

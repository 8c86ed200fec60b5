"""PostgreSQL roles: the role of the queue, which every worker has, must not write the ledger."""

from typing import Final

from sqlalchemy import Engine, text

from gpuwarden.db.engine import connect, is_shared
from gpuwarden.db.errors import DatabaseError, NoAnswerError
from gpuwarden.db.transactions import reading
from remediator.ledger.schema import ORDERS

_WHO: Final = text("SELECT session_user, pg_postmaster_start_time()")
"""The role, and when the server started: names the server."""

_MAY_WRITE: Final = text(
    "SELECT pg_has_role(:role, tableowner, 'MEMBER') OR has_table_privilege(:role, :ledger, 'INSERT')"
    " FROM pg_tables WHERE tablename = :ledger AND schemaname = ANY(current_schemas(false))"
)


def refuse_shared_role(ledger: Engine, queue_url: str) -> None:
    """Check that the queue's role cannot write the ledger. SQLite has no roles.

    A queue that does not answer is not checked: the programs need none to start.

    Raises:
        DatabaseError: it can, or the ledger does not answer.
    """
    queue = connect(queue_url)
    try:
        if not (is_shared(ledger) and is_shared(queue)):
            return
        try:
            with reading(queue) as connection:
                role, server = connection.execute(_WHO).one()
        except NoAnswerError:
            return
        with reading(ledger) as connection:
            same_server = connection.execute(_WHO).one()[1] == server
            if same_server and connection.scalar(_MAY_WRITE, {"role": role, "ledger": ORDERS.name}):
                raise DatabaseError(
                    f"the queue's role {role} may write the ledger too, so every worker could arm hosts: create roles "
                    "with `gpuwarden init-db`, or accept this with --allow-shared-role"
                )
    finally:
        queue.dispose()

"""`gpuwarden init-db`: create the PostgreSQL databases of queue and ledger, each with its own role.

The owner of a database is the only role that may connect to it. So a worker, which has the queue's role, can neither
arm a host nor write an intent.
"""

import argparse
import re
import secrets
import sys
from typing import Final

from sqlalchemy import Connection, Engine, text

from gpuwarden.db.engine import connect, is_shared
from gpuwarden.db.transactions import autocommit
from gpuwarden.errors import GpuwardenError
from gpuwarden.format import Parser, show

_PARTS: Final = {"queue": "GPUWARDEN_QUEUE_DB", "ledger": "GPUWARDEN_REMEDIATOR_LEDGER"}
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")


def command(argv: list[str]) -> int:
    """`gpuwarden init-db`."""
    arguments = _parser().parse_args(argv)
    names = {part: getattr(arguments, part) for part in _PARTS}
    if names["queue"] == names["ledger"]:
        raise GpuwardenError(f"queue and ledger cannot both be named {names['queue']}: set --queue or --ledger")
    engine = connect(arguments.server)
    try:
        if not is_shared(engine):
            raise GpuwardenError("only PostgreSQL has roles: give a URL as postgresql://postgres@db.example/postgres")
        for name in names.values():
            _create(engine, name)
        for part, name in names.items():
            url = engine.url.set(drivername="postgresql", username=name, password=None, database=name)
            show(f"init-db: {_PARTS[part]}={url.render_as_string()}", file=sys.stderr)
    finally:
        engine.dispose()
    return 0


def _create(engine: Engine, name: str) -> None:
    """Create a role, its database and its password, as far as they do not exist. Print the password of a new role."""
    with autocommit(engine) as connection:
        password = _create_role(connection, name)
        _create_database(connection, name)
    if password is None:
        show(f"init-db: role {name} exists and keeps its password", file=sys.stderr)
    else:
        show(f"{engine.url.host or '*'}:{engine.url.port or '*'}:{name}:{name}:{password}")


def _create_role(connection: Connection, name: str) -> str | None:
    """Create the role. Returns its password; `None` if the role exists."""
    if connection.scalar(text("SELECT 1 FROM pg_roles WHERE rolname = :name"), {"name": name}):
        return None
    password = secrets.token_hex(24)
    connection.exec_driver_sql(f"CREATE ROLE {name} LOGIN PASSWORD '{password}'")
    if not connection.scalar(text("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")):
        connection.exec_driver_sql(f"GRANT {name} TO CURRENT_USER")  # needed to make it the owner of a database
    return password


def _create_database(connection: Connection, name: str) -> None:
    owner = text("SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = :name")
    found = connection.scalar(owner, {"name": name})
    if found is None:
        connection.exec_driver_sql(f"CREATE DATABASE {name} OWNER {name}")
    elif found != name:
        raise GpuwardenError(f"database {name} belongs to role {found}: set --queue and --ledger to other names")
    connection.exec_driver_sql(f"REVOKE ALL ON DATABASE {name} FROM PUBLIC")


def _name(given: str) -> str:
    if _NAME.fullmatch(given):
        return given
    raise argparse.ArgumentTypeError(f"invalid name {given!r}: use lower-case letters, digits and _")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="gpuwarden init-db",
        description="Create the PostgreSQL databases of queue and ledger, each with a role that owns it. Prints the "
        "lines of a password file for new roles. What exists is kept.",
    )
    parser.add_argument(
        "server",
        metavar="URL",
        help="database URL of a role that may create roles, such as postgresql://postgres@db.example/postgres",
    )
    for part in _PARTS:
        parser.add_argument(
            f"--{part}",
            metavar="NAME",
            type=_name,
            default=f"gpuwarden_{part}",
            help=f"name of the {part}'s role and database (default: %(default)s)",
        )
    return parser

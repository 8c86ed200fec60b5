"""Gateways, PostgreSQL and workers are killed at random, and every job ends once.

Two hosts have three workers each. A host's gateway passes requests to a central gateway, of which there are two.
"""

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from bench.chaos.judge import judge
from bench.chaos.player import AT_WORK, play
from testbed.postgres import NoPostgres, postgres

pytestmark = [pytest.mark.needs_postgres, pytest.mark.slow]

NIGHTLY_S: Final = 600.0


def processes_of(folder: Path) -> list[bytes]:
    """The command lines that name this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(entry.read_bytes())
    return [each for each in found if bytes(folder) in each]


@pytest.mark.behaviour("A11")
@pytest.mark.behaviour("A13")
@pytest.mark.parametrize("seconds", [25.0, pytest.param(NIGHTLY_S, marks=pytest.mark.nightly)])
def test_every_job_ends_once_although_gateways_and_postgresql_are_killed(tmp_path: Path, seconds: float) -> None:
    seed = int(os.environ.get("CHAOS_SEED", random.randrange(10**6)))  # noqa: S311 - not a secret
    with postgres(tmp_path / "server", durable=False) as server:
        if isinstance(server, NoPostgres):
            pytest.skip(server.reason)
        server.create("chaos")
        url = server.url("chaos")
        played = play(url, tmp_path, seconds=seconds, seed=seed, server=server, through_gateways=True)
        verdict = judge(played)

    print(f"CHAOS_SEED={seed}: {dict(verdict.counts)}, workers ended {dict(played.ends)}")
    assert verdict.broken == []
    expected = ("host gateway killed", "central gateway killed", "server killed", "worker killed", AT_WORK, "completed")
    assert [what for what in expected if not verdict.counts[what]] == []
    assert processes_of(tmp_path) == []

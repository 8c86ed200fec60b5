"""`python -m bench --only chaos`: two minutes of failures, their counts, and how long jobs were stranded."""

import random
from collections.abc import Iterator
from typing import Final

from bench.chaos.judge import judge
from bench.chaos.player import play
from bench.figures import BenchError, Figure, Place, figure, progress
from testbed.postgres import NoPostgres, postgres

CHAOS_S: Final = 120.0


def measure(place: Place) -> Iterator[Figure]:
    """Play on PostgreSQL, with commits synced.

    Raises:
        BenchError: a job was lost, completed twice or by the wrong attempt.
    """
    seed = random.randrange(10**6)  # noqa: S311 - not a secret
    folder = place.folder / "chaos"
    folder.mkdir()
    with postgres(folder / "server") as server:
        if isinstance(server, NoPostgres):
            progress(f"chaos skipped: {server.reason}")
            return
        server.create("chaos")
        progress(f"chaos for {CHAOS_S:.0f} s, seed {seed}")
        verdict = judge(play(server.url("chaos"), folder, seconds=CHAOS_S, seed=seed, server=server))
    if verdict.broken:
        raise BenchError(f"with seed {seed}: " + "; ".join(verdict.broken))
    for what, count in sorted(verdict.counts.items()):
        yield Figure(part="chaos", what=what, unit="", median=count, worst=count, count=1)
    if verdict.stranded_s:
        yield figure("chaos", "a job without anyone who works on it", "s", verdict.stranded_s)

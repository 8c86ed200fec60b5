"""The measurement of `gpuwarden run` in a short mode."""

from pathlib import Path

from bench.figures import Place
from bench.run import measure

MEMORY_MAX_MIB = 25


def test_short_mode_measures_starts_and_a_supervisor_that_is_small(tmp_path: Path) -> None:
    found = {each.what: each for each in measure(Place(name="disk", folder=tmp_path), rounds=2, watch_s=0.5)}

    assert found["first output, more than bare"].count == 2
    for kind in ("", ", with --steps-from", ", of a pool"):
        assert 5 < found[f"supervisor: memory (RSS){kind}"].median < MEMORY_MAX_MIB
        assert found[f"supervisor: wake-ups{kind}"].median < 10

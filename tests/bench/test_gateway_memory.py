"""Memory of a host's gateway, and of workers behind it, with a few jobs."""

from pathlib import Path

import pytest

from bench.gateway.memory import measure_memory

HOST_MAX_MIB = 60e6 / 2**20


@pytest.mark.slow
def test_gateway_of_a_host_and_its_workers_are_small(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"

    found = {each.what: each for each in measure_memory(url, tmp_path / "memory", workers=2, jobs=20, rest_s=1.0)}

    direct = found["worker of a host with direct access: memory (RSS)"].median
    assert 20 < found["host's gateway with --central: memory (RSS)"].worst < HOST_MAX_MIB
    assert 10 < found["worker of a host with --central: memory (RSS)"].worst < direct
    assert 10 < found["worker of a host with a database: memory (RSS)"].worst < direct

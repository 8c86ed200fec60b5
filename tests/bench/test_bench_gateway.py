"""The measurement of the gateway with a few workers: real central gateways accept what the simulated hosts send."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench import gateway
from bench.figures import Place
from bench.gateway import Load, measure

SMALL = Load(hosts=3, workers=4, gateways=2, spread_s=0.5, rest_s=2.0, wakes=2, lost=2, rates=(2.0,), claims_s=2.0)


@pytest.mark.needs_postgres
@pytest.mark.slow
def test_small_fleet_is_measured_with_and_without_gateways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "SETTLE_S", 2.0)
    loads = (SMALL, replace(SMALL, hosts=1, gateways=0))

    found = {each.what: each for each in measure(Place(name="disk", folder=tmp_path), loads)}

    for what in ("12 workers", "4 workers, direct access"):
        assert found[f"{what} at rest: repeated requests"].count == 1
        assert found[f"{what} at rest: transactions"].median > 0
        assert found[f"{what} at rest: CPU of PostgreSQL"].count == 1
        assert 1 <= found[f"{what}: woken by one submission"].median <= 2
        assert found[f"{what}: from one submission to its claim"].count == 2
        assert found[f"{what}: until a worker knows that its job is lost"].count == 2
        assert found[f"{what}, 2 jobs a second: a claim"].count == 4
    assert found["12 workers at rest: connections to PostgreSQL"].worst < 40

"""The soak finds growth and stale containers."""

import os
from pathlib import Path

import pytest

from bench.exporter import churn, soak
from bench.exporter.soak import STALE_S, Sample, Turnover, grown
from bench.figures import Place
from exporter.sources import workers as state_files


def samples(*resident_mib: float) -> list[Sample]:
    return [Sample(resident_mib=each, descriptors=40, threads=7, page_kib=200) for each in resident_mib]


def test_each_step_replaces_the_oldest_container() -> None:
    assert list(churn.alive(0, at_a_time=3)) == [0, 1, 2]
    assert list(churn.alive(5, at_a_time=3)) == [5, 6, 7]


def test_names_of_containers_on_a_page() -> None:
    text = (
        b'gpuwarden_container_info{container="tenant-1",host="box"} 1.0\n'
        b'gpuwarden_worker_up{host="box",container="tenant-2"} 1.0\n'
        b'gpuwarden_worker_up{host="box",container=""} 0.0\n'
        b'other{my_container="tenant-3"} 1.0\n'
    )

    assert churn.named(text) == {"tenant-1", "tenant-2"}


def test_flat_compares_start_middle_and_end() -> None:
    lines = {each.what: each for each in grown(samples(*[70] * 5, *[100] * 10, *[102] * 75, *[104] * 10))}

    memory = [lines[f"resident memory, {when}"] for when in ("start", "middle", "end")]
    assert [each.median for each in memory] == [100, 102, 104], "the first five samples are skipped"
    assert [each.ratio for each in memory] == [None, 1.02, 1.04]
    assert lines["flat: greatest growth, limit 1.05"].median == 1.04


def test_growth_over_the_limit_is_not_flat() -> None:
    verdict = list(grown(samples(*[100] * 95, *[106] * 9)))[-1]

    assert (verdict.what, verdict.median) == ("NOT FLAT: greatest growth, limit 1.05", 1.06)


def turnover(**ended_s: float) -> Turnover:
    return Turnover(crowd=None, api=None, workers=None, ended_s=ended_s)  # type: ignore[arg-type]


def test_only_containers_that_ended_long_ago_are_stale() -> None:
    books = turnover(gone=100.0, just_gone=100.0 + STALE_S)

    assert books.stale(frozenset({"gone", "just_gone", "runs"}), 101.0 + STALE_S) == {"gone"}


@pytest.mark.skipif(os.geteuid() != 0, reason="cgroups need root")
@pytest.mark.needs_compiler
@pytest.mark.slow
def test_soak_leaves_no_worker_and_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "STEP_S", 0.05)
    monkeypatch.setattr(soak, "SAMPLES", 20)

    found = {each.what: each for each in soak.measure(Place(name="disk", folder=tmp_path), scrapes=200, containers=2)}

    assert found["200 scrapes: one over HTTP"].count == 200
    assert found["containers that came and went"].median > 5
    assert found["of them on the 20 sampled pages"].median > 0
    assert found["resident memory, end"].median > 20
    left = state_files.read(tmp_path / "exporter-soak/run").workers
    assert 0 < len(left) <= soak.AT_A_TIME, "only the last workers have files"
    assert [each.worker.worker for each in left if each.alive] == [], "no worker outlives the soak"

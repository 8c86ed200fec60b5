"""The host that a scenario plays: when it is looked at, and what its exporter says."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Final

import pytest

from bench.corpus import host, judge, life, scenario_file
from bench.corpus.scenario import Scenario
from exporter.collectors import COLLECTORS
from tests.bench.corpus.scenes import Always, Everything, named
from tools.mutation.rules import ALERTS


def unlike(one: Scenario, every: Always) -> Mapping[host.Key, list[tuple[object, object]]]:
    """What a scenario's series have, and what they have where it is looked each second: where that is not the same."""
    wanted = judge.metrics(ALERTS.glob("*.rules.yaml"))
    found, always = host.series(one, wanted=wanted), every(one, wanted)
    assert found.keys() == always.keys()
    pairs = {key: list(zip(found[key], always[key], strict=True)) for key in found}
    return {
        key: [(a, b) for a, b in each if not same(a, b)] for key, each in pairs.items() if not all(starmap(same, each))
    }


def same(one: float | str | None, other: float | str | None) -> bool:
    """Whether two samples are: sums of many parts may differ by what is lost of each."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return one == other


CLOSE: Final = """\
- name: changes as it wedges
  why: It spins for ever, and what it does beside that changes three times, seven seconds apart.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins, 4m9s: {does: spins, faults_per_s: 30}, 4m16s: spins,
        4m23s: {does: spins, faults_per_s: 30}}
  verdict: &wedged {condition: stall, remedy: restart_worker, of: w, since: 4m2s, due: 14m2s}
  scrape: 5s
  evaluate: 5s
- name: wedges beside one that changes
  why: What another does on another GPU is not its life.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins}
    v: {gpus: [1], 0s: loads, 2m: steps, 4m9s: evaluates, 4m16s: steps, 4m23s: evaluates, 4m30s: steps}
  verdict: *wedged
  scrape: 5s
  evaluate: 5s
- name: wedges
  why: The same wedge, and nothing changes.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins}
  verdict: *wedged
  scrape: 5s
  evaluate: 5s
- name: moves in part
  why: It computes and spins by turns, and does by turns what shows that it does so.
  workers:
    w: {0s: maps, 2m: evaluates, 4m1s: {does: spins, io_mib_per_s: 3}, 4m4s: {does: computes, faults_per_s: 45},
        4m15s: {does: spins, faults_per_s: 200}, 6m: {does: spins, cpu_cores: 0.004}, 9m3s: computes}
  verdict: none
- name: moves little, in a container whose health check asks
  why: Each figure is of a rate that just counts as still.
  workers:
    w: {asked_every_s: 30, 0s: loads, 2m7s: steps, 4m: {does: hangs, faults_per_s: 45, io_mib_per_s: 0.24},
        6m3s: {does: evaluates, gpu_ratio: 1, cpu_cores: 0.049}}
  verdict: none
"""
"""Scenarios whose changes are close, or at odd seconds, or that move hardly."""


def close(folder: Path) -> list[Scenario]:
    (folder / "a.yaml").write_text(CLOSE)
    return scenario_file.read(folder)


@pytest.mark.needs_parts
def test_a_wedge_is_told_as_soon_however_close_the_changes_around_it_are(tmp_path: Path) -> None:
    played = judge.play(close(tmp_path)[:3])

    assert [each.wrong() for each in played] == [[], [], []]
    assert [each.fired[0].at_s for each in played] == [845, 845, 845]


@pytest.mark.parametrize("begins", ["changes", "wedges beside", "moves in part", "moves little"])
def test_where_changes_are_close_it_is_looked_as_closely(begins: str, tmp_path: Path, every: Always) -> None:
    (one,) = [each for each in close(tmp_path) if each.name.startswith(begins)]

    assert unlike(one, every) == {}


@pytest.mark.parametrize(
    "begins",
    [
        "decodes for ten minutes, its",
        "is stopped by a signal and stays so",
        "leaks for ten minutes",
        "wedges in its evaluation while another worker",
        "hangs in its checkpoint while its container's health check",
        "deadlocks at 100 % with a health check every 10 s",
    ],
)
def test_looking_seldom_where_nothing_changes_tells_what_looking_once_a_second_does(begins: str, every: Always) -> None:
    assert unlike(named(begins), every) == {}


def test_where_nothing_changes_it_is_looked_seldom() -> None:
    one = host.Host("a", replace(named("wedges after a hundred steps"), plays_s=3600))

    looks = [second for second in range(1800, 3600) if one.needs_sample(second)]

    assert looks == list(range(1800, 3600, 5))


STEPPING: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 2m: steps%s}
  hosts: {a: {%s}}
  plays: 10m
  verdict: none
"""


def scraped(folder: Path, timeline: str, name: str, *, then: str = "") -> list[float | str | None]:
    """What each scrape has of the one series of that name, of a worker that steps from 2m on and does that then."""
    (folder / "a.yaml").write_text(STEPPING % (then, timeline))
    (found,) = host.series(*scenario_file.read(folder), wanted={name}).values()
    return found


def test_an_exporter_tells_of_its_sources_and_collectors_how_they_did(tmp_path: Path) -> None:
    unanswered = STEPPING.replace("  plays", "  gpus: {0: {5m: unanswered, 6m: works}}\n  plays")
    (tmp_path / "a.yaml").write_text(unanswered % ("", ""))
    (one,) = scenario_file.read(tmp_path)

    found = host.series(one, wanted={"gpuwarden_collector_success", "gpuwarden_sample_age_seconds"})
    told = {dict(labels).get("collector", name): values for (name, labels), values in found.items()}

    assert {"source_gpu", "source_workers", "source_docker", "sampler", *COLLECTORS} <= told.keys()
    assert [told["source_gpu"][minute * 4] for minute in (4, 5, 6)] == [1.0, 0.0, 1.0]
    assert {*told.pop("source_gpu"), *told.pop("gpuwarden_sample_age_seconds")} == {0.0, 1.0}
    assert {value for values in told.values() for value in values} == {1.0}


def test_a_collector_that_fails_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLLECTORS, "jobs", lambda _: 1 / 0)

    with pytest.raises(RuntimeError, match="collector jobs failed at 0s on host a"):
        scraped(tmp_path, "", "gpuwarden_job_steps")


ERRORS: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 2m: steps}
    v: {host: b, 0s: loads, 2m: steps}
  gpus:
    a/0: {3m: {xid: 79}, 4m: {xid: 79}, 5m: {ecc_uncorrected: 2}, 6m: {xid: 13, ecc_uncorrected: 1},
          7m: {throttled: hw_slowdown}, 8m: works}
  hosts: {a: {%s}}
  plays: 10m
  verdict: none
"""


def errors(folder: Path, timeline: str, name: str, **labels: str) -> Mapping[str, Sequence[float | str | None]]:
    """What each whole minute has of the series of that name and these labels, by host."""
    (folder / "a.yaml").write_text(ERRORS % timeline)
    found = host.series(*scenario_file.read(folder), wanted={name})
    return {
        dict(given)["host"]: values[::4]
        for (_, given), values in found.items()
        if labels.items() <= dict(given).items()
    }


def test_the_errors_of_a_gpu_are_counted_as_its_exporter_counts_them(tmp_path: Path) -> None:
    told = {
        "fallen off the bus": errors(tmp_path, "", "gpuwarden_gpu_xid_errors_total", xid="79"),
        "of a program": errors(tmp_path, "", "gpuwarden_gpu_xid_errors_total", xid="13"),
        "of its memory": errors(tmp_path, "", "gpuwarden_gpu_ecc_errors_total", error="uncorrected"),
        "by heat": errors(tmp_path, "", "gpuwarden_gpu_throttled", reason="hw_slowdown"),
    }

    assert told == {
        "fallen off the bus": {"a": [0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]},
        "of a program": {"a": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]},
        "of its memory": {"a": [0, 0, 0, 0, 0, 2, 3, 3, 3, 3, 3]},
        "by heat": {"a": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]},
    }, "and of the GPU of the other host nothing is known"


def test_an_exporter_that_is_started_anew_counts_xids_anew_and_the_driver_goes_on(tmp_path: Path) -> None:
    anew = "3m40s: unwatched, 3m50s: watched"

    assert errors(tmp_path, anew, "gpuwarden_gpu_xid_errors_total", xid="79")["a"][3:6] == [1, 1, 1]
    anew = "5m40s: unwatched, 5m50s: watched"
    assert errors(tmp_path, anew, "gpuwarden_gpu_ecc_errors_total", error="uncorrected")["a"][5:8] == [2, 3, 3]
    boots = "5m40s: unwatched, 5m50s: rebooted"
    assert errors(tmp_path, boots, "gpuwarden_gpu_ecc_errors_total", error="uncorrected")["a"][5:8] == [2, 1, 1]


UNREAPED: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 2m: steps, 3m: ends unreaped, 5m: loads}
  plays: 6m
  verdict: none
"""


def test_a_process_that_ends_unreaped_leaves_its_container_as_it_was_and_its_lock_free(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(UNREAPED)
    (one,) = scenario_file.read(tmp_path)
    names = {f"gpuwarden_{name}" for name in ("worker_alive", "worker_dead_seconds", "container_gpu_idle_seconds")}

    found = {name: values[::4] for (name, _), values in host.series(one, wanted=names).items()}

    assert found["gpuwarden_worker_alive"] == [1, 1, 1, 0, 0, 1, 1]
    assert found["gpuwarden_worker_dead_seconds"][3:6] == [0, 60, "stale"]
    assert math.isnan(float(found["gpuwarden_container_gpu_idle_seconds"][4] or 0)), "of no process nothing is known"
    assert [host.identities(one, second)["w"]["incarnation"] for second in (240, 300)] == ["w-0", "w-300"]


CUT: Final = """\
- name: a
  why: b
  workers:
    w: {gpus: [1:0], 0s: {does: steps, vram_mib: 3000}}
    v: {gpus: [1:1], 0s: {does: hangs, vram_mib: 2000}}
  gpus: {1: {3m: lost}}
  plays: 5m
  verdict: none
"""


def test_a_gpu_that_is_cut_is_told_of_as_its_driver_does(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CUT)
    (one,) = scenario_file.read(tmp_path)

    found = host.series(one, wanted=Everything())

    def told(name: str, label: str) -> set[tuple[str, object]]:
        return {(dict(labels)[label], values[4]) for (of, labels), values in found.items() if of == f"gpuwarden_{name}"}

    assert told("gpu_mig_info", "parent") == {("GPU-1", 1.0)}
    assert told("gpu_info", "index") == {("1", 1.0), ("1:0", 1.0), ("1:1", 1.0)}
    assert told("gpu_info", "attribution") == {("none", 1.0)}
    assert told("gpu_utilization_ratio", "gpu") == set()
    assert told("gpu_memory_used_bytes", "gpu") == {
        ("GPU-1", 5000.0 * life.MIB), ("MIG-1:0", 3000.0 * life.MIB), ("MIG-1:1", 2000.0 * life.MIB)
    }  # fmt: skip
    assert told("container_gpu_attribution_missing", "container") == {("w", 1.0), ("v", 1.0)}
    lost = {dict(labels)["gpu"]: values[-1] for (name, labels), values in found.items() if "gpu_lost_seconds" in name
            and "gpu" in dict(labels)}  # fmt: skip
    assert lost == {"GPU-1": 120.0, "MIG-1:0": 120.0, "MIG-1:1": 120.0}


def test_what_a_program_was_to_do_while_its_machine_slept_it_does_as_that_wakes(tmp_path: Path) -> None:
    then = ", 5m10s: {does: steps, step_every_s: 5}, 5m40s: {does: steps, step_every_s: 10}"

    steps = scraped(tmp_path, "5m: asleep, 6m: watched", "gpuwarden_job_steps", then=then)

    assert [steps[minute * 4] for minute in (6, 7)] == [90, 96], "one each ten seconds from when it woke"


@pytest.mark.parametrize(
    ("timeline", "busy_s"),
    [
        pytest.param("5m: frozen, 6m: watched", 0.95 * 420, id="one that was stopped goes on by what it knew"),
        pytest.param("5m: unwatched, 6m: watched", 0.95 * 240, id="one that was down begins anew"),
        pytest.param("5m: asleep, 6m: rebooted", 0.95 * 240, id="and so does that of a machine that boots anew"),
    ],
)
def test_an_exporter_knows_what_it_saw_in_its_own_life(timeline: str, busy_s: float, tmp_path: Path) -> None:
    busy = scraped(tmp_path, timeline, "gpuwarden_container_gpu_busy_seconds_total")

    assert busy[-1] == pytest.approx(busy_s, abs=1)


def test_what_vanishes_while_prometheus_is_down_is_not_marked() -> None:
    jobs = host.series(named("is on its next job, which wedges, when Prometheus"), wanted={"gpuwarden_job_id"})
    watched = host.series(named("waits for a job on a GPU that is lost"), wanted={"gpuwarden_job_id"})

    assert [found.count("stale") for found in jobs.values()] == [0, 0]
    assert "stale" in next(iter(watched.values())), "as while it is up"

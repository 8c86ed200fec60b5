"""The played host: when it is sampled, and what its exporter publishes."""

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


def differences(one: Scenario, every: Always) -> Mapping[host.Key, list[tuple[object, object]]]:
    """Samples of a scenario that differ from those with a sample each second."""
    wanted = judge.metrics(ALERTS.glob("*.rules.yaml"))
    found, always = host.series(one, wanted=wanted), every(one, wanted)
    assert found.keys() == always.keys()
    pairs = {key: list(zip(found[key], always[key], strict=True)) for key in found}
    return {
        key: [(a, b) for a, b in each if not is_same(a, b)]
        for key, each in pairs.items()
        if not all(starmap(is_same, each))
    }


def is_same(one: float | str | None, other: float | str | None) -> bool:
    """Compare two samples, with a tolerance for rounding."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9) or (math.isnan(one) and math.isnan(other))
    return one == other


CLOSE: Final = """\
- name: changes as it wedges
  why: It spins for ever, and its page faults change three times, every seven seconds.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins, 4m9s: {does: spins, faults_per_s: 30}, 4m16s: spins,
        4m23s: {does: spins, faults_per_s: 30}}
  verdict: &stalled {condition: stall, remedy: restart_worker, of: w, since: 4m2s, due: 14m2s}
  scrape: 5s
  evaluate: 5s
- name: wedges with a neighbour that changes
  why: The activity of a job on another GPU does not count.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins}
    v: {gpus: [1], 0s: loads, 2m: steps, 4m9s: evaluates, 4m16s: steps, 4m23s: evaluates, 4m30s: steps}
  verdict: *stalled
  scrape: 5s
  evaluate: 5s
- name: wedges
  why: The same fault, and nothing changes.
  workers:
    w: {0s: loads, 2m: steps, 4m2s: spins}
  verdict: *stalled
  scrape: 5s
  evaluate: 5s
- name: moves in part
  why: It computes and spins in turns, with other activities in turns.
  workers:
    w: {0s: maps, 2m: evaluates, 4m1s: {does: spins, io_mib_per_s: 3}, 4m4s: {does: computes, faults_per_s: 45},
        4m15s: {does: spins, faults_per_s: 200}, 6m: {does: spins, cpu_cores: 0.004}, 9m3s: computes}
  verdict: none
- name: moves little, in a container whose health check asks
  why: Each rate is just under its idle threshold.
  workers:
    w: {asked_every_s: 30, 0s: loads, 2m7s: steps, 4m: {does: hangs, faults_per_s: 45, io_mib_per_s: 0.24},
        6m3s: {does: evaluates, gpu_ratio: 1, cpu_cores: 0.049}}
  verdict: none
"""
"""Scenarios with close changes, changes at odd seconds, or little activity."""


def close_changes(folder: Path) -> list[Scenario]:
    (folder / "a.yaml").write_text(CLOSE)
    return scenario_file.read(folder)


@pytest.mark.needs_parts
def test_fault_close_to_other_changes_is_found_without_delay(tmp_path: Path) -> None:
    played = judge.play(close_changes(tmp_path)[:3])

    assert [each.wrong() for each in played] == [[], [], []]
    assert [each.fired[0].at_s for each in played] == [845, 845, 845]


@pytest.mark.parametrize("begins", ["changes", "wedges with", "moves in part", "moves little"])
def test_close_changes_are_sampled_each_second(begins: str, tmp_path: Path, every: Always) -> None:
    (one,) = [each for each in close_changes(tmp_path) if each.name.startswith(begins)]

    assert differences(one, every) == {}


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
def test_rare_samples_give_the_same_series_as_one_each_second(begins: str, every: Always) -> None:
    assert differences(named(begins), every) == {}


def test_steady_host_is_sampled_rarely() -> None:
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


def scrape_series(folder: Path, timeline: str, name: str, *, then: str = "") -> list[float | str | None]:
    """Samples of one series of a worker that steps from 2m on, and then follows `then`."""
    (folder / "a.yaml").write_text(STEPPING % (then, timeline))
    (found,) = host.series(*scenario_file.read(folder), wanted={name}).values()
    return found


def test_exporter_publishes_success_of_sources_and_collectors(tmp_path: Path) -> None:
    unanswered = STEPPING.replace("  plays", "  gpus: {0: {5m: unanswered, 6m: works}}\n  plays")
    (tmp_path / "a.yaml").write_text(unanswered % ("", ""))
    (one,) = scenario_file.read(tmp_path)

    found = host.series(one, wanted={"gpuwarden_collector_success", "gpuwarden_sample_age_seconds"})
    published = {dict(labels).get("collector", name): values for (name, labels), values in found.items()}

    assert {"source_gpu", "source_workers", "source_docker", "sampler", *COLLECTORS} <= published.keys()
    assert [published["source_gpu"][minute * 4] for minute in (4, 5, 6)] == [1.0, 0.0, 1.0]
    assert {*published.pop("source_gpu"), *published.pop("gpuwarden_sample_age_seconds")} == {0.0, 1.0}
    assert {value for values in published.values() for value in values} == {1.0}


def test_failed_collector_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COLLECTORS, "jobs", lambda _: 1 / 0)

    with pytest.raises(RuntimeError, match="collector jobs failed at 0s on host a"):
        scrape_series(tmp_path, "", "gpuwarden_job_steps")


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


def gpu_errors(folder: Path, timeline: str, name: str, **labels: str) -> Mapping[str, Sequence[float | str | None]]:
    """Samples of each minute of the series with this name and labels, by host."""
    (folder / "a.yaml").write_text(ERRORS % timeline)
    found = host.series(*scenario_file.read(folder), wanted={name})
    return {
        dict(given)["host"]: values[::4]
        for (_, given), values in found.items()
        if labels.items() <= dict(given).items()
    }


def test_gpu_errors_are_counted_like_by_the_exporter(tmp_path: Path) -> None:
    published = {
        "fallen off the bus": gpu_errors(tmp_path, "", "gpuwarden_gpu_xid_errors_total", xid="79"),
        "of a program": gpu_errors(tmp_path, "", "gpuwarden_gpu_xid_errors_total", xid="13"),
        "of its memory": gpu_errors(tmp_path, "", "gpuwarden_gpu_ecc_errors_total", error="uncorrected"),
        "by heat": gpu_errors(tmp_path, "", "gpuwarden_gpu_throttled", reason="hw_slowdown"),
    }

    assert published == {
        "fallen off the bus": {"a": [0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]},
        "of a program": {"a": [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]},
        "of its memory": {"a": [0, 0, 0, 0, 0, 2, 3, 3, 3, 3, 3]},
        "by heat": {"a": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]},
    }, "the GPU of host b has no errors"


def test_restarted_exporter_resets_xids_but_not_driver_counters(tmp_path: Path) -> None:
    restart = "3m40s: unwatched, 3m50s: watched"

    assert gpu_errors(tmp_path, restart, "gpuwarden_gpu_xid_errors_total", xid="79")["a"][3:6] == [1, 1, 1]
    restart = "5m40s: unwatched, 5m50s: watched"
    assert gpu_errors(tmp_path, restart, "gpuwarden_gpu_ecc_errors_total", error="uncorrected")["a"][5:8] == [2, 3, 3]
    boots = "5m40s: unwatched, 5m50s: rebooted"
    assert gpu_errors(tmp_path, boots, "gpuwarden_gpu_ecc_errors_total", error="uncorrected")["a"][5:8] == [2, 1, 1]


UNREAPED: Final = """\
- name: a
  why: b
  workers:
    w: {0s: loads, 2m: steps, 3m: ends unreaped, 5m: loads}
  plays: 6m
  verdict: none
"""


def test_unreaped_process_frees_its_lock_and_container_runs_on(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(UNREAPED)
    (one,) = scenario_file.read(tmp_path)
    names = {f"gpuwarden_{name}" for name in ("worker_alive", "worker_dead_seconds", "container_gpu_idle_seconds")}

    found = {name: values[::4] for (name, _), values in host.series(one, wanted=names).items()}

    assert found["gpuwarden_worker_alive"] == [1, 1, 1, 0, 0, 1, 1]
    assert found["gpuwarden_worker_dead_seconds"][3:6] == [0, 60, "stale"]
    assert found["gpuwarden_container_gpu_idle_seconds"][4] == 60, "a container without a live process is known"
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


def test_mig_gpu_is_published_like_by_its_driver(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(CUT)
    (one,) = scenario_file.read(tmp_path)

    found = host.series(one, wanted=Everything())

    def published(name: str, label: str) -> set[tuple[str, object]]:
        return {(dict(labels)[label], values[4]) for (of, labels), values in found.items() if of == f"gpuwarden_{name}"}

    assert published("gpu_mig_info", "parent") == {("GPU-1", 1.0)}
    assert published("gpu_info", "index") == {("1", 1.0), ("1:0", 1.0), ("1:1", 1.0)}
    assert published("gpu_info", "attribution") == {("none", 1.0)}
    assert published("gpu_utilization_ratio", "gpu") == set()
    assert published("gpu_memory_used_bytes", "gpu") == {
        ("GPU-1", 5000.0 * life.MIB), ("MIG-1:0", 3000.0 * life.MIB), ("MIG-1:1", 2000.0 * life.MIB)
    }  # fmt: skip
    assert published("container_gpu_attribution_missing", "container") == {("w", 1.0), ("v", 1.0)}
    lost = {dict(labels)["gpu"]: values[-1] for (name, labels), values in found.items() if "gpu_lost_seconds" in name
            and "gpu" in dict(labels)}  # fmt: skip
    assert lost == {"GPU-1": 120.0, "MIG-1:0": 120.0, "MIG-1:1": 120.0}


def test_activities_due_during_sleep_start_at_wake_up(tmp_path: Path) -> None:
    then = ", 5m10s: {does: steps, step_every_s: 5}, 5m40s: {does: steps, step_every_s: 10}"

    steps = scrape_series(tmp_path, "5m: asleep, 6m: watched", "gpuwarden_job_steps", then=then)

    assert [steps[minute * 4] for minute in (6, 7)] == [90, 96], "a step each 10 s from the wake-up on"


@pytest.mark.parametrize(
    ("timeline", "busy_s"),
    [
        pytest.param("5m: frozen, 6m: watched", 0.95 * 420, id="stopped exporter keeps its state"),
        pytest.param("5m: unwatched, 6m: watched", 0.95 * 240, id="restarted exporter loses its state"),
        pytest.param("5m: asleep, 6m: rebooted", 0.95 * 240, id="rebooted host loses its state"),
    ],
)
def test_exporter_state_ends_with_its_process(timeline: str, busy_s: float, tmp_path: Path) -> None:
    busy = scrape_series(tmp_path, timeline, "gpuwarden_container_gpu_busy_seconds_total")

    assert busy[-1] == pytest.approx(busy_s, abs=1)


def test_series_that_end_while_prometheus_is_down_are_not_stale() -> None:
    jobs = host.series(named("is on its next job, which wedges, when Prometheus"), wanted={"gpuwarden_job_id"})
    watched = host.series(named("waits for a job on a GPU that is lost"), wanted={"gpuwarden_job_id"})

    assert [found.count("stale") for found in jobs.values()] == [0, 0]
    assert "stale" in next(iter(watched.values()))

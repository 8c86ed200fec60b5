"""The settings that the stage of the end-to-end tests changes from their defaults, each with its reason.

A stage refuses to start with another setting changed. `tests/e2e/test_delivered.py` changes none. No stage changes a
rule: every `for` is the shipped one, and rules are evaluated every second, as by `gpuwarden up`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from pydantic_settings import BaseSettings

from deploy.standalone.config_files import Intervals
from deploy.standalone.stack import Plan
from exporter.settings import Settings
from gpuwarden.job import HEARTBEAT_S, LEASE_S
from remediator.settings.settings import ExecuteSettings
from testbed.workers import WorkerOptions

CHANGED: Final[Mapping[str, str]] = {
    # Prometheus
    "scrape_s": "a test waits for several scrapes; `tests/alerts` has the rules at intervals up to 60 s",
    # The exporter
    "ram_idle_mib": "a small host cannot allocate 5 GiB per job that loads",
    "dead_after_s": "a test waits until a worker is dead, or until others act on it first",
    "health_window_s": "a test waits for the whole window",
    "health_grace_s": "a test waits until the grace of a load ends",
    "load_timeout_s": "a test waits until a load is too long",
    "eval_timeout_s": "a test waits until an evaluation is too long",
    "stuck_min_s": "a test waits until a step is too long, or prevents it on a busy machine",
    "stuck_factor": "on a busy machine any step may be long",
    "probe_interval_s": "a test waits for several probes",
    "probe_timeout_s": "a probe must end before the next one begins",
    "demand_gate_after_s": "a test waits until a tenant on demand is scaled",
    "demand_gate_idle_s": "a test waits until a tenant on demand is not in use",
    "demand_gate_min_s": "a test waits until a tenant on demand may be scaled again",
    "vram_return_s": "a test waits until the exporter knows the memory of ended processes",
    "pods": "a test has pods of a cluster",
    "node_name": "a test has a cluster with one node",
    "demand_gate_namespaces": "a test has a namespace of its own",
    # The executor
    "stop_grace_s": "a hung worker ignores SIGTERM, so every test would wait for the whole grace",
    "cooldown_s": "tests let one worker hang many times",
    "vram_cooldown_s": "a test waits until the cool-down ends",
    "breaker_targets": "tests let all workers hang at once",
    "breaker_restarts": "tests restart more than six times an hour",
    "capture_s": "a slow machine needs longer; without captures in a test of two versions",
    "capture_range_s": "a test waits until the history after the alert is complete",
    "settle_timeout_s": "a test waits until an exit is not confirmed, or a start fails",
    "restart_timeout_s": "a test waits until an exit is not confirmed, or a start fails",
    "sweep_interval_s": "a test waits for several sweeps",
    "gpu_lost_s": "a test waits until a GPU counts as lost",
    "host_lost_after_s": "a test waits until a host counts as lost",
    # The worker and its job
    "heartbeat_s": "a test waits for several heartbeats",
    "lease_s": "a test waits until a lease ends, or sets clocks back",
    "stall_timeout_s": "a test waits for the silence of every job that hangs",
}
"""Reasons by setting. A job's owner sets the last one."""

_PREFIXES: Final[Mapping[str, type[BaseSettings]]] = {
    "GPUWARDEN_EXPORTER_": Settings,
    "GPUWARDEN_REMEDIATOR_": ExecuteSettings,
}


def changed(plan: Plan, options: WorkerOptions, environ: Mapping[str, str]) -> set[str]:
    """Return the settings of a stage that differ from their defaults."""
    intervals, delivered = plan.intervals, Intervals()
    found = {each.name for each in fields(Intervals) if getattr(intervals, each.name) != getattr(delivered, each.name)}
    limits = ("ram_idle_mib", "dead_after_s", "host_lost_after_s")
    found |= {name for name in limits if getattr(plan, name) != getattr(Plan, name)}
    executor = ExecuteSettings.model_fields
    found |= {name for name, value in plan.execute.items() if value != executor[name].default}
    own = {"heartbeat_s": (options.heartbeat_s, HEARTBEAT_S), "lease_s": (options.lease_s, LEASE_S)}
    found |= {name for name, (value, default) in own.items() if value != default}
    for prefix, settings in _PREFIXES.items():
        names = {each.removeprefix(prefix).lower() for each in environ if each.startswith(prefix)}
        found |= names & set(settings.model_fields)
    return found


def refuse_unlisted(plan: Plan, options: WorkerOptions, environ: Mapping[str, str]) -> None:
    """Raise ValueError if a stage changes a setting without a reason in `CHANGED`."""
    if unlisted := changed(plan, options, environ) - CHANGED.keys():
        raise ValueError(f"add the reason to testbed/changed_settings.py: the stage changes {sorted(unlisted)}")

"""Servers: containers with a probe, how long they have not answered, and their limits."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import gauge, or_nan
from exporter.model.container import Probe
from exporter.model.snapshot import Snapshot

_NAME = ("container",)


_NO_PROBE: Final = "the container has no probe, or an invalid one"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Yield series by container name; only the info series has the incarnation."""
    found = snapshot.servers or ()
    probed = [(each, each.probe) for each in found if isinstance(each.probe, Probe)]
    yield gauge(
        "gpuwarden_server_info",
        "A server and its probe: `http`, or `docker` for its health check; always 1.",
        ("container", "incarnation", "probe", "image"),
        (
            ((each.container.name, each.container.incarnation, probe.kind, each.container.image or ""), 1.0)
            for each, probe in probed
        ),
        source="the container's labels, by its engine's API",
        absent=_NO_PROBE,
    )
    yield gauge(
        "gpuwarden_server_answered",
        "1 once the server has answered in this incarnation of its container.",
        _NAME,
        (((each.container.name,), or_nan(each.answered)) for each, _ in probed),
        source="HTTP answers, or the log of the Docker health check",
        absent=f"{_NO_PROBE}; NaN if unknown",
    )
    yield gauge(
        "gpuwarden_server_probe_failing_seconds",
        "Time for which probes of the server have failed; 0 while it answers.",
        _NAME,
        (((each.container.name,), or_nan(each.probe_failing_s)) for each, _ in probed),
        source="HTTP answers, or the log of the Docker health check",
        absent=f"{_NO_PROBE}; NaN without a recent probe, or while it is paused",
    )
    yield gauge(
        "gpuwarden_server_restart_after_seconds",
        "Time for which probes may fail before the server is restarted, set by its owner.",
        _NAME,
        (((each.container.name,), probe.restart_after_s) for each, probe in probed),
        source="the container's labels, by its engine's API",
        absent="as `gpuwarden_server_info`",
    )
    yield gauge(
        "gpuwarden_server_page_fault_idle_seconds",
        "Time without over 400 page faults/s in the server's container: the faults of a load or a compilation.",
        _NAME,
        (((each.container.name,), or_nan(snapshot.server_fault_idle_s(each))) for each, _ in probed),
        source="`/proc/PID/stat` of its processes; after `--busy-timeout-s` without an answer, the time without one",
        absent=f"{_NO_PROBE}; NaN while its processes are unknown",
    )
    yield gauge(
        "gpuwarden_server_invalid",
        "1 for a container whose probe is invalid, by reason.",
        ("container", "reason"),
        (((each.container.name, each.probe.reason), 1.0) for each in found if not isinstance(each.probe, Probe)),
        source="the container's labels, network and health check, by its engine's API",
        absent="the probe is valid, or there is none",
    )

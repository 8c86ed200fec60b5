"""Servers: containers that opted in to be asked, for how long they have not answered, and what they are allowed."""

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

from exporter.collectors.family import gauge, or_nan
from exporter.model.container import Probe
from exporter.model.snapshot import Snapshot

_NAME = ("container",)


_NOT_ASKED: Final = "the container asks for no probe, or for one that cannot be"


def families(snapshot: Snapshot) -> Iterable[Metric]:
    """Series keyed by container name; its incarnation on the info series alone."""
    found = snapshot.servers or ()
    asked = [(each, each.probe) for each in found if isinstance(each.probe, Probe)]
    yield gauge(
        "gpuwarden_server_info",
        "A container that is asked as a server, and how: http or docker, its own health check; always 1.",
        ("container", "incarnation", "probe", "image"),
        (
            ((each.container.name, each.container.incarnation, probe.kind, each.container.image or ""), 1.0)
            for each, probe in asked
        ),
        source="the container's labels, by its engine's API",
        absent=_NOT_ASKED,
    )
    yield gauge(
        "gpuwarden_server_answered",
        "1 once the server has answered in this incarnation of its container, as far as its exporter knows.",
        _NAME,
        (((each.container.name,), or_nan(each.answered)) for each, _ in asked),
        source="its answers over HTTP, or the log of Docker's health check",
        absent=f"{_NOT_ASKED}; NaN while that is unknown",
    )
    yield gauge(
        "gpuwarden_server_probe_failing_seconds",
        "For how long the server has been asked again and again without an answer; 0 while it answers.",
        _NAME,
        (((each.container.name,), or_nan(each.unanswered_s)) for each, _ in asked),
        source="its answers over HTTP, or the log of Docker's health check",
        absent=f"{_NOT_ASKED}; NaN while it was not asked lately, or is paused",
    )
    yield gauge(
        "gpuwarden_server_restart_after_seconds",
        "For how long the server may leave askings unanswered, as its owner says.",
        _NAME,
        (((each.container.name,), probe.restart_after_s) for each, probe in asked),
        source="the container's labels, by its engine's API",
        absent="as `gpuwarden_server_info`",
    )
    yield gauge(
        "gpuwarden_server_invalid",
        "1 for a container that opted in as a server and cannot be asked, by the reason.",
        ("container", "reason"),
        (((each.container.name, each.probe.reason), 1.0) for each in found if not isinstance(each.probe, Probe)),
        source="the container's labels, network and health check, by its engine's API",
        absent="what the container asks for can be done, or it asks for nothing",
    )

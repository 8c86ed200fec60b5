"""Alerts, their targets, and which are accepted. Pure.

Label values are data, never part of a command, path or query.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from gpuwarden.job import Condition
from gpuwarden.state_file import TEXT_MAX as NAME_MAX
from gpuwarden.state_file import is_text
from remediator.plan import Subject
from remediator.reasons import Reason

WATCHDOG: Final = "GpuwardenWatchdog"
"""The alert that always fires, to show that alerts arrive."""


DRILL: Final = "drill"
"""The remedy of the alert of `gpuwarden drill`. It shows that alerts of a host arrive, and nothing is done."""


class Admits(Protocol):
    """What a remedy accepts: the conditions it can confirm, and its kind of target."""

    @property
    def conditions(self) -> Collection[Condition]:
        """The conditions."""

    @property
    def subject(self) -> Subject:
        """The kind of target."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert. The fingerprint identifies the series, not the episode."""

    fingerprint: str
    firing: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: str


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A refused alert, with reason and message."""

    reason: Reason
    message: str = field(compare=False)
    fingerprint: str
    labels: Mapping[str, str]


def is_watchdog(alert: Alert) -> bool:
    """Whether this is the watchdog alert, which has no remedy and is not refused."""
    return alert.labels.get("alertname") == WATCHDOG and "remedy" not in alert.labels


def is_drill(labels: Mapping[str, str]) -> bool:
    """Whether these are the labels of a drill's alert."""
    return labels.get("remedy") == DRILL


def drill_number(labels: Mapping[str, str]) -> int | None:
    """The number of the drill of an alert; `None` if it is not an alert of a drill."""
    number = labels.get("drill", "")
    return int(number) if is_drill(labels) and number.isascii() and number.isdecimal() and len(number) < 19 else None


def subject(labels: Mapping[str, str]) -> tuple[Subject, str]:
    """The target of an admitted alert: kind and name.

    A silent server and its VRAM use have separate episodes. Failing items belong to their run.
    """
    if labels.get("condition") == Condition.ITEMS:
        return Subject.RUN, labels.get("run", "")
    if labels.get("condition") == Condition.GPU_FAULTY:
        return Subject.GPU, labels.get("gpu", "")
    if labels.get("condition") in (Condition.DEMAND_UP, Condition.DEMAND_DOWN):
        return Subject.ON_DEMAND, labels.get("tenant", "")
    if worker := labels.get("worker"):
        return Subject.WORKER, worker
    if container := labels.get("container"):
        return Subject.TENANT if labels.get("condition") == Condition.VRAM else Subject.SERVER, container
    return Subject.HOST, labels.get("host", "")


def admit(
    alert: Alert, *, hosts: Collection[str], remedies: Mapping[str, Admits], shared: bool = False
) -> Refusal | None:
    """Check whether an alert is accepted; `None` means yes.

    Args:
        alert: the alert.
        hosts: hosts with an executor in this ledger.
        remedies: the known remedies. An alert whose condition a remedy cannot confirm would block the episode.
        shared: other hosts use the ledger. An alert about a whole host is then accepted without an executor there.
    """
    labels = alert.labels
    found = labels.get("host", "")
    remedy = labels.get("remedy", "")
    if not found:
        reason, message = Reason.NO_HOST, "no label `host`: set it as a target label in the scrape configuration"
    elif found not in hosts and not (shared and _is_about_hosts(remedy, remedies)):
        known = ", ".join(sorted(hosts)[:10])
        reason, message = Reason.OTHER_HOST, f"host {_short(found)} has no executor in this ledger; known: {known}"
    elif remedy == DRILL:
        return None
    elif remedy not in remedies:
        known = ", ".join(sorted(remedies))
        reason, message = Reason.UNKNOWN_REMEDY, f"unknown remedy {_short(remedy) or '(none)'}; known: {known}"
    elif labels.get("condition") not in remedies[remedy].conditions:
        known = ", ".join(sorted(remedies[remedy].conditions))
        reason, message = (
            Reason.UNKNOWN_CONDITION,
            f"unknown condition {_short(labels.get('condition')) or '(none)'}; {remedy} confirms: {known}",
        )
    elif (check := _CHECKS.get(remedies[remedy].subject)) is not None:
        return check(alert, remedy)
    elif not is_text(labels.get("worker", "")):
        message = f"remedy {remedy} needs the label `worker`, 1 to {NAME_MAX} printable characters"
        reason = Reason.NO_WORKER
    else:
        return None
    return Refusal(reason=reason, message=message, fingerprint=alert.fingerprint, labels=labels)


def _is_about_hosts(remedy: str, remedies: Mapping[str, Admits]) -> bool:
    return remedy in remedies and remedies[remedy].subject is Subject.HOST


def _admit_container(alert: Alert, remedy: str) -> Refusal | None:

    labels = alert.labels
    if labels.get("worker"):
        reason, message = (
            Reason.NO_SERVER,
            f"remedy {remedy} is for containers without workers; the alert names a worker",
        )
    elif not is_text(labels.get("container", "")) or not is_text(labels.get("incarnation", "")):
        reason = Reason.NO_CONTAINER
        message = (
            f"remedy {remedy} needs the labels `container` and `incarnation`, 1 to {NAME_MAX} printable characters"
        )
    else:
        return None
    return Refusal(reason=reason, message=message, fingerprint=alert.fingerprint, labels=labels)


def _admit_run(alert: Alert, remedy: str) -> Refusal | None:

    labels = alert.labels
    if is_text(labels.get("run", "")) and is_text(labels.get("worker", "")):
        return None
    message = f"remedy {remedy} needs the labels `run` and `worker`, 1 to {NAME_MAX} printable characters"
    return Refusal(reason=Reason.NO_RUN, message=message, fingerprint=alert.fingerprint, labels=labels)


def _admit_gpu(alert: Alert, remedy: str) -> Refusal | None:

    labels = alert.labels
    if is_text(labels.get("gpu", "")):
        return None
    message = f"remedy {remedy} needs the label `gpu`, 1 to {NAME_MAX} printable characters"
    return Refusal(reason=Reason.NO_GPU, message=message, fingerprint=alert.fingerprint, labels=labels)


def _admit_host(alert: Alert, remedy: str) -> Refusal | None:

    labels = alert.labels
    if not labels.get("worker") and not labels.get("container"):
        return None
    message = f"remedy {remedy} is for whole hosts; the alert names a worker or container"
    return Refusal(reason=Reason.NO_HOST_ALONE, message=message, fingerprint=alert.fingerprint, labels=labels)


def _admit_on_demand(alert: Alert, remedy: str) -> Refusal | None:
    labels = alert.labels
    if is_text(labels.get("tenant", "")):
        return None
    message = f"remedy {remedy} needs the label `tenant`, 1 to {NAME_MAX} printable characters"
    return Refusal(reason=Reason.NO_TENANT, message=message, fingerprint=alert.fingerprint, labels=labels)


_CHECKS: Final[Mapping[Subject, Callable[[Alert, str], Refusal | None]]] = {
    Subject.HOST: _admit_host,
    Subject.RUN: _admit_run,
    Subject.GPU: _admit_gpu,
    Subject.ON_DEMAND: _admit_on_demand,
    Subject.SERVER: _admit_container,
    Subject.TENANT: _admit_container,
}


def _short(value: object) -> str:
    return repr(value)[:80] if value else ""

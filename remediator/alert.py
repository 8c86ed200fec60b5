"""Parses Alertmanager's webhook payload (version 4) into `Alert` values. Pure.

Unknown fields are ignored. A group mixes firing and resolved alerts, so each alert's status counts. Label values are
data, never part of a command, path or query. An invalid alert affects only itself.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import Condition
from gpuwarden.state_file import TEXT_MAX as NAME_MAX
from gpuwarden.state_file import is_text
from remediator.plan import Subject
from remediator.reasons import Reason

ALERTS_MAX: Final = 1000
"""Default maximum of alerts in a payload. Larger payloads are refused."""

WATCHDOG: Final = "GpuwardenWatchdog"
"""The alert that always fires, to show that alerts arrive."""

LABELS_MAX: Final = 64
"""Maximum labels or annotations of an alert."""

TEXT_MAX: Final = 1024
"""Maximum length of a label or annotation."""


TRUNCATED_MAX: Final = 1_000_000
"""Maximum accepted value of `truncatedAlerts`."""


class PayloadError(GpuwardenError):
    """The body is not an Alertmanager payload."""


class TooManyAlertsError(PayloadError):
    """The payload has too many alerts."""


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


# PostgreSQL refuses NUL, which JSON can contain. Lone surrogates are refused by pydantic.
_Text = Annotated[str, Field(max_length=TEXT_MAX, pattern=r"^[^\x00]*$")]
_TEXT: Final = TypeAdapter(_Text)
_Word = Annotated[_Text, Field(max_length=64)]
_Texts = Annotated[dict[_Text, _Text], Field(max_length=LABELS_MAX)]


class _SentAlert(BaseModel):
    """One alert of a payload, since Alertmanager 0.19."""

    status: Literal["firing", "resolved"]
    labels: _Texts
    annotations: _Texts | None = None
    fingerprint: Annotated[_Word, Field(min_length=1)]
    starts_at: _Word = Field(alias="startsAt")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A refused alert, with reason and message."""

    reason: Reason
    message: str = field(compare=False)
    fingerprint: str
    labels: Mapping[str, str]


def parse(payload: Any, *, alerts_max: int = ALERTS_MAX) -> tuple[list[Alert], list[Refusal]]:
    """Split a decoded body into valid alerts and refusals.

    Raises:
        TooManyAlertsError: it has more than `alerts_max` alerts.
        PayloadError: it is not a payload.
    """
    if not isinstance(payload, dict) or not isinstance(payload.get("alerts"), list):
        raise PayloadError("not an Alertmanager payload: expected a JSON object with a list `alerts`")
    if len(payload["alerts"]) > alerts_max:
        raise TooManyAlertsError(
            f"{len(payload['alerts'])} alerts in one payload, maximum {alerts_max}: set max_alerts in Alertmanager, or "
            "group by more labels"
        )
    alerts: list[Alert] = []
    refusals: list[Refusal] = []
    for position, found in enumerate(payload["alerts"]):
        try:
            sent = _SentAlert.model_validate(found)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(ascii(str(each))[1:-1][:80] for each in first["loc"])
            message = f"alert {position}: {where or 'it'}: {first['msg']}"
            refusals.append(Refusal(reason=Reason.MALFORMED, message=message, fingerprint="", labels={}))
        else:
            alerts.append(
                Alert(
                    fingerprint=sent.fingerprint,
                    firing=sent.status == "firing",
                    labels=sent.labels,
                    annotations=sent.annotations or {},
                    starts_at=sent.starts_at,
                )
            )
    return alerts, refusals


def truncated(payload: Mapping[str, Any]) -> int:
    """How many alerts Alertmanager left out of a payload; 0 if not stated."""
    found = payload.get("truncatedAlerts")
    return min(found, TRUNCATED_MAX) if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def receiver(payload: Mapping[str, Any]) -> str:
    """The receiver of a payload as a regex, since Alertmanager escapes names; "" if none."""
    found = payload.get("receiver")
    with suppress(ValidationError):
        return _TEXT.validate_python(found)
    return ""


def listed(answer: Any, *, alerts_max: int = ALERTS_MAX) -> Iterator[dict[str, Any]]:
    """Convert an answer of `GET /api/v2/alerts` into payloads of at most `alerts_max` alerts.

    Raises:
        PayloadError: it is not a list of alerts.
    """
    if not isinstance(answer, list):
        raise PayloadError("not a list of alerts: expected a JSON list")
    firing = [{**each, "status": "firing"} if isinstance(each, dict) else each for each in answer]
    return ({"alerts": firing[at : at + alerts_max]} for at in range(0, len(firing), alerts_max))


def is_watchdog(alert: Alert) -> bool:
    """Whether this is the watchdog alert, which has no remedy and is not refused."""
    return alert.labels.get("alertname") == WATCHDOG and "remedy" not in alert.labels


def subject(labels: Mapping[str, str]) -> tuple[Subject, str]:
    """The target of an admitted alert: kind and name.

    A silent server and its VRAM use have separate episodes. Failing items belong to their run.
    """
    if labels.get("condition") == Condition.ITEMS:
        return Subject.RUN, labels.get("run", "")
    if worker := labels.get("worker"):
        return Subject.WORKER, worker
    if container := labels.get("container"):
        return Subject.TENANT if labels.get("condition") == Condition.VRAM else Subject.SERVER, container
    return Subject.HOST, labels.get("host", "")


def admit(alert: Alert, *, hosts: Collection[str], remedies: Mapping[str, Admits]) -> Refusal | None:
    """Check whether an alert is accepted; `None` means yes.

    Args:
        alert: the alert.
        hosts: hosts with an executor in this ledger.
        remedies: the known remedies. An alert whose condition a remedy cannot confirm would block the episode.
    """
    labels = alert.labels
    found = labels.get("host", "")
    remedy = labels.get("remedy", "")
    if not found:
        reason, message = Reason.NO_HOST, "no label `host`: set it as a target label in the scrape configuration"
    elif found not in hosts:
        known = ", ".join(sorted(hosts)[:10])
        reason, message = Reason.OTHER_HOST, f"host {_short(found)} has no executor in this ledger; known: {known}"
    elif remedy not in remedies:
        known = ", ".join(sorted(remedies))
        reason, message = Reason.UNKNOWN_REMEDY, f"unknown remedy {_short(remedy) or '(none)'}; known: {known}"
    elif labels.get("condition") not in remedies[remedy].conditions:
        known = ", ".join(sorted(remedies[remedy].conditions))
        reason, message = (
            Reason.UNKNOWN_CONDITION,
            f"unknown condition {_short(labels.get('condition')) or '(none)'}; {remedy} confirms: {known}",
        )
    elif remedies[remedy].subject is Subject.HOST:
        return _admit_host(alert, remedy)
    elif remedies[remedy].subject is Subject.RUN:
        return _admit_run(alert, remedy)
    elif remedies[remedy].subject is not Subject.WORKER:
        return _admit_container(alert, remedy)
    elif not is_text(labels.get("worker", "")):
        message = f"remedy {remedy} needs the label `worker`, 1 to {NAME_MAX} printable characters"
        reason = Reason.NO_WORKER
    else:
        return None
    return Refusal(reason=reason, message=message, fingerprint=alert.fingerprint, labels=labels)


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


def _admit_host(alert: Alert, remedy: str) -> Refusal | None:

    labels = alert.labels
    if not labels.get("worker") and not labels.get("container"):
        return None
    message = f"remedy {remedy} is for whole hosts; the alert names a worker or container"
    return Refusal(reason=Reason.NO_HOST_ALONE, message=message, fingerprint=alert.fingerprint, labels=labels)


def _short(value: object) -> str:
    return repr(value)[:80] if value else ""

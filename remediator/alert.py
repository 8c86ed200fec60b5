"""Alertmanager's webhook payload, read into `Alert` values. Pure.

Source: Alertmanager's webhook_config, payload version 4. Fields come and go by version, so unknown ones are ignored. A
group mixes firing and resolved alerts, so each alert's own status counts. Label values arrive raw, of any length: they
are data, never part of a command, a path or a query. One bad alert of a payload costs itself only.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import Trip
from gpuwarden.state_file import TEXT_MAX as NAME_MAX
from gpuwarden.state_file import is_text
from remediator.plan import Subject
from remediator.reasons import Reason

ALERTS_MAX: Final = 1000
"""Alerts accepted in one payload, unless set otherwise; one with more is refused whole."""

WATCHDOG: Final = "GpuwardenWatchdog"
"""The alert that always fires: a sign of life of the chain, and about nothing."""

LABELS_MAX: Final = 64
"""Labels or annotations accepted on one alert."""

TEXT_MAX: Final = 1024
"""Characters accepted in one label or annotation."""


TRUNCATED_MAX: Final = 1_000_000
"""The most alerts that one payload may count as left out."""


class PayloadError(GpuwardenError):
    """The body is no Alertmanager payload."""


class TooManyAlertsError(PayloadError):
    """The payload has more alerts than are accepted in one."""


class Admits(Protocol):
    """What a remedy takes alerts for: the trips that it can confirm on the host, and what its episodes are about."""

    @property
    def trips(self) -> Collection[Trip]:
        """The trips."""

    @property
    def subject(self) -> Subject:
        """A worker, a server, a tenant, a host or a run."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert as Alertmanager sent it. The fingerprint names the series, not the episode."""

    fingerprint: str
    firing: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: str


# JSON can spell a NUL and half a surrogate pair, which PostgreSQL refuses; pydantic itself refuses the latter.
_Text = Annotated[str, Field(max_length=TEXT_MAX, pattern=r"^[^\x00]*$")]
_TEXT: Final = TypeAdapter(_Text)
_Word = Annotated[_Text, Field(max_length=64)]
_Texts = Annotated[dict[_Text, _Text], Field(max_length=LABELS_MAX)]


class _SentAlert(BaseModel):
    """One alert of a payload, as Alertmanager sends it since 0.19, where alerts got their fingerprint."""

    status: Literal["firing", "resolved"]
    labels: _Texts
    annotations: _Texts | None = None
    fingerprint: Annotated[_Word, Field(min_length=1)]
    starts_at: _Word = Field(alias="startsAt")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One alert that will not be acted on, with the reason: a fixed word for a metric, a sentence for people."""

    reason: Reason
    message: str = field(compare=False)
    fingerprint: str
    labels: Mapping[str, str]


def parse(payload: Any, *, alerts_max: int = ALERTS_MAX) -> tuple[list[Alert], list[Refusal]]:
    """Split a decoded body into the alerts that can be read and those that cannot.

    Raises:
        TooManyAlertsError: it has more than `alerts_max` alerts, readable or not.
        PayloadError: it is no payload at all.
    """
    if not isinstance(payload, dict) or not isinstance(payload.get("alerts"), list):
        raise PayloadError("an Alertmanager payload was wanted: a JSON object with a list `alerts`")
    if len(payload["alerts"]) > alerts_max:
        raise TooManyAlertsError(
            f"{len(payload['alerts'])} alerts in one payload, and {alerts_max} are accepted: set max_alerts in "
            "Alertmanager, or group by more labels"
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
    """How many alerts Alertmanager says that it left out of a payload; 0 where it says nothing that can be counted."""
    found = payload.get("truncatedAlerts")
    return min(found, TRUNCATED_MAX) if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


def receiver(payload: Mapping[str, Any]) -> str:
    """The receiver for which Alertmanager sent a payload, as a pattern, for it escapes names there; "" for none."""
    found = payload.get("receiver")
    with suppress(ValidationError):
        return _TEXT.validate_python(found)
    return ""


def listed(answer: Any, *, alerts_max: int = ALERTS_MAX) -> Iterator[dict[str, Any]]:
    """What `GET /api/v2/alerts` answers about alerts that fire, as payloads of no more than `alerts_max` alerts each.

    Raises:
        PayloadError: it is no such answer.
    """
    if not isinstance(answer, list):
        raise PayloadError("Alertmanager's list of alerts was wanted, a JSON list")
    firing = [{**each, "status": "firing"} if isinstance(each, dict) else each for each in answer]
    return ({"alerts": firing[at : at + alerts_max]} for at in range(0, len(firing), alerts_max))


def is_beat(alert: Alert) -> bool:
    """Whether it is the watchdog's: it names nobody, is for no remedy, and is not to be refused for that."""
    return alert.labels.get("alertname") == WATCHDOG and "remedy" not in alert.labels


def subject(labels: Mapping[str, str]) -> tuple[Subject, str]:
    """What an admitted alert is about, and its name: the worker it names, else the container, else the host.

    Of one container a silence and a use of memory are two matters, each with an episode of its own. Items that fail are
    a matter of their run, whichever of the host's workers failed them.
    """
    if labels.get("trip") == Trip.ITEMS:
        return Subject.RUN, labels.get("run", "")
    if worker := labels.get("worker"):
        return Subject.WORKER, worker
    if container := labels.get("container"):
        return Subject.TENANT if labels.get("trip") == Trip.VRAM else Subject.SERVER, container
    return Subject.HOST, labels.get("host", "")


def admit(alert: Alert, *, hosts: Collection[str], remedies: Mapping[str, Admits]) -> Refusal | None:
    """Whether the alert is taken up at all; `None` means that it is.

    `hosts` are those whose executors work this ledger: an alert for any other would never be looked at. `remedies` are
    the ones there are: an alert with a trip that its remedy cannot confirm on the host would only keep its subject's
    episode busy.
    """
    labels = alert.labels
    found = labels.get("host", "")
    remedy = labels.get("remedy", "")
    if not found:
        reason, message = Reason.NO_HOST, "it names no host: `host` must be a target label of the scrape configuration"
    elif found not in hosts:
        known = ", ".join(sorted(hosts)[:10])
        reason, message = Reason.OTHER_HOST, f"it is for host {_short(found)}; this ledger is worked by {known} alone"
    elif remedy not in remedies:
        known = ", ".join(sorted(remedies))
        reason, message = Reason.UNKNOWN_REMEDY, f"its remedy is {_short(remedy) or 'not named'}; known are: {known}"
    elif labels.get("trip") not in remedies[remedy].trips:
        known = ", ".join(sorted(remedies[remedy].trips))
        reason, message = (
            Reason.UNKNOWN_TRIP,
            f"its trip is {_short(labels.get('trip')) or 'not named'}; {remedy} confirms: {known}",
        )
    elif remedies[remedy].subject is Subject.HOST:
        return _admit_host(alert, remedy)
    elif remedies[remedy].subject is Subject.RUN:
        return _admit_run(alert, remedy)
    elif remedies[remedy].subject is not Subject.WORKER:
        return _admit_container(alert, remedy)
    elif not is_text(labels.get("worker", "")):
        message = f"remedy {remedy} needs the label `worker`, 1 to {NAME_MAX} printable characters as workers have them"
        reason = Reason.NO_WORKER
    else:
        return None
    return Refusal(reason=reason, message=message, fingerprint=alert.fingerprint, labels=labels)


def _admit_container(alert: Alert, remedy: str) -> Refusal | None:
    """A container is told from a worker by the label that is missing, and from its next life by its incarnation."""
    labels = alert.labels
    if labels.get("worker"):
        reason, message = Reason.NO_SERVER, f"remedy {remedy} is for a container without workers, and it names one"
    elif not is_text(labels.get("container", "")) or not is_text(labels.get("incarnation", "")):
        reason = Reason.NO_CONTAINER
        message = (
            f"remedy {remedy} needs the labels `container` and `incarnation`, 1 to {NAME_MAX} printable characters"
        )
    else:
        return None
    return Refusal(reason=reason, message=message, fingerprint=alert.fingerprint, labels=labels)


def _admit_run(alert: Alert, remedy: str) -> Refusal | None:
    """The run is what is judged; the worker that it names is on the host whose remediator judges it."""
    labels = alert.labels
    if is_text(labels.get("run", "")) and is_text(labels.get("worker", "")):
        return None
    message = f"remedy {remedy} needs the labels `run` and `worker`, 1 to {NAME_MAX} printable characters"
    return Refusal(reason=Reason.NO_RUN, message=message, fingerprint=alert.fingerprint, labels=labels)


def _admit_host(alert: Alert, remedy: str) -> Refusal | None:
    """A host is told from what lives on it by the labels that are missing."""
    labels = alert.labels
    if not labels.get("worker") and not labels.get("container"):
        return None
    message = f"remedy {remedy} is for a whole host, and the alert names a worker or a container on it"
    return Refusal(reason=Reason.NO_HOST_ALONE, message=message, fingerprint=alert.fingerprint, labels=labels)


def _short(value: object) -> str:
    return repr(value)[:80] if value else ""

"""Parses Alertmanager's webhook payload (version 4) into `Alert` values. Pure.

Unknown fields are ignored. A group mixes firing and resolved alerts, so each alert's status counts. An invalid alert
affects only itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from gpuwarden.errors import GpuwardenError
from remediator.alert import Alert, Refusal
from remediator.reasons import Reason

ALERTS_MAX: Final = 1000
"""Default maximum of alerts in a payload. Larger payloads are refused."""

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

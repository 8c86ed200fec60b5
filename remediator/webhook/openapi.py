"""What `/openapi.json` says about the webhook: its body and its responses.

An invalid alert affects only itself, so the list accepts anything. A body is refused if it is not an object with a list
`alerts`.
"""

from typing import Any, Final

from remediator.payload import LABELS_MAX, TEXT_MAX

_TEXTS: Final = {
    "type": "object",
    "maxProperties": LABELS_MAX,
    "additionalProperties": {"type": "string", "maxLength": TEXT_MAX},
}
_ALERT: Final = {
    "type": "object",
    "required": ["status", "labels", "startsAt", "fingerprint"],
    "properties": {
        "status": {"enum": ["firing", "resolved"]},
        "labels": _TEXTS | {"description": "`host` and `remedy` are required; see docs/reference/formats.md"},
        "annotations": _TEXTS,
        "startsAt": {"type": "string", "maxLength": 64},
        "fingerprint": {"type": "string", "minLength": 1, "maxLength": 64},
    },
}
_ANY_OTHER: Final = {"description": "anything else is refused, recorded and counted in `refused`"}
_DETAIL: Final = {
    "type": "object",
    "required": ["detail"],
    "properties": {"detail": {"type": "string", "description": "the problem and what to send instead"}},
}
_COUNT: Final = {"type": "integer", "minimum": 0}
_COUNTS: Final = {
    "type": "object",
    "required": ["accepted", "refused"],
    "properties": {"accepted": _COUNT, "refused": _COUNT},
    "additionalProperties": False,
}

SECURITY_SCHEMES: Final = {
    "token": {"type": "http", "scheme": "bearer"},
    "password": {"type": "http", "scheme": "basic"},
}

NOT_READY: Final[dict[int | str, dict[str, Any]]] = {
    503: {"description": "not ready, with the reason", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def webhook(*, alerts_max: int) -> dict[str, Any]:
    """The operation's body and security."""
    alerts = {"type": "array", "maxItems": alerts_max, "items": {"anyOf": [_ALERT, _ANY_OTHER]}}
    truncated = {"description": "number of alerts that Alertmanager left out; anything else counts as 0"}
    body = {
        "type": "object",
        "required": ["alerts"],
        "properties": {"alerts": alerts, "receiver": {}, "truncatedAlerts": truncated},
        "description": "Alertmanager's webhook payload, version 4; unknown fields are ignored",
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "security": [{name: []} for name in SECURITY_SCHEMES],
    }


def responses(*, alerts_max: int, body_max_bytes: int, body_timeout_s: float) -> dict[int | str, dict[str, Any]]:
    """Each response of the webhook."""
    return {
        202: {
            "description": "all alerts are stored, including refused ones; watchdog alerts are not counted",
            "content": {"application/json": {"schema": _COUNTS}},
        },
        400: _refusal("not an Alertmanager payload"),
        401: _refusal("no Authorization header, or a wrong token or password")
        | {"headers": {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}},
        408: _refusal(f"body incomplete after {body_timeout_s:g} s"),
        413: _refusal(f"over {body_max_bytes} bytes, or over {alerts_max} alerts"),
        503: _refusal("the ledger cannot be written, or too many passwords are being checked: retry"),
    }


def _refusal(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _DETAIL}}}

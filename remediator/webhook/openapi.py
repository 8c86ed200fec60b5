"""What `/openapi.json` says of the webhook: its body as it is read, and each answer that there is.

Pure data. An alert that is not as described here costs itself only, so the list takes anything; a body is refused whole
where it is no object with a list `alerts`.
"""

from typing import Any, Final

from remediator.alert import LABELS_MAX, TEXT_MAX

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
        "labels": _TEXTS | {"description": "`host` and `remedy` say whose it is and what for; docs/running.md has all"},
        "annotations": _TEXTS,
        "startsAt": {"type": "string", "maxLength": 64},
        "fingerprint": {"type": "string", "minLength": 1, "maxLength": 64},
    },
}
_ANY_OTHER: Final = {"description": "anything else is refused by itself, on record, and counted in `refused`"}
_DETAIL: Final = {
    "type": "object",
    "required": ["detail"],
    "properties": {"detail": {"type": "string", "description": "what was found, and what is wanted"}},
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
    503: {"description": "not ready, and why", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


def webhook(*, alerts_max: int) -> dict[str, Any]:
    """The operation's own part: its body, and who is let in."""
    alerts = {"type": "array", "maxItems": alerts_max, "items": {"anyOf": [_ALERT, _ANY_OTHER]}}
    truncated = {
        "description": "how many alerts Alertmanager left out, a whole number; anything else is taken for none"
    }
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


def answers(*, alerts_max: int, body_max_bytes: int, body_timeout_s: float) -> dict[int | str, dict[str, Any]]:
    """Each status that the webhook answers with, and when."""
    return {
        202: {
            "description": "all of it is durable, what is refused among it; the watchdog's alerts count as neither",
            "content": {"application/json": {"schema": _COUNTS}},
        },
        400: _refusal("no Alertmanager payload"),
        401: _refusal("neither a bearer token nor a password that is known")
        | {"headers": {"WWW-Authenticate": {"required": True, "schema": {"type": "string"}}}},
        408: _refusal(f"the body did not come whole within {body_timeout_s:g} s"),
        413: _refusal(f"over {body_max_bytes} bytes, or over {alerts_max} alerts"),
        503: _refusal("the ledger cannot be written, or too many passwords are being checked: send it again"),
    }


def _refusal(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": _DETAIL}}}

"""Alertmanager's routing, and the webhooks of the remediator, from the configuration that its API returns. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from remediator.alert import WATCHDOG

PATH: Final = "/api/v1/alerts"
"""Path of the webhook."""

RELAY_PATH: Final = "/api/v1/notifications"
"""Path at which the remediator takes alerts for operators."""

WATCHDOG_LABELS: Final[Mapping[str, str]] = {"alertname": WATCHDOG, "severity": "none"}

HIDDEN: Final = "<secret>"
"""What Alertmanager returns for a URL that may hold a password."""

_MATCHER: Final = re.compile(r'\s*([a-zA-Z_:][\w:]*)\s*(=~|!~|!=|=)\s*(?:"((?:[^"\\]|\\.)*)"|(.*?))\s*')


def receivers_of(config: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """The receivers of an alert with these labels, in order and without duplicates."""
    return list(dict.fromkeys(_walk(config.get("route") or {}, labels, "")))


def remediators(config: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The receivers of the watchdog alert with their webhooks of remediators.

    Where Alertmanager shows no such URL, every hidden one of these receivers may be a remediator's.
    """
    hooks = {name: list(_webhooks(config, name)) for name in receivers_of(config, WATCHDOG_LABELS)}
    shown = {name: [each for each in its if _url(each).endswith(PATH)] for name, its in hooks.items()}
    hidden = {name: [each for each in its if _url(each) == HIDDEN] for name, its in hooks.items()}
    return {name: its for name, its in (shown if any(shown.values()) else hidden).items() if its}


def webhooks_of(config: Mapping[str, Any], remediator: str) -> list[Mapping[str, Any]]:
    """The webhooks that may be those of the remediator at a URL: the one with its URL, else all of remediators."""
    found = [each for its in remediators(config).values() for each in its]
    return [each for each in found if _url(each) == f"{remediator}{PATH}"] or found


def credentials_file(webhook: Mapping[str, Any]) -> str | None:
    """The file with the token that Alertmanager sends."""
    file: str | None = ((webhook.get("http_config") or {}).get("authorization") or {}).get("credentials_file")
    return file


def integrations(config: Mapping[str, Any], receiver: str) -> list[str]:
    """The kinds of a receiver's addresses, as `email` and `slack`, without the webhooks of remediators."""
    ours = [each for its in remediators(config).values() for each in its]
    files = {credentials_file(each) for each in ours} - {None}
    found = {name: list(its) for name, its in _receiver(config, receiver).items() if name.endswith("_configs") and its}
    found["webhook_configs"] = [
        each
        for each in _webhooks(config, receiver)
        if each not in ours and credentials_file(each) not in files and not _url(each).endswith((PATH, RELAY_PATH))
    ]
    return [name.removesuffix("_configs") for name, its in found.items() if its]


def _webhooks(config: Mapping[str, Any], receiver: str) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = _receiver(config, receiver).get("webhook_configs") or ()
    return found


def _url(webhook: Mapping[str, Any]) -> str:
    return str(webhook.get("url", HIDDEN)).rstrip("/")


def _receiver(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Sequence[Mapping[str, Any]] = config.get("receivers") or ()
    return next((each for each in found if each.get("name") == name), {})


def _walk(route: Mapping[str, Any], labels: Mapping[str, str], inherited: str) -> Iterator[str]:
    receiver = str(route.get("receiver") or inherited)
    below = False
    for each in route.get("routes") or ():
        if _matches(each, labels):
            yield from _walk(each, labels, receiver)
            below = True
            if not each.get("continue"):
                return
    if not below:
        yield receiver


def _matches(route: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    plain: Mapping[str, Any] = route.get("match") or {}
    patterns: Mapping[str, Any] = route.get("match_re") or {}
    return (
        all(labels.get(name, "") == str(value) for name, value in plain.items())
        and all(_fits(str(value), labels.get(name, "")) for name, value in patterns.items())
        and all(_holds(str(each), labels) for each in route.get("matchers") or ())
    )


def _holds(matcher: str, labels: Mapping[str, str]) -> bool:
    """Whether one matcher holds. One that cannot be parsed does not."""
    found = _MATCHER.fullmatch(matcher)
    if found is None:
        return False
    name, operator, quoted, bare = found.groups()
    value = bare if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    given = labels.get(name, "")
    equal = _fits(value, given) if operator.endswith("~") else given == value
    return equal is not operator.startswith("!")


def _fits(pattern: str, given: str) -> bool:
    try:
        return re.fullmatch(pattern, given) is not None
    except re.error:  # Go's syntax differs in rare cases
        return False

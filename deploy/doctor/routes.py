"""Alertmanager's routing, from the configuration that its API returns. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

HIDDEN: Final = "<secret>"
"""What Alertmanager returns for a URL that may hold a password."""

_MATCHER: Final = re.compile(r'\s*([a-zA-Z_:][\w:]*)\s*(=~|!~|!=|=)\s*(?:"((?:[^"\\]|\\.)*)"|(.*?))\s*')


def receivers_of(config: Mapping[str, Any], labels: Mapping[str, str]) -> list[str]:
    """The receivers of an alert with these labels, in order and without duplicates."""
    return list(dict.fromkeys(_walk(config.get("route") or {}, labels, "")))


def webhook_urls(config: Mapping[str, Any], receiver: str) -> list[str]:
    """The URLs of a receiver's webhooks; `HIDDEN` for one that is not shown."""
    hooks: Sequence[Mapping[str, Any]] = _receiver(config, receiver).get("webhook_configs") or ()
    return [str(each.get("url", HIDDEN)) for each in hooks]


def webhooks(config: Mapping[str, Any], path: str) -> Iterator[Mapping[str, Any]]:
    """All webhooks with this path in the URL, or with a hidden URL."""
    for receiver in config.get("receivers") or ():
        for each in receiver.get("webhook_configs") or ():
            url = str(each.get("url", HIDDEN))
            if url == HIDDEN or url.rstrip("/").endswith(path):
                yield each


def integrations(config: Mapping[str, Any], receiver: str) -> list[str]:
    """The kinds of a receiver's addresses, as `email` and `slack`."""
    return [name.removesuffix("_configs") for name, configs in _receiver(config, receiver).items()
            if name.endswith("_configs") and configs]  # fmt: skip


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

"""Hostile labels, aimed at a shell, SQL, a path, a template or a parser."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.remediator import builders as build

DEEP: Final = 500
MEGABYTE: Final = "A" * 2**20


def texts(canary: Path) -> dict[str, str]:
    """Hostile label values by name. A value that is executed creates `canary` or drops a table."""
    return {
        "a shell command": f"$(touch {canary}) `touch {canary}` ; touch {canary} | touch {canary}",
        "SQL": "w1'; DROP TABLE alerts; DROP TABLE episodes; --",
        "a path": f"../../../../../../../../{canary}",
        "the parent": "..",
        "a file URL": f"file://{canary}",
        "an option": "--help",
        "a template": "{{ ''.__class__.__mro__ }} ${jndi:ldap://127.0.0.1:9/a} {% raw %}",
        "a format": "%s%s%n {0.__class__.__init__.__globals__} {}",
        "a query": "w1&host=elsewhere#?container=x",
        "a header": "w1\r\nX-Evil: 1\r\n\r\nGET /-/quit HTTP/1.1",
        "lines": 'w1\n{"level": "info", "event": "executor ready"}\n',
        "a NUL": "w1\0",
        "half a surrogate pair": "w1\ud800",
        "terminal escapes": "\x1b[2J\x1b]0;owned\x07\x9b31m",
        "right to left": "\u202egnp.exe\u2066",
        "many bytes": "🙈" * 128,
        "a megabyte": MEGABYTE,
        "nothing": "",
    }


PLACES: Final = (
    "worker",
    "container",
    "incarnation",
    "job_id",
    "attempt",
    "alertname",
    "condition",
    "remedy",
    "host",
    "x",
)


def alerts(host: str, canary: Path) -> Iterator[list[Any]]:
    """Yield the alerts of each webhook call: each text in each label, each value of a wrong type in each field."""
    for name, text in texts(canary).items():
        about_worker = [build.sent(name[:64], **{"host": host, place: text}) for place in PLACES]
        about_server = {"host": host, "remedy": "restart_container", "condition": "server", "container": text}
        about_container = build.sent(name[:64], **about_server, incarnation=text)
        del about_container["labels"]["worker"]
        with_annotations = {**build.sent(text, worker=f"unseen {name}", host=host), "annotations": {text: text}}
        at_once = 1 if text is MEGABYTE else 20  # a body may have 4 MiB
        group = [*about_worker, about_container, with_annotations]
        yield from (group[at : at + at_once] for at in range(0, len(group), at_once))
    deep: Any = "bottom"
    for _ in range(DEEP):
        deep = [deep]
    values: list[Any] = [None, 7, True, [], {}, 10**300, -1.5, deep, {"labels": {"labels": {}}}]
    for value in values:
        fields = ("status", "labels", "annotations", "startsAt", "endsAt", "fingerprint", "generatorURL")
        whole = build.sent(worker="unseen", host=host)
        named = [{**whole, "labels": {**whole["labels"], place: value}} for place in PLACES]
        yield [value, *({**whole, field: value} for field in fields), *named]


def bodies(host: str) -> dict[str, bytes]:
    """Bodies that `json.dumps` cannot write. Each has one alert."""
    alert = json.dumps(build.sent(worker="unseen twice", host=host))
    return {
        "a key twice": b'{"alerts": "none", "alerts": [' + alert.encode() + b"]}",
        "a label twice": (
            '{"alerts": [' + alert.replace('"labels": {', '"labels": {"host": "elsewhere", "worker": "w1", ') + "]}"
        ).encode(),
        "huge counts": b'{"truncatedAlerts": 1' + b"0" * 400 + b', "alerts": [' + alert.encode() + b"]}",
        "a count that is not a number": b'{"truncatedAlerts": Infinity, "receiver": [], "alerts": ['
        + alert.encode()
        + b"]}",
    }

"""What client and gateway agree on: HTTP with JSON, one POST per operation to `/v1/<operation>`.

An answer is `{"result": ...}`, or `{"error": {"kind": ..., "reason": ...}}`. A result has `"refused": "job"` beside it
if the slot does not hold that attempt. Both sides ignore unknown fields.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpuwarden.errors import GpuwardenError
from gpuwarden.job import JobClass, State
from gpuwarden.queue.models import Completion, DrainedError, Item, Job, Quarantine, ReplacedError, ResultError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION: Final = 1

PREFIX: Final = f"/v{VERSION}/"

SOCKET_NAME: Final = "queue.sock"
"""Name of the socket in a worker's folder."""

REQUEST_ID: Final = "Request-Id"
"""Header. A repeated request has the same one, and gets the first one's answer."""

HOST: Final = "Gpuwarden-Host"
"""Header of a host's gateway with its name, which must be the token's."""

BODY_MAX_BYTES: Final = 128 * 1024
"""Largest request: a result of the longest size, and its frame."""

WAIT_MAX_S: Final = 30.0
"""Longest wait of one request for a job, seconds."""

ERRORS: Final[Mapping[str, type[GpuwardenError]]] = {
    each.__name__: each for each in (DrainedError, ReplacedError, ResultError)
}
"""Errors of the queue that a worker handles."""

T = TypeVar("T", bound="DataclassInstance")


def to_wire(value: Any) -> Any:
    """A queue's value as JSON."""
    if isinstance(value, Job | Item | Quarantine):
        return {each.name: getattr(value, each.name) for each in fields(value)}  # no deep copy of a payload
    if isinstance(value, Completion):
        return value._asdict() | {"job": to_wire(value.job)}
    if isinstance(value, list):
        return [to_wire(each) for each in value]
    return value


def job_of(found: Mapping[str, Any]) -> Job:
    """A job that was received."""
    return _of(Job, found, job_class=JobClass(found["job_class"]), state=State(found["state"]), inputs={})


def item_of(found: Mapping[str, Any]) -> Item:
    """An item that was received."""
    return _of(Item, found)


def quarantine_of(found: Mapping[str, Any]) -> Quarantine:
    """A quarantine that was received."""
    return _of(Quarantine, found)


def _of(kind: type[T], found: Mapping[str, Any], **others: Any) -> T:
    return kind(**{each.name: found[each.name] for each in fields(kind) if each.name in found} | others)


def reachable(folder: int) -> str:
    """Address of the socket in an open folder. A full path may be longer than a socket's address."""
    return str(Path(f"/proc/self/fd/{folder}") / SOCKET_NAME)

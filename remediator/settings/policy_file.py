"""The policy file: what is particular to one remedy on this host. TOML, a table for each remedy, all of it optional.

    [restart_worker]
    unconfirmed = "hold"       # of a fenced job whose process was not seen dead within --settle-bound-s: "requeue"
                               # (the default, which the ledger records), or "hold" until it is, or a person decides
    retries_max = 1            # instead of --retries-max
    warn_signal = "SIGUSR1"    # sent to a worker that catches it before anything is taken from it; or SIGUSR2
    warn_grace_s = 60          # how long it has then for a checkpoint, seconds; 30 where it is not said
    cooldown_s = 900           # instead of --cooldown-s, seconds

    [restart_container]        # a server has no job: of the above it takes
    cooldown_s = 60

    [recycle_container]        # nor has a tenant that holds too much of a GPU's memory
    cooldown_s = 600

What is not said is as the options have it. The file is looked at with every round, once a second at most, and read
where it has changed; one that cannot be used then leaves everything as it was, and is complained of in the log. It is
to be replaced whole, by rename: what is half written may be valid, and mean something else.
"""

import threading
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuwarden.errors import GpuwardenError
from gpuwarden.files import ReloadingFile
from remediator.plan import Unconfirmed

log: Final = structlog.get_logger("executor")

FILE_MAX_BYTES: Final = 64 * 1024
"""The largest policy file, bytes."""

LOOK_S: Final = 1.0
"""The file is looked at no more often, seconds."""

SAY_S: Final = 60.0
"""That it cannot be used is said no more often, seconds."""


class RemedyPolicy(BaseModel):
    """What may be said of any remedy; `None` is as the options have it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cooldown_s: float | None = Field(default=None, ge=0, le=86400)


class JobRemedyPolicy(RemedyPolicy):
    """What may be said of a remedy that settles jobs too."""

    unconfirmed: Unconfirmed = Field(default=Unconfirmed.REQUEUE, strict=False)
    retries_max: int | None = Field(default=None, ge=0)
    warn_signal: Literal["SIGUSR1", "SIGUSR2"] | None = None
    warn_grace_s: float = Field(default=30.0, gt=0, le=300)  # half a lease: what is wedged may not renew its own


class Policies(BaseModel):
    """The file's tables, by remedy."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    restart_worker: JobRemedyPolicy = JobRemedyPolicy()
    restart_container: RemedyPolicy = RemedyPolicy()
    recycle_container: RemedyPolicy = RemedyPolicy()

    def of(self, remedy: str) -> RemedyPolicy:
        """What is said of one remedy."""
        found: RemedyPolicy = getattr(self, remedy)
        return found


_Stamp = tuple[int, ...]


class PolicyFile:
    """A policy file that people change while the executor runs. Safe to ask from several threads.

    Args:
        path: the file.

    Raises:
        GpuwardenError: it cannot be used, and why.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._next_look_s = self._next_word_s = 0.0
        self._policies = ReloadingFile([path], self._read)

    def now(self) -> Policies:
        """What it says now."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + LOOK_S
                self._look_again(now_s)
            return self._policies.value

    def _look_again(self, now_s: float) -> None:
        try:
            if not self._policies.reload():
                return
        except GpuwardenError as error:
            if now_s >= self._next_word_s:
                self._next_word_s = now_s + SAY_S
                log.error("policy kept as it was", because=str(error))  # noqa: TRY400 - no defect of ours
        else:
            self._next_word_s = 0.0
            log.warning("policy read anew", file=str(self._path), policy=self._policies.value.model_dump_json())

    def _read(self) -> Policies:
        try:
            with self._path.open("rb") as file:
                found = file.read(FILE_MAX_BYTES + 1)
            if len(found) > FILE_MAX_BYTES:
                raise GpuwardenError(f"the policy file {self._path} is larger than {FILE_MAX_BYTES} bytes")
            return Policies.model_validate(tomllib.loads(found.decode()))
        except ValidationError as error:
            raise GpuwardenError(f"the policy file {self._path} {_complaint(error)}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise GpuwardenError(f"the policy file {self._path} cannot be read: {error}") from None


def _complaint(error: ValidationError) -> str:
    """What is wrong first, and what may stand there instead."""
    first = error.errors(include_url=False)[0]
    where = [str(each) for each in first["loc"]]
    if first["type"] != "extra_forbidden":
        return f"has {ascii(first['input'])[:80]} for {'.'.join(where)}: {first['msg']}"
    *table, name = where
    known: Sequence[str] = list(_fields(Policies, table))
    what = f"in [{table[0]}]" if table else "as a table"
    return f"has {ascii(name)[:80]} {what}, which is not known; known are {', '.join(known)}"


def _fields(model: Any, table: Sequence[str]) -> Sequence[str]:
    for name in table:
        model = model.model_fields[name].annotation
    return list(model.model_fields)

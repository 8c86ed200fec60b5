"""The policy file: settings of single remedies on this host. TOML, all optional.

    [restart_worker]
    unconfirmed = "hold"       # exit unconfirmed after --settle-timeout-s: "requeue" the job (default),
                               # or "hold" it until the exit is confirmed or an operator decides.
    retries_max = 1            # Replaces --retries-max.
    warn_signal = "SIGUSR1"    # or SIGUSR2: sent before the fence to a worker that catches it.
    warn_grace_s = 60          # time for a checkpoint after the signal, seconds; default 30
    cooldown_s = 900           # replaces --cooldown-s, seconds

    [restart_container]        # cooldown_s only
    cooldown_s = 60

    [recycle_container]        # cooldown_s only
    cooldown_s = 600

The executor checks the file once a second and reloads it if it changed. If the file is invalid, it logs an error and
keeps the old policy. Replace the file by rename: a half-written file may be valid.
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
"""Maximum size of the file."""

CHECK_INTERVAL_S: Final = 1.0
"""Minimum time between checks of the file, seconds."""

LOG_INTERVAL_S: Final = 60.0
"""Minimum time between log lines about an invalid file, seconds."""


class RemedyPolicy(BaseModel):
    """Settings of any remedy; `None` keeps the option."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cooldown_s: float | None = Field(default=None, ge=0, le=86400)


class JobRemedyPolicy(RemedyPolicy):
    """Settings of a remedy that also settles jobs."""

    unconfirmed: Unconfirmed = Field(default=Unconfirmed.REQUEUE, strict=False)
    retries_max: int | None = Field(default=None, ge=0)
    warn_signal: Literal["SIGUSR1", "SIGUSR2"] | None = None
    warn_grace_s: float = Field(default=30.0, gt=0, le=300)  # half a lease: a hung worker does not renew it


class Policies(BaseModel):
    """The file's tables, by remedy."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    restart_worker: JobRemedyPolicy = JobRemedyPolicy()
    restart_container: RemedyPolicy = RemedyPolicy()
    recycle_container: RemedyPolicy = RemedyPolicy()

    def of(self, remedy: str) -> RemedyPolicy:
        """The settings of one remedy."""
        found: RemedyPolicy = getattr(self, remedy)
        return found


_Stamp = tuple[int, ...]


class PolicyFile:
    """A policy file that may change at run time. Safe to share between threads.

    Raises:
        GpuwardenError: it is invalid; the message says why.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._next_check_s = self._next_log_s = 0.0
        self._policies = ReloadingFile([path], self._read)

    def now(self) -> Policies:
        """The current settings."""
        with self._lock:
            now_s = time.monotonic()
            if now_s >= self._next_check_s:
                self._next_check_s = now_s + CHECK_INTERVAL_S
                self._reload(now_s)
            return self._policies.value

    def _reload(self, now_s: float) -> None:
        try:
            if not self._policies.reload():
                return
        except GpuwardenError as error:
            if now_s >= self._next_log_s:
                self._next_log_s = now_s + LOG_INTERVAL_S
                log.error("policy reload failed, old policy in use", reason=str(error))  # noqa: TRY400 - the operator's error
        else:
            self._next_log_s = 0.0
            log.warning("policy reloaded", file=str(self._path), policy=self._policies.value.model_dump_json())

    def _read(self) -> Policies:
        try:
            with self._path.open("rb") as file:
                found = file.read(FILE_MAX_BYTES + 1)
            if len(found) > FILE_MAX_BYTES:
                raise GpuwardenError(f"policy file {self._path} is larger than {FILE_MAX_BYTES} bytes")
            return Policies.model_validate(tomllib.loads(found.decode()))
        except ValidationError as error:
            raise GpuwardenError(f"invalid policy file {self._path}: {_describe_error(error)}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise GpuwardenError(f"policy file {self._path} cannot be read: {error}") from None


def _describe_error(error: ValidationError) -> str:
    """The first error, and the allowed names."""
    first = error.errors(include_url=False)[0]
    where = [str(each) for each in first["loc"]]
    if first["type"] != "extra_forbidden":
        return f"{'.'.join(where)} = {ascii(first['input'])[:80]}: {first['msg']}"
    *table, name = where
    known: Sequence[str] = list(_fields(Policies, table))
    what = f"name in [{table[0]}]" if table else "table"
    return f"unknown {what}: {ascii(name)[:80]}; known: {', '.join(known)}"


def _fields(model: Any, table: Sequence[str]) -> Sequence[str]:
    for name in table:
        model = model.model_fields[name].annotation
    return list(model.model_fields)

"""Settings of one worker."""

from dataclasses import dataclass
from pathlib import Path

from gpuwarden.job import HEARTBEAT_S, LEASE_S
from gpuwarden.worker.job_logs import JOBS_MAX


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one worker; times are seconds."""

    name: str
    queue: str
    host: str
    gpus: tuple[str, ...] = ()
    lease_s: float = LEASE_S
    heartbeat_s: float = HEARTBEAT_S
    jobs_max: int | None = None
    logs: Path | None = None
    logs_max: int = JOBS_MAX
    """Jobs whose logs are kept."""

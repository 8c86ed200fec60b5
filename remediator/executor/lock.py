"""The lock that allows one executor per host."""

from typing import Final

import structlog

from gpuwarden.db.locks import LockHeldElsewhereError, ProcessLock
from gpuwarden.errors import GpuwardenError
from remediator.ledger.ledger import Ledger

log: Final = structlog.get_logger("executor")


class AlreadyExecutingError(GpuwardenError):
    """Another executor holds the lock."""


class ExecutorLock:
    """The executor lock of a host. If the database connection breaks, it is acquired again.

    Raises:
        AlreadyExecutingError: another process holds the lock; the message names it.
        DatabaseError: the ledger is unreachable.
    """

    def __init__(self, ledger: Ledger, *, host: str) -> None:
        self._ledger = ledger
        self._host = host
        self._takeover_logged = False
        self.lost = False
        """Whether the last check failed. Read by the threads that act."""
        try:
            self._lock: ProcessLock | None = ledger.lock_executor(host)
        except LockHeldElsewhereError as error:
            raise AlreadyExecutingError(f"another executor holds this ledger's lock ({error}): stop it first") from None

    def held(self) -> bool:
        """Check the lock, and acquire it again if it was lost. Returns whether this process may act.

        Raises:
            DatabaseError: the ledger is unreachable; then this process may not act.
        """
        if self._lock is not None and self._lock.held():
            return True
        self.lost = True
        self.close()
        try:
            self._lock = self._ledger.lock_executor(self._host)
        except LockHeldElsewhereError as error:
            if not self._takeover_logged:
                log.warning("executor lock held by another process, standing by", reason=str(error))
            self._takeover_logged = True
            return False
        self._takeover_logged = self.lost = False
        log.warning("executor lock reacquired after a lost database connection")
        return True

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

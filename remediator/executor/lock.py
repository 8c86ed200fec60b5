"""The lock that makes an executor the only one of its host."""

from typing import Final

import structlog

from gpuwarden.db.locks import LockHeldElsewhereError, ProcessLock
from gpuwarden.errors import GpuwardenError
from remediator.ledger.ledger import Ledger

log: Final = structlog.get_logger("executor")


class AlreadyExecutingError(GpuwardenError):
    """Another executor holds this ledger's lock."""


class ExecutorLock:
    """That this is the host's one executor. One that a broken connection lost is asked for again.

    Raises:
        AlreadyExecutingError: another one is; the message says which process.
        DatabaseError: the ledger does not answer.
    """

    def __init__(self, ledger: Ledger, *, host: str) -> None:
        self._ledger = ledger
        self._host = host
        self._told = False
        self.lost = False
        """Whether it was lost when it was last asked for. Read by the threads that act."""
        try:
            self._lock: ProcessLock | None = ledger.lock_executor(host)
        except LockHeldElsewhereError as error:
            raise AlreadyExecutingError(
                f"another executor works this ledger ({error}): one acts, the other must not"
            ) from None

    def held(self) -> bool:
        """Whether we may act now.

        Raises:
            DatabaseError: the ledger does not answer; then we may not.
        """
        if self._lock is not None and self._lock.held():
            return True
        self.lost = True
        self.close()
        try:
            self._lock = self._ledger.lock_executor(self._host)
        except LockHeldElsewhereError as error:
            if not self._told:
                log.warning("another executor took over; nothing is done here meanwhile", because=str(error))
            self._told = True
            return False
        self._told = self.lost = False
        log.warning("the lock was lost with its connection, and is ours again")
        return True

    def close(self) -> None:
        """Let another one execute."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

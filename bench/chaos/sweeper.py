"""`python -m bench.chaos.sweeper URL PATIENCE_S`: reclaims leases and consumes events, as a remediator does.

It has no end of its own.
"""

import sys
import time
from typing import Final

from gpuwarden.db.engine import DatabaseError
from gpuwarden.queue import JobStore
from remediator.clients import job_queue_sql

PAUSE_S: Final = 0.3


def main(url: str, timeout_s: float) -> None:
    """Tend the queue without end; one that does not answer is asked again."""
    job_queue_sql.RENEWAL_S = timeout_s  # type: ignore[misc]  # leases of seconds, not of minutes
    queue: job_queue_sql.BuiltinQueue | None = None
    while True:
        try:
            queue = queue or job_queue_sql.BuiltinQueue(JobStore.open(url))
            queue.sweep(now=queue.now())
        except DatabaseError as error:
            print(f"not answered: {error}", file=sys.stderr, flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

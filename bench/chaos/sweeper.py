"""`python -m bench.chaos.sweeper URL RENEWAL_S`: reclaim leases and consume events like a remediator, until killed."""

import sys
import time
from typing import Final

from gpuwarden.db.errors import DatabaseError
from gpuwarden.queue import JobStore
from remediator.clients import job_queue_sql

PAUSE_S: Final = 0.3


def main(url: str, renewal_s: float) -> None:
    """Sweep the queue forever; retry if it does not answer."""
    job_queue_sql.RENEWAL_S = renewal_s  # type: ignore[misc]
    queue: job_queue_sql.BuiltinQueue | None = None
    while True:
        try:
            queue = queue or job_queue_sql.BuiltinQueue(JobStore.open(url))
            queue.sweep(now=queue.now())
        except DatabaseError as error:
            print(f"queue unreachable: {error}", file=sys.stderr, flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

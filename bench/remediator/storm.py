"""All hosts of a fleet fail at once: latency, memory, and when the circuit breaker opens.

Alerts arrive at a running `serve` with a ledger on PostgreSQL. This process replaces the executors of all hosts: it
takes the alerts of each host and begins an episode. The transaction that begins it checks the circuit breaker.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

from bench.figures import BenchError, Figure, figure, progress
from bench.remediator.openloop import Answered
from bench.webhook import ALERT
from deploy.standalone.stack import Chain
from gpuwarden.job import Condition
from remediator.ledger.ledger import Ledger
from remediator.plan import Begin, Close, Wait
from remediator.reasons import Reason
from remediator.remedies.guards import Act, Order, SafetyLimits

ALERTS_A_CALL: Final = 50
THREADS: Final = 4


def measure(chain: Chain, send: Callable[[Sequence[bytes]], Answered], *, hosts: int) -> Iterator[Figure]:
    """Measure `hosts` hosts with one worker each."""
    names = [f"host-{number:04}" for number in range(hosts)]
    progress(f"remediator, {hosts} hosts fail at once")
    with closing(Ledger.open(chain.ledger_url, host=names[0])) as ledger:
        for name in names:
            ledger.executors.beat(host=name, pid=1, armed=True, started_at=0.0, errors=0, workers=1, now=ledger.now())
        ledger.orders.give(Order(act=Act.ARM, at=ledger.now(), who="bench", reason="benchmark"))
        answered = send(list(_bodies(names)))
        what = f"{hosts} hosts at once, PostgreSQL"
        yield figure("remediator", f"{what}: {ALERTS_A_CALL} alerts to 202", "ms", answered.latencies_ms)
        began_s = time.perf_counter()
        with ThreadPoolExecutor(THREADS) as pool:
            outcomes = Counter(pool.map(lambda name: _try_to_begin(ledger, name), names))
        took_s = time.perf_counter() - began_s
        if ledger.orders.current().breaker() is None:
            raise BenchError(f"the circuit breaker is closed after {hosts} hosts: {outcomes}")
    yield figure("remediator", f"{what}: begun before the breaker opened", "", [float(outcomes["begun"])])
    yield figure("remediator", f"{what}: held by the breaker", "", [float(outcomes[Reason.CIRCUIT_BREAKER])])
    yield figure("remediator", f"{what}: decisions for all", "s", [took_s])
    yield figure("remediator", f"{what}: peak memory of serve", "MiB", [peak_mib(chain.pid("serve"))])


def peak_mib(pid: int) -> float:
    """Peak memory of a process, MiB (VmHWM, proc(5))."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (peak,) = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak) / 1024


def _try_to_begin(ledger: Ledger, host: str) -> str:
    """Begin an episode like an executor whose alert is confirmed; return the outcome."""
    while ledger.inbox.take_new(host, now=ledger.now()):
        pass
    (episode,) = ledger.episodes.list_open(host)
    step = Begin(
        condition=Condition.STALL,
        free_key=f"{host} incarnation",
        container_kind="process",
        container_handle=host,
        container_name=host,
        settle_key=None,
        worker_incarnation="",
        message="measured",
    )
    instead = ledger.intents.begin(episode, step, safety_limits=SafetyLimits(), now=ledger.now())
    match instead:
        case Wait(reason=reason):
            return reason
        case Close(message=message):
            raise BenchError(f"the episode of {host} was closed: {message}")
    return "begun"


def _bodies(names: Sequence[str]) -> Iterator[bytes]:
    alerts = [json.loads(ALERT % {"n": number}) for number in range(len(names))]
    for alert, name in zip(alerts, names, strict=True):
        alert["labels"]["host"] = name
    for first in range(0, len(alerts), ALERTS_A_CALL):
        some = alerts[first : first + ALERTS_A_CALL]
        yield json.dumps({"version": "4", "status": "firing", "alerts": some}).encode()

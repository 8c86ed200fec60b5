"""How long Alertmanager waits for its 202 from `gpuwarden remediator serve`, which syncs every commit."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import httpx

from bench.figures import BenchError, Figure, Place, figure, progress, time_calls_ms, wait_until
from deploy.standalone.stack import Chain, Plan

POSTS: Final = 200
LARGE: Final = 500
LARGE_POSTS: Final = 20

ALERT: Final = """
{"status": "firing", "fingerprint": "%(n)016x", "startsAt": "2026-01-01T00:00:00Z", "endsAt": "0001-01-01T00:00:00Z",
 "labels": {"alertname": "GpuwardenJobStalled", "severity": "critical", "remedy": "restart_worker",
            "condition": "stall", "host": "bench",
            "worker": "worker-%(n)04d", "container": "worker-%(n)04d", "job_id": "%(n)d",
            "attempt": "1", "incarnation": "%(n)032x"},
 "annotations": {"summary": "job %(n)d on bench/worker-%(n)04d is stalled: no activity for 2m 0s",
                 "description": "Attempt 1 of job %(n)d in container worker-%(n)04d had its last step beat 2m 0s ago.",
                 "runbook": "docs/runbooks/GpuwardenJobStalled.md"}}
"""
"""An alert of the stall rule."""


def measure(places: list[Place]) -> Iterator[Figure]:
    """Compare with the same call and a wrong token, which is the round trip without the ledger."""
    for place in places:
        progress(f"webhook, ledger on {place.name}")
        chain = Chain(Plan(work=place.folder / "webhook", host="bench", docker=None, simulate_gpu=None))
        try:
            chain.start_serve()
            wait_until(lambda: _is_ready(chain), within_s=30, what="the webhook answers")  # noqa: B023 - called at once
            yield from _measure_posts(chain, place.name)
        finally:
            chain.stop("serve")
            chain.http.close()


def _measure_posts(chain: Chain, name: str) -> Iterator[Figure]:
    token = chain.token_file.read_text(encoding="ascii")
    one, many = _payload(1), _payload(LARGE)
    found = time_calls_ms(lambda: _post(chain, one, token, httpx.codes.UNAUTHORIZED, scheme="Basic"), count=POSTS)
    refused = figure("webhook", f"1 alert, refused with 401, {name}", "ms", found)
    yield refused
    found = time_calls_ms(lambda: _post(chain, one, token, httpx.codes.ACCEPTED), count=POSTS)
    accepted = figure("webhook", f"1 alert to 202, {name}", "ms", found, base=refused.median, against="401")
    yield accepted
    found = time_calls_ms(lambda: _post(chain, many, token, httpx.codes.ACCEPTED), count=LARGE_POSTS)
    yield figure("webhook", f"{LARGE} alerts to 202, {name}", "ms", found, base=accepted.median, against="1 alert")


def _post(chain: Chain, payload: dict[str, Any], token: str, wanted: int, *, scheme: str = "Bearer") -> None:
    answer = chain.http.post(
        f"{chain.remediator_url}/api/v1/alerts", json=payload, headers={"Authorization": f"{scheme} {token}"}
    )
    if answer.status_code != wanted:
        raise BenchError(f"the webhook answered {answer.status_code} instead of {wanted}: {answer.text[:200]}")


def _is_ready(chain: Chain) -> bool:
    chain.check()
    with suppress(httpx.HTTPError):
        return chain.http.get(f"{chain.remediator_url}/-/ready").is_success
    return False


def _payload(count: int) -> dict[str, Any]:
    return {"version": "4", "status": "firing", "alerts": [json.loads(ALERT % {"n": each}) for each in range(count)]}

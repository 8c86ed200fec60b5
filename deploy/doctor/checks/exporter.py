"""Checks of the exporter's page: samples, collectors, GPUs and workers. Pure."""

from typing import Final

from deploy.doctor.facts import Facts, Page
from deploy.doctor.finding import Finding, Unread, failed, ok, unknown, unread, warning
from gpuwarden.format import count_of, printable
from remediator.commands.status import SOURCES

SAMPLE_AGE_MAX_S: Final = 5.0
"""Maximum age of a sample, seconds: with an older one the executor does not act."""

OPTED_IN: Final = ("systemd",)
"""Kinds of containers that are watched because the settings list them."""


def exporter(facts: Facts) -> Finding | None:
    """The exporter answers with a fresh sample, and its collectors work."""
    page, restart = facts.exporter, facts.host.place.restart("exporter")
    if isinstance(page, Unread):
        return None if page.skipped else unread(page, restart)
    if page.not_ready:
        return failed(f"not ready: {page.not_ready}", restart)
    age_s = page.value("gpuwarden_sample_age_seconds")
    if age_s is None:
        return failed(f"{page.url} is not the exporter: it has no gpuwarden_sample_age_seconds", "correct --exporter")
    if not age_s <= SAMPLE_AGE_MAX_S:
        return failed(f"its newest sample is {age_s:.0f} s old: nothing is acted on", restart)
    bad = sorted(each.labels.get("collector", "") for each in page.of("gpuwarden_collector_success") if each.value == 0)
    if bad:
        fixes = [SOURCES[name] for name in bad if name in SOURCES]
        return failed(f"{', '.join(bad)} failed: those metrics are unknown", "; ".join(fixes) or restart)
    return ok(f"newest sample {age_s:.1f} s old at {page.url}")


def gpus(facts: Facts) -> Finding | None:
    """GPUs are seen, and their use can be attributed to containers."""
    page = facts.exporter
    if isinstance(page, Unread):
        return unknown(page.why)
    seen = {each.labels.get("gpu") for each in page.of("gpuwarden_gpu_info")}
    if not seen:
        return warning(
            "no GPU is seen: without one, no hung job is confirmed",
            "install the driver (`nvidia-smi`), or try `gpuwarden up --simulate-gpu` (docs/how-to/simulate-gpus.md)",
        )
    missing = [each for each in page.of("gpuwarden_container_gpu_attribution_missing") if each.value == 1]
    if missing:
        first = missing[0].labels
        return warning(
            f"GPU use of {printable(first.get('container', ''))} on {first.get('gpu')} cannot be attributed: its "
            "stalled jobs are not detected",
            "see docs/runbooks/GpuwardenAttributionMissing.md",
        )
    return ok(f"{count_of(len(seen), 'GPU')}, use attributed")


def watched(facts: Facts) -> Finding | None:
    """Something is watched, and each worker's container may be restarted."""
    page = facts.exporter
    if isinstance(page, Unread):
        return unknown(page.why)
    workers = list(page.of("gpuwarden_worker_info"))
    managed = {each.labels.get("container"): each.value == 1 for each in page.of("gpuwarden_container_managed")}
    services = _services(page)
    opted_in = sum(managed.values()) + services
    if not workers and not opted_in:
        return warning(
            "nothing is watched: no worker reports, and no container has the label gpuwarden.managed=true",
            "start a worker (`gpuwarden run -- CMD`), or `docker run --label gpuwarden.managed=true`",
        )
    bare = [each.labels for each in workers if managed.get(each.labels.get("container")) is False]
    if bare:
        return warning(
            f"worker {printable(bare[0].get('worker', ''))} is never restarted: its container "
            f"{printable(bare[0].get('container', ''))} has no label gpuwarden.managed=true",
            "create the container again with `--label gpuwarden.managed=true`",
        )
    return ok(f"{count_of(len(workers), 'worker')}, {count_of(opted_in, 'managed container or service')}")


def _services(page: Page) -> int:
    return sum(each.labels.get("kind") in OPTED_IN for each in page.of("gpuwarden_container_info"))

"""PromQL building blocks of the dashboards."""

from typing import Final

from gpuwarden.job import Phase

SLOT: Final = ("host", "worker", "container")
CONTAINER: Final = ("host", "container")
SHARE: Final = ("host", "container", "gpu")
GPU: Final = ("host", "gpu")

HOST: Final = 'host=~"$host"'
WORKER: Final = f'{HOST}, worker=~"$worker"'

WORKERS_KNOWN: Final = f'count(gpuwarden_collector_success{{collector="source_workers", {HOST}}} == 1)'
"""Has a value while some worker files can be read: then no series means zero."""

EXPORTER_KNOWN: Final = f"count(gpuwarden_exporter_info{{{HOST}}})"


def aggregate(operator: str, labels: tuple[str, ...], metric: str, *, where: str = WORKER) -> str:
    """Aggregate to one value per label set, so that a host scraped twice or a duplicate series counts once."""
    return f"{operator} by ({', '.join(labels)}) ({metric}{{{where}}})"


def or_zero(expression: str, known: str) -> str:
    """The value, or 0 while `known` has a value (a sum over nothing is empty)."""
    return f"{expression} or 0 * {known}"


def or_none(expression: str, known: str, *labels: str) -> str:
    """The series, or one 0 with the labels set to `none` while `known` has a value."""
    none = f"0 * {known}"
    for label in labels:
        # Set every label of the legend: Grafana shows a missing label by its name.
        none = f'label_replace({none}, "{label}", "none", "", "")'
    # `on ()`: a plain `or` would add the 0 next to real series, because the labels differ.
    return f"{expression} or on () {none}"


def ratio(part: str, whole: str) -> str:
    """One operand divided by another with the same labels; absent if the divisor is 0."""
    return f"{part} / ({whole} > 0)"


def on_gpu(expression: str) -> str:
    """Add the GPU's index and its data source for the legend. The UUID stays."""
    # `topk`, because two info series for one GPU would fail a plain group_left.
    info = f"topk by (host, gpu) (1, gpuwarden_gpu_info{{{HOST}}})"
    return f"{expression} * on (host, gpu) group_left (index, source) {info}"


def with_identity(expression: str) -> str:
    """Add the attempt's labels and phase."""
    slot = ", ".join(SLOT)
    return (
        f"{expression}"
        f" * on ({slot}) group_left (job_class, model) topk by ({slot}) (1, gpuwarden_job_info{{{WORKER}}})"
        f" * on ({slot}) group_left (job_id, attempt)"
        f' count_values without () ("job_id",'
        f" gpuwarden_job_id{{{WORKER}}} and topk by ({slot}) (1, timestamp(gpuwarden_job_id{{{WORKER}}})))"
        f" * on ({slot}) group_left (phase) topk by ({slot}) (1, gpuwarden_job_phase{{{WORKER}}})"
    )


def phase_number() -> str:
    """Phase of each worker slot as a number, from 1 in the order of `Phase`."""
    of_phase = (aggregate("max", SLOT, "gpuwarden_job_phase", where=f'phase="{phase}", {WORKER}') for phase in Phase)
    return " or ".join(f"{number} * {expression}" for number, expression in enumerate(of_phase, start=1))


def targets_up(info: str) -> str:
    """Number of targets that are up and had the series `info` within a day."""
    # By series and not by job name, which the owner chooses. Within a day, to show 0 if all are down.
    return f"sum(up{{{HOST}}} and on (job, instance) last_over_time({info}{{{HOST}}}[1d]))"


def hosts_down(info: str) -> str:
    """Number of hosts that had the series `info` within a day but not now."""
    # A target that service discovery dropped has no `up`.
    lost = f"group by (host) (last_over_time({info}{{{HOST}}}[1d])) unless on (host) {info}{{{HOST}}}"
    return or_zero(f"count({lost})", f"count({info}{{{HOST}}})")

"""PromQL of the dashboards, in pieces: who is chosen, one value for each thing, and a zero only where it was measured.

`host` is a target label of every series. A selector of series that carry `worker` filters by the chosen workers too.
"""

from typing import Final

from gpuwarden.job import Phase

SLOT: Final = ("host", "worker", "container")
CONTAINER: Final = ("host", "container")
SHARE: Final = ("host", "container", "gpu")
GPU: Final = ("host", "gpu")

HOST: Final = 'host=~"$host"'
WORKER: Final = f'{HOST}, worker=~"$worker"'

WORKERS_KNOWN: Final = f'count(gpuwarden_collector_success{{collector="source_workers", {HOST}}} == 1)'
"""Has a value while some host's worker files can be read: what there is none of is then zero rather than unknown."""

EXPORTER_KNOWN: Final = f"count(gpuwarden_exporter_info{{{HOST}}})"


def each(operator: str, labels: tuple[str, ...], metric: str, *, where: str = WORKER) -> str:
    """One value for each thing the labels name: a host scraped twice, or a duplicate series, counts once."""
    return f"{operator} by ({', '.join(labels)}) ({metric}{{{where}}})"


def or_zero(expression: str, known: str) -> str:
    """The value, or 0 while `known` answers: a sum over nothing is empty, and empty must mean unknown."""
    return f"{expression} or 0 * {known}"


def or_none(expression: str, known: str, *labels: str) -> str:
    """The series, or while there are none and `known` answers, one 0 whose labels say `none`."""
    none = f"0 * {known}"
    for label in labels:
        # All that the legend names: Grafana shows a missing label as the label's own name.
        none = f'label_replace({none}, "{label}", "none", "", "")'
    # `on ()`: a plain `or` would show the 0 beside the real series, for its labels differ.
    return f"{expression} or on () {none}"


def ratio(part: str, whole: str) -> str:
    """One aggregated operand over another with the same labels; absent where the whole is nothing."""
    return f"{part} / ({whole} > 0)"


def on_gpu(expression: str) -> str:
    """Add the GPU's index and the source of its figures for the legend; its UUID stays."""
    # topk: two info series for one GPU would fail a plain group_left.
    info = f"topk by (host, gpu) (1, gpuwarden_gpu_info{{{HOST}}})"
    return f"{expression} * on (host, gpu) group_left (index, source) {info}"


def with_identity(expression: str) -> str:
    """Add to an expression keyed by worker slot which attempt it is of, and its phase."""
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
    """The phase of each worker slot as a number, from 1 in the order of `Phase`."""
    of_phase = (each("max", SLOT, "gpuwarden_job_phase", where=f'phase="{phase}", {WORKER}') for phase in Phase)
    return " or ".join(f"{number} * {expression}" for number, expression in enumerate(of_phase, start=1))


def answering(info: str) -> str:
    """How many targets Prometheus reaches now, of those that have answered with the series `info` within a day."""
    # By what they answered, not by job name, which is the owner's; within a day, so that 0 is seen when all are down.
    return f"sum(up{{{HOST}}} and on (job, instance) last_over_time({info}{{{HOST}}}[1d]))"


def gone(info: str) -> str:
    """How many hosts answered with the series `info` within a day and do not now, down or vanished alike."""
    # Not from `up`: a target that service discovery dropped has none.
    lost = f"group by (host) (last_over_time({info}{{{HOST}}}[1d])) unless on (host) {info}{{{HOST}}}"
    return or_zero(f"count({lost})", f"count({info}{{{HOST}}})")

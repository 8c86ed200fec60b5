"""The fleet at a glance: a number for each question that a person asks first."""

from typing import Final

from dashboards.expressions import EXPORTER_KNOWN, HOST, SLOT, WORKER, WORKERS_KNOWN, each, or_zero
from dashboards.panels import Meaning, Panel, Query

_ALIVE: Final = each("max", SLOT, "gpuwarden_worker_alive")
_ARMED: Final = each("max", ("host",), "gpuwarden_remediator_armed", where=HOST)
_SIMULATED: Final = f'count(group by (host, gpu) (gpuwarden_gpu_info{{source="simulated", {HOST}}}))'
_ALERTS: Final = (
    f'count(max by (alertname, host, worker, container) (ALERTS{{alertname=~"Gpuwarden.+", '
    f'severity!="none", alertstate="firing", {WORKER}}}))'
)

PANELS: Final = (
    Panel(
        title="Workers alive",
        reads="Workers whose process holds its kernel lock now, whatever their heartbeat says.",
        unit="short",
        queries=(Query(expr=or_zero(f"sum({_ALIVE})", WORKERS_KNOWN), legend="alive"),),
        kind="number",
        width=3,
    ),
    Panel(
        title="Workers dead",
        reads="Workers that ended without removing their files and have not been started again. Any is worth a look.",
        unit="short",
        queries=(Query(expr=or_zero(f"count({_ALIVE} == 0)", WORKERS_KNOWN), legend="dead"),),
        kind="number",
        width=3,
        levels={1: "red"},
    ),
    Panel(
        title="Jobs running",
        reads="Attempts that a worker reports now. 0 is measured; unknown means that no host's state files can "
        "be read.",
        unit="short",
        queries=(
            Query(
                expr=or_zero(f"count({each('max', SLOT, 'gpuwarden_job_info')})", WORKERS_KNOWN),
                legend="running",
            ),
        ),
        kind="number",
        width=3,
    ),
    Panel(
        title="Jobs suspected",
        reads="Jobs silent past their timeout that still show, or may show, another sign of life: GPU, RAM, or "
        "a figure that is unknown. Nothing is done to them. One that stays suspected needs a person.",
        unit="short",
        queries=(
            Query(
                expr=or_zero(f"sum({each('max', SLOT, 'gpuwarden_job_stall_suspected')})", WORKERS_KNOWN),
                legend="suspected",
            ),
        ),
        kind="number",
        width=3,
        levels={1: "orange"},
    ),
    Panel(
        title="Alerts firing",
        reads="gpuwarden's alerts firing now for the chosen hosts and workers. Each stall is one wedged job.",
        unit="short",
        queries=(Query(expr=or_zero(_ALERTS, EXPORTER_KNOWN), legend="firing"),),
        kind="number",
        width=3,
        levels={1: "red"},
    ),
    Panel(
        title="Remediators armed",
        reads="How many hosts' remediators act on what they decide, and how many are in dry run: those record "
        "what they would have done and touch nothing. Unknown until an executor has run.",
        unit="short",
        queries=(
            Query(expr=f"sum({_ARMED})", legend="armed"),
            Query(expr=f"count({_ARMED}) - sum({_ARMED})", legend="dry run"),
        ),
        kind="number",
        width=4,
    ),
    Panel(
        title="Simulated GPUs",
        reads="Over 0 means that this many of the GPUs shown are SIMULATED: their utilisation, memory and idle "
        "time come from a file and say nothing about real hardware. Unknown: no GPU is reported at all.",
        unit="short",
        queries=(
            Query(
                expr=or_zero(_SIMULATED, f"count(gpuwarden_gpu_info{{{HOST}}})"),
                legend="SIMULATED, not real hardware",
            ),
        ),
        kind="number",
        width=5,
        levels={1: "orange"},
        meanings={"0": Meaning(text="none", color="green")},
    ),
)

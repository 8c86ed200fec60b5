"""The fleet at a glance: single numbers."""

from typing import Final

from dashboards.expressions import EXPORTER_KNOWN, HOST, SLOT, WORKER, WORKERS_KNOWN, aggregate, or_zero
from dashboards.panels import Panel, Query, ValueText

_ALIVE: Final = aggregate("max", SLOT, "gpuwarden_worker_alive")
_ARMED: Final = aggregate("max", ("host",), "gpuwarden_remediator_armed", where=HOST)
_SIMULATED: Final = f'count(group by (host, gpu) (gpuwarden_gpu_info{{source="simulated", {HOST}}}))'
_ALERTS: Final = (
    f'count(max by (alertname, host, worker, container) (ALERTS{{alertname=~"Gpuwarden.+", '
    f'severity!="none", alertstate="firing", {WORKER}}}))'
)

PANELS: Final = (
    Panel(
        title="Workers alive",
        description="Workers whose process holds its kernel lock now, with or without a heartbeat.",
        unit="short",
        queries=(Query(expr=or_zero(f"sum({_ALIVE})", WORKERS_KNOWN), legend="alive"),),
        kind="number",
        width=3,
    ),
    Panel(
        title="Workers dead",
        description="Workers that ended, left their files and were not started again. Check each one.",
        unit="short",
        queries=(Query(expr=or_zero(f"count({_ALIVE} == 0)", WORKERS_KNOWN), legend="dead"),),
        kind="number",
        width=3,
        levels={1: "red"},
    ),
    Panel(
        title="Jobs running",
        description="Attempts that workers report now. 0 is a measured value; unknown means that no host's state "
        "files can be read.",
        unit="short",
        queries=(
            Query(
                expr=or_zero(f"count({aggregate('max', SLOT, 'gpuwarden_job_info')})", WORKERS_KNOWN),
                legend="running",
            ),
        ),
        kind="number",
        width=3,
    ),
    Panel(
        title="Jobs suspected",
        description="Jobs past their stall timeout whose GPU, RAM or another activity is busy or unknown. gpuwarden "
        "does not act on them. Check a job that stays suspected.",
        unit="short",
        queries=(
            Query(
                expr=or_zero(f"sum({aggregate('max', SLOT, 'gpuwarden_job_stall_suspected')})", WORKERS_KNOWN),
                legend="suspected",
            ),
        ),
        kind="number",
        width=3,
        levels={1: "orange"},
    ),
    Panel(
        title="Alerts firing",
        description="gpuwarden alerts that fire now for the selected hosts and workers. Each stall alert is one "
        "stalled job.",
        unit="short",
        queries=(Query(expr=or_zero(_ALERTS, EXPORTER_KNOWN), legend="firing"),),
        kind="number",
        width=3,
        levels={1: "red"},
    ),
    Panel(
        title="Remediators armed",
        description="Hosts whose remediator acts, and hosts in dry run. A dry run records its decisions and changes "
        "nothing. Unknown until an executor has run.",
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
        description="Number of GPUs that are SIMULATED: their utilisation, memory and idle time come from a file, not "
        "from hardware. Unknown: no GPU is reported.",
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
        meanings={"0": ValueText(text="none", color="green")},
    ),
)

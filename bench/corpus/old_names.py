"""Names in scenario files of before 0.1.0 which have other names now. Scenario files may still use them."""

from typing import Final

OLD_NAMES: Final = {
    "condition": "condition",
    "host_lost": "host_lost",
    "hold_lost_host": "hold_lost_host",
    "timeout_s": "timeout_s",
    "gpuwarden.restart-after-s": "gpuwarden.restart-after-s",
    "GpuwardenHostLost": "GpuwardenHostLost",
    "GpuwardenJobSlow": "GpuwardenJobSlow",
    "GpuwardenServerHung": "GpuwardenServerHung",
    "GpuwardenServerProbeFailing": "GpuwardenServerProbeFailing",
    "GpuwardenServerNotReady": "GpuwardenServerNotReady",
    "GpuwardenNoExporterData": "GpuwardenNoExporterData",
    "GpuwardenRemediationOverdue": "GpuwardenRemediationOverdue",
    "GpuwardenCircuitBreakerOpen": "GpuwardenCircuitBreakerOpen",
    "GpuwardenExecutorDown": "GpuwardenExecutorDown",
    "GpuwardenWebhookNotReceiving": "GpuwardenWebhookNotReceiving",
    "GpuwardenPrometheusSelfScrapeMissing": "GpuwardenPrometheusSelfScrapeMissing",
    "GpuwardenRuleEvaluationsMissed": "GpuwardenRuleEvaluationsMissed",
    "GpuwardenRuleFailures": "GpuwardenRuleFailures",
    "GpuwardenHostLabelMismatch": "GpuwardenHostLabelMismatch",
    "GpuwardenGpuMetricsMissing": "GpuwardenGpuMetricsMissing",
    "GpuwardenWorkerNotMonitored": "GpuwardenWorkerNotMonitored",
    "GpuwardenCollectorFailing": "GpuwardenCollectorFailing",
    "GpuwardenScrapeIntervalTooLong": "GpuwardenScrapeIntervalTooLong",
    "GpuwardenVramRecycleDue": "GpuwardenVramRecycleDue",
}
"""Conditions, remedies, alerts, keys and labels: the name now, by the old one."""

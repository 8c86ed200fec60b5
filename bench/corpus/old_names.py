"""Old names in scenario files, which may still use them."""

from typing import Final

OLD_NAMES: Final = {
    "trip": "condition",
    "node_lost": "host_lost",
    "lose_node": "hold_lost_host",
    "patience_s": "timeout_s",
    "gpuwarden.probe-timeout": "gpuwarden.restart-after-s",
    "GpuwardenNodeLost": "GpuwardenHostLost",
    "GpuwardenJobSlowed": "GpuwardenJobSlow",
    "GpuwardenServerUnanswering": "GpuwardenServerHung",
    "GpuwardenServerSilent": "GpuwardenServerProbeFailing",
    "GpuwardenServerNeverAnswered": "GpuwardenServerNotReady",
    "GpuwardenNobodySeen": "GpuwardenNoExporterData",
    "GpuwardenUnmended": "GpuwardenRemediationOverdue",
    "GpuwardenBrakeLatched": "GpuwardenCircuitBreakerOpen",
    "GpuwardenExecutorSilent": "GpuwardenExecutorDown",
    "GpuwardenRemediatorUnreached": "GpuwardenWebhookNotReceiving",
    "GpuwardenRulesUnwatched": "GpuwardenPrometheusSelfScrapeMissing",
    "GpuwardenRulesLate": "GpuwardenRuleEvaluationsMissed",
    "GpuwardenRuleFailing": "GpuwardenRuleFailures",
    "GpuwardenHostMisnamed": "GpuwardenHostLabelMismatch",
    "GpuwardenGpuUnmeasured": "GpuwardenGpuMetricsMissing",
    "GpuwardenWorkerUnseen": "GpuwardenWorkerNotMonitored",
    "GpuwardenSourceFailing": "GpuwardenCollectorFailing",
    "GpuwardenScrapeTooSparse": "GpuwardenScrapeIntervalTooLong",
    "GpuwardenVramVictim": "GpuwardenVramRecycleDue",
}
"""Conditions, remedies, alerts, keys and labels: today's name by the old one."""

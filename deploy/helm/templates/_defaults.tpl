{{- /* Written by python -m testbed.chart from deploy/kubernetes. Do not edit. */ -}}
{{- define "gpuwarden.defaults" }}
GPUWARDEN_EXPORTER_DOCKER: none
GPUWARDEN_EXPORTER_LISTEN: 0.0.0.0
GPUWARDEN_EXPORTER_PODS: api
GPUWARDEN_GATEWAY_HOST_LISTEN: 0.0.0.0
{{- if eq $.Values.storage "sqlite" }}
GPUWARDEN_QUEUE_DB: sqlite:////var/lib/gpuwarden/queue/queue.db
{{- end }}
GPUWARDEN_REMEDIATOR_DOCKER: none
{{- if eq $.Values.storage "sqlite" }}
GPUWARDEN_REMEDIATOR_LEDGER: sqlite:////var/lib/gpuwarden/ledger/ledger.db
{{- end }}
GPUWARDEN_REMEDIATOR_PENDING_PODS: 'true'
{{- end }}

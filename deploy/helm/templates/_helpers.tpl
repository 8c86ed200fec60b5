{{- define "gpuwarden.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Settings of the chart, of the values that set options, and of the user, as YAML. */ -}}
{{- define "gpuwarden.settings" -}}
{{- $settings := include "gpuwarden.defaults" . | fromYaml }}
{{- with .Values.evict.namespaces }}
{{- $_ := set $settings "GPUWARDEN_EXPORTER_POD_NAMESPACES" (join "," .) }}
{{- $_ := set $settings "GPUWARDEN_REMEDIATOR_POD_NAMESPACES" (join "," .) }}
{{- end }}
{{- with .Values.demandGate.deployments }}
{{- $_ := set $settings "GPUWARDEN_EXPORTER_DEMAND_GATE_NAMESPACES" (keys . | sortAlpha | join ",") }}
{{- $_ := set $settings "GPUWARDEN_REMEDIATOR_DEMAND_GATE_NAMESPACES" (keys . | sortAlpha | join ",") }}
{{- end }}
{{- if ne .Values.resourceName "gpuwarden/vram-mib" }}
{{- $_ := set $settings "GPUWARDEN_EXPORTER_BUDGET_RESOURCE" .Values.resourceName }}
{{- $_ := set $settings "GPUWARDEN_REMEDIATOR_BUDGET_RESOURCE" .Values.resourceName }}
{{- end }}
{{- toYaml (mergeOverwrite $settings .Values.settings) }}
{{- end }}

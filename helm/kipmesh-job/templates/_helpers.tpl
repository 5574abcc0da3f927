{{- define "job.name" -}}{{ trunc 40 .Release.Name | trimSuffix "-" }}-spark{{- end -}}

{{- define "job.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "job.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "job.claim" -}}
{{- default (printf "%s-results" (include "job.name" .)) .Values.results.existingClaim -}}
{{- end -}}

{{/* Helm parses whole numbers as floats; print them without an exponent. */}}
{{- define "job.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ printf "%.0f" . }}{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}

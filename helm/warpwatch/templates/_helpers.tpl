{{- define "warpwatch.name" -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "warpwatch.selector" -}}
app.kubernetes.io/name: warpwatch
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "warpwatch.labels" -}}
{{ include "warpwatch.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

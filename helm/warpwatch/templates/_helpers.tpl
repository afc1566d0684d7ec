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

{{- /* How the kubelet asks: a list of the root and the path. */ -}}
{{- define "warpwatch.probe" -}}
{{- $root := index . 0 -}}
{{- if and $root.Values.web.secretName $root.Values.web.asksClients -}}
tcpSocket: {port: metrics}
{{- else if $root.Values.web.secretName -}}
httpGet: {path: {{ index . 1 }}, port: metrics, scheme: HTTPS}
{{- else -}}
httpGet: {path: {{ index . 1 }}, port: metrics}
{{- end -}}
{{- end -}}

{{- define "selector" -}}
app.kubernetes.io/name: ncd-serve
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "labels" -}}
{{ include "selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
ncd-serve/model: {{ .Values.model.name }}
ncd-serve/bundle: {{ .Values.model.bundle | quote }}
{{- end }}

{{- /* s3, gs, pvc, or nothing for models in the image */ -}}
{{- define "storage" -}}
{{ regexFind "^(s3|gs|pvc)" .Values.repository.uri }}
{{- end }}

{{- define "claim" -}}
{{ regexReplaceAll "^pvc://([^/]+)/?.*$" .Values.repository.uri "${1}" }}
{{- end }}

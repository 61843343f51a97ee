{{- define "rlx.labels" -}}
app.kubernetes.io/name: rlx
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

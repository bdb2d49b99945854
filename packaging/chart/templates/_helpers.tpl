{{/*
The names of objects are fixed: a cluster has one installation, because CSIDriver, definitions and policies
are the cluster's.
*/}}
{{- define "shorthorn.labels" -}}
app.kubernetes.io/name: shorthorn-controller
app.kubernetes.io/part-of: shorthorn
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "shorthorn.selector" -}}
app.kubernetes.io/name: shorthorn-controller
{{- end }}

{{- define "shorthorn.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end }}
{{- end }}
{{- end }}

{{- define "shorthorn.agentLabels" -}}
app.kubernetes.io/name: shorthorn-agent
app.kubernetes.io/part-of: shorthorn
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "shorthorn.agentImage" -}}
{{- with .Values.agent.daemonset.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end }}
{{- end }}
{{- end }}

{{/* The settings that all nodes share, in the format of agent.toml. A table may end the lines of a user. */}}
{{- define "shorthorn.agentSettings" -}}
disks = {{ .disks | toJson }}
{{- with .config | trim }}
{{ . }}
{{- end }}
{{- end }}

{{- define "shorthorn.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end }}

{{/* Whether the controller ends pods of other namespaces. */}}
{{- define "shorthorn.endsPods" -}}
{{- with .Values.controller -}}
{{- if or (eq .podsOfLostNodes "delete") .autoDeletePodWhenVolumeDetachedUnexpectedly -}}
true
{{- end }}
{{- end }}
{{- end }}

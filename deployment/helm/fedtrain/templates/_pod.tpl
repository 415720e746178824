{{/* The pod of a role: (dict "root" $ "role" "aggregator"|"sites/NAME" "command" … "certs" … "env" … "resources" …) */}}
{{- define "fedtrain.pod" }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 45
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
initContainers:
  - name: key   # a Secret's files can be read by a group, which a role refuses of its key; what it writes beside it stays
    image: {{ .root.Values.image | quote }}
    imagePullPolicy: {{ .root.Values.imagePullPolicy }}
    command: [sh, -ceu]
    args:
      - |
        umask 077
        mkdir -p "/state/certs/{{ .role }}" /state/runs
        cd /secret
        for file in *; do
          [ -e "/state/certs/{{ .role }}/$file" ] || cp -L "$file" "/state/certs/{{ .role }}/$file"
        done
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    volumeMounts:
      - {name: certs, mountPath: /secret, readOnly: true}
      - {name: state, mountPath: /state}
containers:
  - name: fedtrain
    image: {{ .root.Values.image | quote }}
    imagePullPolicy: {{ .root.Values.imagePullPolicy }}
    args: {{ toJson .command }}
    workingDir: /project
    env:
      - {name: FEDTRAIN_RUN__DIR, value: /state/runs}
      - {name: FEDTRAIN_NETWORK__CERTS, value: /state/certs}
      {{- range $name, $value := .env }}
      - {name: {{ $name }}, value: {{ $value | quote }}}
      {{- end }}
    {{- with .port }}
    ports: [{name: fedtrain, containerPort: {{ . }}}]
    readinessProbe: {tcpSocket: {port: fedtrain}, periodSeconds: 10}
    {{- end }}
    resources: {{ toJson .resources }}
    securityContext: {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    volumeMounts:
      - {name: project, mountPath: /project, readOnly: true}
      - {name: state, mountPath: /state}
      - {name: tmp, mountPath: /tmp}
      {{- if .data }}
      - {name: data, mountPath: /data, readOnly: true}
      {{- end }}
volumes:
  - {name: project, configMap: {name: {{ .root.Values.project }}}}
  - {name: certs, secret: {secretName: {{ .certs }}, defaultMode: 288}}   # 0440
  - {name: tmp, emptyDir: {}}
  {{- with .data }}
  - {{ merge (dict "name" "data") . | toJson }}
  {{- end }}
  {{- with .claim }}
  - {name: state, persistentVolumeClaim: {claimName: {{ . }}}}
  {{- end }}
{{- end }}

{{- define "fedtrain.claim" }}
accessModes: [ReadWriteOnce]
{{- with .className }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

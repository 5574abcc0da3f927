{{/* At most 40 characters, because StatefulSet names have at most 52 and append "-controllers". */}}
{{- define "kipmesh.fullname" -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 40 -}}
{{- printf "%s-%s" (trunc 31 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/* 22 characters of a digest, the length of Kafka's cluster ids. */}}
{{- define "kipmesh.clusterId" -}}
{{- default (printf "%s/%s" .Release.Namespace (include "kipmesh.fullname" .) | sha256sum | trunc 22) .Values.clusterId -}}
{{- end -}}

{{- define "kipmesh.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kipmesh.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "kipmesh.selector" . }}
app.kubernetes.io/version: {{ include "kipmesh.tag" . | trunc 63 | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "kipmesh.tag" -}}
{{- default .Chart.AppVersion .Values.image.tag -}}
{{- end -}}

{{/* (dict "root" $ "service" "leader") */}}
{{- define "kipmesh.image" -}}
{{- $image := .root.Values.image -}}
{{- $service := ternary "metadata_controller" .service (eq .service "controller") -}}
{{- $repository := default (printf "%s/%s" $image.prefix $service) $image.repository -}}
{{- with $image.registry }}{{ . }}/{{ end -}}
{{- $repository }}:{{ include "kipmesh.tag" .root -}}
{{- end -}}

{{- define "kipmesh.serviceAccount" -}}
{{- default (ternary (include "kipmesh.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* Fully qualified name of a headless Service: (dict "root" $ "kind" "followers") */}}
{{- define "kipmesh.domain" -}}
{{- printf "%s-%s.%s.svc.%s" (include "kipmesh.fullname" .root) .kind .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{- define "kipmesh.bootstrap" -}}
{{- printf "%s-brokers.%s.svc.%s:%v" (include "kipmesh.fullname" .) .Release.Namespace .Values.clusterDomain .Values.ports.mesh -}}
{{- end -}}

{{/* Bootstrap address for Kafka clients. */}}
{{- define "kipmesh.kafkaBootstrap" -}}
{{- printf "%s-brokers.%s.svc.%s:%v" (include "kipmesh.fullname" .) .Release.Namespace .Values.clusterDomain .Values.ports.kafka -}}
{{- end -}}

{{/* Services of the brokers for clients outside Kubernetes, as JSON: {"names": [{"name", "pod", "kind", "ordinal"}]}.
     Includes pods beyond `replicas` that still exist, because a broker needs its Service while it is drained. */}}
{{- define "kipmesh.externalServices" -}}
{{- $found := list -}}
{{- if and .Values.kafka.enabled .Values.kafka.external.enabled -}}
{{- range $kind := list "leaders" "followers" -}}
{{- $set := printf "%s-%s" (include "kipmesh.fullname" $) $kind -}}
{{- $old := lookup "apps/v1" "StatefulSet" $.Release.Namespace $set | default dict -}}
{{- $count := max (int (get $.Values $kind).replicas) (int (dig "status" "replicas" 0 $old)) -}}
{{- range $i := until (int $count) -}}
{{- $found = append $found (dict "name" (printf "%s-%d-external" $set $i) "pod" (printf "%s-%d" $set $i) "kind" $kind "ordinal" $i) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "names" $found) -}}
{{- end -}}

{{/* Not empty if a pod needs to read its Kubernetes node: {{ if include ... }}. */}}
{{- define "kipmesh.asksNode" -}}
{{- $external := .Values.kafka.external -}}
{{- $byNode := and .Values.kafka.enabled $external.enabled (eq $external.type "NodePort") (not $external.host) (not $external.domain) -}}
{{- if or .Values.rack.fromNode $byNode -}}true{{- end -}}
{{- end -}}

{{- define "kipmesh.voters" -}}
{{- $voters := list -}}
{{- range $i := until (int .Values.controllers.replicas) -}}
{{- $host := printf "%s-controllers-%d.%s" (include "kipmesh.fullname" $) $i (include "kipmesh.domain" (dict "root" $ "kind" "controllers")) -}}
{{- $voters = append $voters (printf "%d@%s:%v" (add (int $.Values.controllers.firstNodeId) $i) $host $.Values.ports.mesh) -}}
{{- end -}}
{{- join "," $voters -}}
{{- end -}}

{{/* Lines of a properties file from the list of dicts "parts"; later dicts take precedence. */}}
{{- define "kipmesh.properties" -}}
{{- $all := dict -}}
{{- range .parts -}}
{{- range $key, $value := . -}}
{{- $_ := set $all $key $value -}}
{{- end -}}
{{- end -}}
{{- range $key := keys $all | sortAlpha }}
{{ $key }}={{ include "kipmesh.text" (get $all $key) }}
{{- end -}}
{{- end -}}

{{/* Helm parses whole numbers as floats; print them without an exponent. */}}
{{- define "kipmesh.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}{{ printf "%.0f" . }}{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}

{{/* Checks that a schema cannot express, such as values that conflict. */}}
{{- define "kipmesh.check" -}}
{{- $values := .Values -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "kipmesh.fullname" .)) -}}
{{- fail (printf "%s is not a valid Service name (a letter, then a-z, 0-9 and -): choose another release name, or set fullnameOverride" (include "kipmesh.fullname" .)) -}}
{{- end -}}
{{- $ranges := list -}}
{{- range $kind := list "controllers" "leaders" "followers" -}}
{{- $part := get $values $kind -}}
{{- $ranges = append $ranges (dict "kind" $kind "first" (int $part.firstNodeId) "last" (sub (add (int $part.firstNodeId) (int $part.replicas)) 1)) -}}
{{- end -}}
{{- range $i, $one := $ranges -}}
{{- range $j, $other := $ranges -}}
{{- if and (lt $i $j) (le $one.first $other.last) (le $other.first $one.last) -}}
{{- fail (printf "node ids of %s (%d to %d) and of %s (%d to %d) overlap: set firstNodeId of one of them" $one.kind (int $one.first) (int $one.last) $other.kind (int $other.first) (int $other.last)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if lt (add (int $values.leaders.replicas) (int $values.followers.replicas)) 1 -}}
{{- fail "leaders.replicas and followers.replicas are both 0: at least one broker is needed" -}}
{{- end -}}
{{- if and $values.kafka.external.enabled (not $values.kafka.enabled) -}}
{{- fail "kafka.external.enabled needs kafka.enabled=true" -}}
{{- end -}}
{{- if and $values.kafka.external.host $values.kafka.external.domain -}}
{{- fail "kafka.external.host and kafka.external.domain are both set: set only one" -}}
{{- end -}}
{{- if and $values.kafka.external.host (eq $values.kafka.external.type "LoadBalancer") -}}
{{- fail "kafka.external.host cannot be used with type LoadBalancer, where each broker has its own address: use domain, or neither" -}}
{{- end -}}
{{- $nodePorts := dict -}}
{{- $external := $values.kafka.external -}}
{{- range $one := prepend (include "kipmesh.externalServices" . | fromJson).names (dict "kind" "bootstrap" "ordinal" 0) -}}
{{- $first := int (get $external.nodePorts $one.kind) -}}
{{- if and $external.enabled (gt $first 0) -}}
{{- $port := toString (add $first (int $one.ordinal)) -}}
{{- if hasKey $nodePorts $port -}}
{{- fail (printf "kafka.external.nodePorts: port %s is used by %s and by %s; brokers of a kind use consecutive ports from the first" $port (get $nodePorts $port) $one.kind) -}}
{{- end -}}
{{- $_ := set $nodePorts $port $one.kind -}}
{{- end -}}
{{- end -}}
{{- if and $values.kafka.sasl.enabled (not $values.kafka.sasl.secretName) -}}
{{- fail "kafka.sasl.enabled needs kafka.sasl.secretName, a Secret with the users" -}}
{{- end -}}
{{- $used := dict -}}
{{- range $name, $port := $values.ports -}}
{{- if and (ne $name "api") (hasKey $used (toString $port)) -}}
{{- fail (printf "ports.%s and ports.%s are both %v: choose different ports" $name (get $used (toString $port)) $port) -}}
{{- end -}}
{{- if ne $name "api" -}}{{- $_ := set $used (toString $port) $name -}}{{- end -}}
{{- end -}}
{{- if and $values.tls.certManager.enabled (not $values.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager.enabled needs tls.certManager.issuerRef.name, the issuer" -}}
{{- end -}}
{{- if and $values.tls.certManager.enabled (not $values.tls.enabled) -}}
{{- fail "tls.certManager.enabled needs tls.enabled=true" -}}
{{- end -}}
{{- if and $values.tls.clientAuth (not $values.tls.enabled) -}}
{{- fail "tls.clientAuth needs tls.enabled=true" -}}
{{- end -}}
{{- if and (ne $values.tls.consumersClientAuth "none") (not $values.tls.enabled) -}}
{{- fail "tls.consumersClientAuth needs tls.enabled=true" -}}
{{- end -}}
{{- $given := list "node.id" "cluster.id" "controller.quorum.voters" "listeners" "advertised.listeners" "http.listener" "log.dirs" "metadata.log.dir" "bootstrap.servers" "listener.security.protocol.map" "ssl.certificate.dir" "ssl.node.names" "ssl.client.auth" "http.ssl.client.auth" "security.protocol" "sasl.users.file" "sasl.enabled.mechanisms" -}}
{{- range $where, $config := dict "config" $values.config "controllers.config" $values.controllers.config "leaders.config" $values.leaders.config "followers.config" $values.followers.config "consumers.config" $values.consumers.config -}}
{{- range $key, $_ := $config -}}
{{- if has $key $given -}}
{{- fail (printf "%s: %s is set by the chart: remove it" $where $key) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z0-9_]+([.][a-z0-9_]+)*$" $key) -}}
{{- fail (printf "%s: %s is not a valid configuration key, such as log.retention.ms" $where $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $old := lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-controllers" (include "kipmesh.fullname" .)) -}}
{{- if $old -}}
{{- if ne (int $old.spec.replicas) (int $values.controllers.replicas) -}}
{{- fail (printf "controllers.replicas must stay %d, got %d: the voters of the metadata quorum cannot change after installation" (int $old.spec.replicas) (int $values.controllers.replicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Metadata of all pods of the release: (dict "root" $ "kind" "followers" "service" "follower" "part" .Values.followers) */}}
{{- define "kipmesh.podMeta" -}}
labels:
  {{- include "kipmesh.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .kind }}
  app.kubernetes.io/version: {{ include "kipmesh.tag" .root | trunc 63 | quote }}
  {{- with .part.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include "kipmesh.config" .root | fromYaml | dig (printf "%s.properties" .service) "" | sha256sum }}
  {{- with .part.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "kipmesh.podSpec" -}}
serviceAccountName: {{ include "kipmesh.serviceAccount" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- if and .root.Values.chaos.enabled .root.Values.chaos.pause }}
shareProcessNamespace: true
{{- end }}
terminationGracePeriodSeconds: {{ .part.terminationGracePeriodSeconds }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .topologyKey }}
    maxSkew: {{ .maxSkew }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "kipmesh.selector" $.root | nindent 8 }}
        {{- include "kipmesh.spreadWith" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- with .part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Leaders and followers are spread together, because both are brokers. */}}
{{- define "kipmesh.spreadWith" -}}
{{- if has .kind (list "leaders" "followers") -}}
kipmesh.broker: "true"
{{- else -}}
app.kubernetes.io/component: {{ .kind }}
{{- end -}}
{{- end -}}

{{- define "kipmesh.container" -}}
image: {{ include "kipmesh.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
{{- end -}}

{{/* Init container that writes the pod's configuration. Needs also "properties" and "args". */}}
{{- define "kipmesh.prepare" -}}
- name: prepare
  {{- include "kipmesh.container" . | nindent 2 }}
  command: [python, -m, kipmesh.kube, prepare]
  args:
    - --base=/etc/kipmesh/{{ .service }}.properties
    - --out=/run/kipmesh/node.properties
    {{- if ne .kind "consumers" }}
    - --pod=$(POD_NAME)
    - --first-id={{ .part.firstNodeId }}
    - --service={{ include "kipmesh.domain" . }}
    - --port={{ .root.Values.ports.mesh }}
    {{- end }}
    {{- if and .root.Values.kafka.enabled (has .kind (list "leaders" "followers")) }}
    - --listener=KAFKA:{{ .root.Values.ports.kafka }}
    {{- with .root.Values.kafka.external }}
    {{- if .enabled }}
    - --external=KAFKA_EXTERNAL
    - --external-service={{ $.root.Release.Namespace }}/$(POD_NAME)-external
    {{- if .domain }}
    - --external-host=$(POD_NAME).{{ .domain }}
    {{- else if .host }}
    - --external-host={{ .host }}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- if and (include "kipmesh.asksNode" .root) (ne .kind "controllers") }}
    - --node=$(NODE_NAME)
    {{- end }}
    {{- if and .root.Values.rack.fromNode (ne .kind "controllers") }}
    - --label={{ .root.Values.rack.label }}
    - --rack-key={{ ternary "client.rack" "broker.rack" (eq .kind "consumers") }}
    {{- end }}
  env:
    - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {memory: 256Mi}
  volumeMounts:
    - {name: config, mountPath: /etc/kipmesh, readOnly: true}
    - {name: run, mountPath: /run/kipmesh}
    {{- if ne .kind "controllers" }}
    - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
    {{- end }}
{{- end -}}

{{- define "kipmesh.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" .root.Values.tls.enabled -}}
startupProbe:
  httpGet: {path: {{ ternary "/healthz" "/startedz" (eq .kind "consumers") }}, port: http, scheme: {{ $scheme }}}
  {{- toYaml .root.Values.probes.startup | nindent 2 }}
readinessProbe:
  httpGet: {path: {{ ternary "/readyz" "/insyncz" (eq .kind "consumers") }}, port: http, scheme: {{ $scheme }}}
  {{- toYaml .root.Values.probes.readiness | nindent 2 }}
livenessProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ $scheme }}}
  {{- toYaml .root.Values.probes.liveness | nindent 2 }}
{{- end -}}

{{/* Probe command of consumers that require certificates, which the kubelet does not have.
     (dict "root" $ "path" "/readyz" "probe" .Values.probes.readiness) */}}
{{- define "kipmesh.ownProbe" -}}
{{- $tls := .root.Values.tls.mountPath -}}
exec:
  command:
    - python
    - -c
    - |
      import http.client, ssl
      tls = ssl.create_default_context(cafile="{{ $tls }}/ca.crt")
      tls.check_hostname = False
      tls.load_cert_chain("{{ $tls }}/tls.crt", "{{ $tls }}/tls.key")
      probe = http.client.HTTPSConnection("127.0.0.1", {{ .root.Values.ports.api }}, timeout={{ .probe.timeoutSeconds }}, context=tls)
      probe.request("GET", "{{ .path }}")
      raise SystemExit(0 if probe.getresponse().status == 200 else 1)
{{ toYaml .probe }}
{{- end -}}

{{- define "kipmesh.consumerProbes" -}}
{{- $probes := .root.Values.probes -}}
{{- if eq .root.Values.tls.consumersClientAuth "required" -}}
startupProbe:
  {{- include "kipmesh.ownProbe" (dict "root" .root "path" "/healthz" "probe" $probes.startup) | nindent 2 }}
readinessProbe:
  {{- include "kipmesh.ownProbe" (dict "root" .root "path" "/readyz" "probe" $probes.readiness) | nindent 2 }}
livenessProbe:
  {{- include "kipmesh.ownProbe" (dict "root" .root "path" "/healthz" "probe" $probes.liveness) | nindent 2 }}
{{- else -}}
{{- include "kipmesh.probes" . -}}
{{- end -}}
{{- end -}}

{{- define "kipmesh.volumes" -}}
- name: config
  configMap:
    name: {{ include "kipmesh.fullname" .root }}
    items:
      - {key: {{ .service }}.properties, path: {{ .service }}.properties}
- name: run
  emptyDir: {sizeLimit: 16Mi}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if ne .kind "controllers" }}
- name: token
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}
{{- if .root.Values.tls.enabled }}
{{ include "kipmesh.tlsVolume" (dict "root" .root "secret" (include (ternary "kipmesh.clientTlsSecret" "kipmesh.tlsSecret" (eq .kind "consumers")) .root)) }}
{{- end }}
{{- if and .root.Values.kafka.enabled .root.Values.kafka.sasl.enabled (has .kind (list "leaders" "followers")) }}
- name: users
  secret:
    secretName: {{ .root.Values.kafka.sasl.secretName }}
    items: [{key: users, path: users}]
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Volume with the certificates and client.properties for `kipmesh`: (dict "root" $ "secret" "name") */}}
{{- define "kipmesh.tlsVolume" -}}
- name: tls
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ .secret }}}
      - configMap: {name: {{ include "kipmesh.fullname" .root }}, items: [{key: client.properties, path: client.properties}]}
{{- end -}}

{{/* TLS volume, mount and environment variable of pods that are only clients. */}}
{{- define "kipmesh.clientTlsVolume" -}}
{{- if .Values.tls.enabled -}}
{{ include "kipmesh.tlsVolume" (dict "root" . "secret" (include "kipmesh.clientTlsSecret" .)) }}
{{- end -}}
{{- end -}}

{{- define "kipmesh.clientTlsMount" -}}
{{- if .Values.tls.enabled -}}
- {name: tls, mountPath: {{ .Values.tls.mountPath }}, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "kipmesh.clientTlsVariable" -}}
{{- if .Values.tls.enabled -}}
- {name: KIPMESH_COMMAND_CONFIG, value: {{ .Values.tls.mountPath }}/client.properties}
{{- end -}}
{{- end -}}

{{/* StatefulSet of leaders, followers or controllers. Takes the dict of kipmesh.podMeta. */}}
{{- define "kipmesh.statefulSet" -}}
{{- $root := .root -}}
{{- $name := printf "%s-%s" (include "kipmesh.fullname" $root) .kind -}}
{{- $isBroker := ne .kind "controllers" -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ $name }}
  labels:
    {{- include "kipmesh.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .kind }}
spec:
  replicas: {{ .part.replicas }}
  serviceName: {{ $name }}
  # Pods start in parallel, because nodes need each other to become ready. Updates replace one pod at a time.
  podManagementPolicy: Parallel
  updateStrategy:
    type: RollingUpdate
  persistentVolumeClaimRetentionPolicy: {whenDeleted: Retain, whenScaled: Retain}
  selector:
    matchLabels:
      {{- include "kipmesh.selector" $root | nindent 6 }}
      app.kubernetes.io/component: {{ .kind }}
  template:
    metadata:
      {{- $meta := include "kipmesh.podMeta" . | fromYaml -}}
      {{- if $isBroker }}{{ $_ := set $meta.labels "kipmesh.broker" "true" }}{{ end }}
      {{- toYaml $meta | nindent 6 }}
    spec:
      {{- include "kipmesh.podSpec" . | nindent 6 }}
      initContainers:
        {{- include "kipmesh.prepare" . | nindent 8 }}
      containers:
        - name: {{ .service }}
          {{- include "kipmesh.container" . | nindent 10 }}
          command: [python, -m, {{ .module }}, --config-file, /run/kipmesh/node.properties]
          ports:
            - {name: mesh, containerPort: {{ $root.Values.ports.mesh }}}
            {{- if and $isBroker $root.Values.kafka.enabled }}
            - {name: kafka, containerPort: {{ $root.Values.ports.kafka }}}
            {{- if $root.Values.kafka.external.enabled }}
            - {name: kafka-external, containerPort: {{ $root.Values.ports.kafkaExternal }}}
            {{- end }}
            {{- end }}
            - {name: http, containerPort: {{ $root.Values.ports.http }}}
          env:
            - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            - {name: POD_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
            - {name: KIPMESH_BOOTSTRAP, value: "{{ include "kipmesh.bootstrap" $root }}"}
            {{- with include "kipmesh.clientTlsVariable" $root }}{{ . | nindent 12 }}{{ end }}
          {{- include "kipmesh.probes" . | nindent 10 }}
          {{- if $isBroker }}
          lifecycle:
            preStop:
              exec:
                command:
                  - sh
                  - -c
                  - >-
                    exec python -m kipmesh.kube leave --namespace="$POD_NAMESPACE" --pod="$POD_NAME"
                    --stateful-set={{ $name }} --lease={{ include "kipmesh.fullname" $root }}-leaving
                    --first-id={{ .part.firstNodeId }} --bootstrap="$KIPMESH_BOOTSTRAP"
                    --timeout-s={{ $root.Values.shutdown.waitSeconds }}
                    {{- if $root.Values.tls.enabled }}
                    --config=security.protocol=SSL --config=ssl.certificate.dir={{ $root.Values.tls.mountPath }}
                    {{- end }}
          {{- end }}
          resources:
            {{- toYaml .part.resources | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /var/lib/kipmesh}
            - {name: run, mountPath: /run/kipmesh, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            {{- if $isBroker }}
            - {name: token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
            {{- end }}
            {{- if $root.Values.tls.enabled }}
            - {name: tls, mountPath: {{ $root.Values.tls.mountPath }}, readOnly: true}
            {{- end }}
            {{- if and $isBroker $root.Values.kafka.enabled $root.Values.kafka.sasl.enabled }}
            - {name: users, mountPath: /etc/kipmesh-users, readOnly: true}
            {{- end }}
      volumes:
        {{- include "kipmesh.volumes" . | nindent 8 }}
        {{- if not .part.persistence.enabled }}
        - name: data
          emptyDir:
            {{- toYaml .part.emptyDir | nindent 12 }}
        {{- end }}
  {{- if .part.persistence.enabled }}
  volumeClaimTemplates:
    - metadata:
        name: data
        labels:
          {{- include "kipmesh.selector" $root | nindent 10 }}
        {{- with .part.persistence.annotations }}
        annotations:
          {{- toYaml . | nindent 10 }}
        {{- end }}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .part.persistence.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .part.persistence.size }}
  {{- end }}
{{- end -}}

{{/* Configuration of each service, as data of the ConfigMap. */}}
{{- define "kipmesh.config" -}}
{{- $node := dict "cluster.id" (include "kipmesh.clusterId" .) "controller.quorum.voters" (include "kipmesh.voters" .) "listeners" (printf "MESH://0.0.0.0:%v" .Values.ports.mesh) "http.listener" (printf "0.0.0.0:%v" .Values.ports.http) -}}
{{- $mesh := printf "MESH://0.0.0.0:%v" .Values.ports.mesh -}}
{{- $listeners := list $mesh -}}
{{- $protocols := list (ternary "MESH:SSL" "MESH:PLAINTEXT" .Values.tls.enabled) -}}
{{- $broker := dict "log.dirs" "/var/lib/kipmesh/data" -}}
{{- if .Values.kafka.enabled -}}
{{- $protocol := printf "%s%s" (ternary "SASL_" "" .Values.kafka.sasl.enabled) (ternary "SSL" "PLAINTEXT" .Values.tls.enabled) -}}
{{- $listeners = append $listeners (printf "KAFKA://0.0.0.0:%v" .Values.ports.kafka) -}}
{{- $protocols = append $protocols (printf "KAFKA:%s" $protocol) -}}
{{- if .Values.kafka.external.enabled -}}
{{- $listeners = append $listeners (printf "KAFKA_EXTERNAL://0.0.0.0:%v" .Values.ports.kafkaExternal) -}}
{{- $protocols = append $protocols (printf "KAFKA_EXTERNAL:%s" $protocol) -}}
{{- end -}}
{{- if .Values.kafka.sasl.enabled -}}
{{- $_ := set $broker "sasl.users.file" "/etc/kipmesh-users/users" -}}
{{- $_ := set $broker "sasl.enabled.mechanisms" (join "," .Values.kafka.sasl.mechanisms) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.kafka.enabled .Values.tls.enabled -}}
{{- $_ := set $broker "ssl.client.auth" (default (ternary "none" "required" .Values.kafka.sasl.enabled) .Values.tls.clientAuth) -}}
{{- end -}}
{{- $_ := set $broker "listeners" (join "," $listeners) -}}
{{- $_ := set $broker "listener.security.protocol.map" (join "," $protocols) -}}
{{- $tls := dict -}}
{{- $clientTls := dict -}}
{{- if .Values.tls.enabled -}}
{{- $tls = dict "listener.security.protocol.map" "MESH:SSL" "ssl.certificate.dir" .Values.tls.mountPath "ssl.node.names" (include "kipmesh.nodeName" .) "http.listener" (printf "https://0.0.0.0:%v" .Values.ports.http) -}}
{{- $clientTls = dict "security.protocol" "SSL" "ssl.certificate.dir" .Values.tls.mountPath "http.listener" (printf "https://0.0.0.0:%v" .Values.ports.api) "http.ssl.client.auth" .Values.tls.consumersClientAuth -}}
{{- end -}}
{{- $consumer := dict "bootstrap.servers" (include "kipmesh.bootstrap" .) "http.listener" (printf "0.0.0.0:%v" .Values.ports.api) -}}
controller.properties: |
  {{- include "kipmesh.properties" (dict "parts" (list .Values.config .Values.controllers.config $node (dict "metadata.log.dir" "/var/lib/kipmesh/data") $tls)) | nindent 2 }}
leader.properties: |
  {{- include "kipmesh.properties" (dict "parts" (list .Values.config .Values.leaders.config $node $tls $broker)) | nindent 2 }}
follower.properties: |
  {{- include "kipmesh.properties" (dict "parts" (list .Values.config .Values.followers.config $node $tls $broker)) | nindent 2 }}
consumer.properties: |
  {{- include "kipmesh.properties" (dict "parts" (list .Values.consumers.config $consumer $clientTls)) | nindent 2 }}
{{- if .Values.tls.enabled }}
client.properties: |
  {{- include "kipmesh.properties" (dict "parts" (list (omit $clientTls "http.listener" "http.ssl.client.auth"))) | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kipmesh.tlsSecret" -}}
{{- default (printf "%s-tls" (include "kipmesh.fullname" .)) .Values.tls.secretName -}}
{{- end -}}

{{/* Secret of pods that are not nodes: consumers, helm test, chaos. */}}
{{- define "kipmesh.clientTlsSecret" -}}
{{- default (include "kipmesh.tlsSecret" .) .Values.tls.clientSecretName -}}
{{- end -}}

{{/* Name in a certificate that identifies a node. It has no DNS record. */}}
{{- define "kipmesh.nodeName" -}}
{{- include "kipmesh.domain" (dict "root" . "kind" "nodes") -}}
{{- end -}}

{{/* Host names that the nodes' certificate must contain. */}}
{{- define "kipmesh.nodeNames" -}}
{{- $names := list -}}
{{- range $kind := list "controllers" "leaders" "followers" -}}
{{- $names = append $names (printf "*.%s" (include "kipmesh.domain" (dict "root" $ "kind" $kind))) -}}
{{- end -}}
{{- join "," $names -}}
{{- end -}}

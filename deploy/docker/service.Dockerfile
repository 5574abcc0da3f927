# Image of one service: docker build -f deploy/docker/service.Dockerfile --build-arg SERVICE=leader .
# SERVICE is metadata_controller, leader, follower, consumer or single; docs/docker.md describes images and arguments.
#
# `make images` first downloads wheels to build/wheels, so that the build needs no network. Without wheels, pip
# downloads the packages in requirements.lock. All services share the layer with Python packages and differ only in
# their entry point.
ARG BASE_IMAGE=python:3.11-slim
ARG SERVICE=leader

FROM ${BASE_IMAGE} AS builder
ARG SOURCE_DATE_EPOCH=1767225600
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
RUN python -m venv --without-pip /opt/kipmesh
# requirements.lock always exists, so COPY succeeds even without wheels.
COPY requirements.lock build/wheels/service/*.whl /wheels/
RUN set -eu; if ls /wheels/*.whl >/dev/null 2>&1; then \
      python -m pip --python /opt/kipmesh/bin/python install --quiet --no-index --no-deps /wheels/*.whl; \
    fi
COPY pyproject.toml README.md LICENSE CHANGELOG.md build/wheels/kipmesh-*.whl /src/
COPY services /src/services
COPY pyspark_kipmesh /src/pyspark_kipmesh
COPY kipmesh /src/kipmesh
COPY kipmesh_chaos /src/kipmesh_chaos
COPY kipmesh_jobs /src/kipmesh_jobs
RUN set -eu; pip="python -m pip --python /opt/kipmesh/bin/python"; \
    if ls /src/kipmesh-*.whl >/dev/null 2>&1; then \
      $pip install --quiet --no-index --no-deps /src/kipmesh-*.whl; \
    else \
      $pip install --quiet --constraint /wheels/requirements.lock "/src[kubernetes,chaos]"; \
    fi; \
    $pip check
# Makes builds reproducible: all files have the time SOURCE_DATE_EPOCH, and bytecode is not checked against file times.
# Bytecode is compiled here because the root file system is read-only at run time.
COPY deploy/docker/*.properties /rootfs/etc/kipmesh/
RUN set -eu; \
    find /opt/kipmesh -name __pycache__ -type d -prune -exec rm -rf {} +; \
    /opt/kipmesh/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/kipmesh/lib; \
    mkdir -p /rootfs/opt; mv /opt/kipmesh /rootfs/opt/kipmesh; \
    { grep -v ^kipmesh: /etc/passwd; echo "kipmesh:x:10001:10001:kipmesh:/var/lib/kipmesh:/sbin/nologin"; } >/rootfs/etc/passwd; \
    { grep -v ^kipmesh: /etc/group; echo "kipmesh:x:10001:"; } >/rootfs/etc/group; \
    chmod -R go-w,a+rX /rootfs; \
    find /rootfs -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

FROM ${BASE_IMAGE} AS runtime
ARG SOURCE_DATE_EPOCH=1767225600
RUN install -d -o 10001 -g 10001 /var/lib/kipmesh && touch -d "@$SOURCE_DATE_EPOCH" /var/lib /var/lib/kipmesh
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kipmesh" \
      org.opencontainers.image.description="A Kafka-compatible replicated log made of small services" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=builder /rootfs /
ENV PATH=/opt/kipmesh/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8 GRPC_VERBOSITY=NONE
WORKDIR /var/lib/kipmesh
USER 10001:10001
VOLUME /var/lib/kipmesh
STOPSIGNAL SIGTERM

FROM runtime AS metadata_controller
LABEL kipmesh.service="metadata_controller"
EXPOSE 9093 9404
HEALTHCHECK --interval=3s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-m", "kipmesh.node.health", "9404"]
ENTRYPOINT ["python", "-m", "kipmesh_metadata_controller"]
CMD ["--config-file", "/etc/kipmesh/controller.properties"]

FROM runtime AS leader
LABEL kipmesh.service="leader"
EXPOSE 9092 9094 9095 9096 9404
HEALTHCHECK --interval=3s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-m", "kipmesh.node.health", "9404"]
ENTRYPOINT ["python", "-m", "kipmesh_leader"]
CMD ["--config-file", "/etc/kipmesh/broker.properties"]

FROM runtime AS follower
LABEL kipmesh.service="follower"
EXPOSE 9092 9094 9095 9096 9404
HEALTHCHECK --interval=3s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-m", "kipmesh.node.health", "9404"]
ENTRYPOINT ["python", "-m", "kipmesh_follower"]
CMD ["--config-file", "/etc/kipmesh/broker.properties"]

FROM runtime AS consumer
LABEL kipmesh.service="consumer"
EXPOSE 8080
HEALTHCHECK --interval=3s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-m", "kipmesh.node.health", "8080"]
ENTRYPOINT ["python", "-m", "kipmesh_consumer"]
CMD ["--config-file", "/etc/kipmesh/consumer.properties"]

# A cluster in one process, for tests: see kipmesh.testing.containers.
FROM runtime AS single
LABEL kipmesh.service="single"
EXPOSE 9200 9300
ENTRYPOINT ["python", "-m", "kipmesh.cluster.serve", "--dir", "/var/lib/kipmesh"]

FROM ${SERVICE}

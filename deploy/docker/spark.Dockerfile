# Image of the Spark jobs: docker build -f deploy/docker/spark.Dockerfile . ; `docker run kipmesh/spark:VERSION job
# flights --help`. Python packages come from build/wheels (`make image-spark`) or are downloaded by pip. The JRE is
# installed from Debian's repositories or the mirror that BASE_IMAGE configures. Without network access, use a
# BASE_IMAGE that contains a JRE 17 or newer.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS builder
ARG SOURCE_DATE_EPOCH=1767225600
ENV SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH} PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
RUN python -m venv --without-pip /opt/kipmesh
COPY requirements.lock build/wheels/spark/*.whl /wheels/
RUN set -eu; if ls /wheels/*.whl >/dev/null 2>&1; then \
      python -m pip --python /opt/kipmesh/bin/python install --quiet --no-index --no-deps /wheels/*.whl; \
    fi
COPY pyproject.toml README.md LICENSE CHANGELOG.md build/wheels/kipmesh-*.whl /src/
COPY services /src/services
COPY pyspark_kipmesh /src/pyspark_kipmesh
COPY kipmesh /src/kipmesh
COPY kipmesh_chaos /src/kipmesh_chaos
COPY kipmesh_jobs /src/kipmesh_jobs
COPY deploy/docker/client.properties /rootfs/etc/kipmesh/
RUN set -eu; pip="python -m pip --python /opt/kipmesh/bin/python"; \
    if ls /src/kipmesh-*.whl >/dev/null 2>&1; then \
      $pip install --quiet --no-index --no-deps /src/kipmesh-*.whl; \
    else \
      $pip install --quiet --constraint /wheels/requirements.lock "/src[demo]"; \
    fi; \
    $pip check; \
    find /opt/kipmesh -name tests -path '*/site-packages/*' -type d -prune -exec rm -rf {} +; \
    /opt/kipmesh/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/kipmesh/lib || true; \
    mkdir -p /rootfs/opt /data; mv /opt/kipmesh /rootfs/opt/kipmesh; \
    chmod -R go-w,a+rX /rootfs; find /rootfs /data -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +

FROM ${BASE_IMAGE}
RUN set -eu; if ! command -v java >/dev/null 2>&1; then \
      apt-get update -qq; \
      DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends openjdk-17-jre-headless procps \
        || DEBIAN_FRONTEND=noninteractive apt-get install -qqy --no-install-recommends default-jre-headless procps; \
      rm -rf /var/lib/apt/lists/*; \
    fi; \
    java -version; \
    grep -q ^kipmesh: /etc/passwd || { \
      echo "kipmesh:x:10001:10001:kipmesh:/var/lib/kipmesh:/sbin/nologin" >>/etc/passwd; echo "kipmesh:x:10001:" >>/etc/group; }
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kipmesh spark" \
      org.opencontainers.image.description="Spark jobs for kipmesh clusters" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      kipmesh.service="spark"
COPY --from=builder /rootfs /
COPY --from=builder --chown=10001:10001 /data /var/lib/kipmesh
# Spark needs a home directory, and writes to the working directory and /tmp.
ENV PATH=/opt/kipmesh/bin:$PATH HOME=/var/lib/kipmesh PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 LANG=C.UTF-8 \
    GRPC_VERBOSITY=NONE SPARK_LOCAL_DIRS=/tmp PYSPARK_PYTHON=/opt/kipmesh/bin/python
WORKDIR /var/lib/kipmesh
USER 10001:10001
VOLUME /var/lib/kipmesh
STOPSIGNAL SIGTERM
ENTRYPOINT ["kipmesh"]
CMD ["job", "--help"]

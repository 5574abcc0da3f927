#!/bin/sh
# Build images: images.sh VENV SERVICE... ; a service is metadata_controller, leader, follower, consumer or spark.
# Environment: IMAGE_PREFIX (kipmesh/), IMAGE_TAG (the version), BASE_IMAGE (python:3.11-slim), and DOCKER (docker), a
# command with docker's options.
set -eu

venv=$1
shift
docker=${DOCKER:-docker}
prefix=${IMAGE_PREFIX:-kipmesh/}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
tag=${IMAGE_TAG:-$version}
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)}
export SOURCE_DATE_EPOCH

wheels=service
for service in "$@"; do
    [ "$service" != spark ] || wheels=spark
done
sh tools/image_wheels.sh "$venv" "$wheels"

for service in "$@"; do
    file=deploy/docker/service.Dockerfile
    [ "$service" != spark ] || file=deploy/docker/spark.Dockerfile
    "$docker" build --quiet --file "$file" --tag "$prefix$service:$tag" --build-arg "SERVICE=$service" \
        --build-arg "BASE_IMAGE=${BASE_IMAGE:-python:3.11-slim}" --build-arg "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" \
        --build-arg "VERSION=$version" --build-arg "REVISION=$revision" . >/dev/null
    echo "$prefix$service:$tag $("$docker" image inspect --format '{{.Id}}' "$prefix$service:$tag")"
done

#!/bin/sh
# Start or stop the cluster of docker-compose.yml: compose.sh up|down PROJECT [remove]. COMPOSE is the command (default:
# docker compose, or docker-compose), PROFILES are profiles to start, and TLS=1 adds docker-compose.tls.yml.
set -eu

what=$1
project=$2
remove=${3:-}
compose=${COMPOSE:-}
timeout_s=${TIMEOUT_S:-300}
if [ -z "$compose" ]; then
    if docker compose version >/dev/null 2>&1; then compose="docker compose"; else compose=docker-compose; fi
fi
command -v "${compose%% *}" >/dev/null 2>&1 || { echo "kipmesh: neither 'docker compose' nor docker-compose is installed" >&2; exit 1; }
IMAGE_TAG=${IMAGE_TAG:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
export KIPMESH_IMAGE_PREFIX="${IMAGE_PREFIX:-kipmesh/}" KIPMESH_IMAGE_TAG="$IMAGE_TAG"
certs=${KIPMESH_CERTS:-build/certs}
files="-f docker-compose.yml"
if [ "$what" = down ]; then
    [ -z "$(docker ps --all --quiet --filter "label=com.docker.compose.project=$project" \
        --filter label=com.docker.compose.service=certs)" ] || files="$files -f docker-compose.tls.yml"
elif [ -n "${TLS:-}" ]; then
    [ -e "$certs/controller-1/tls.key" ] || { echo "kipmesh: $certs has no certificates; run: make certs" >&2; exit 1; }
    files="$files -f docker-compose.tls.yml"
fi
profiles=
for profile in ${PROFILES:-}; do profiles="$profiles --profile $profile"; done

if [ "$what" = down ]; then
    # All profiles, whichever were started.
    # shellcheck disable=SC2086
    $compose $files -p "$project" --profile monitoring --profile spark --profile chaos down ${remove:+--volumes} --timeout 30
    exit
fi

begin=$(date +%s)
# shellcheck disable=SC2086
$compose $files -p "$project" $profiles up -d
# `up -d` of docker-compose 1.29 does not wait until all containers are healthy.
while :; do
    states=$(docker ps --all --filter "label=com.docker.compose.project=$project" \
        --format '{{.Label "com.docker.compose.service"}} {{.Status}}' |
        grep -E '^(controller|leader|follower|consumer)-' || true)
    waiting=$(echo "$states" | grep -v '(healthy)' || true)
    [ -n "$waiting" ] || break
    if [ $(($(date +%s) - begin)) -gt "$timeout_s" ]; then
        echo "kipmesh: containers are not healthy after $timeout_s s:" >&2
        echo "$waiting" >&2
        exit 1
    fi
    sleep 0.5
done
echo "$states"
echo "kipmesh: healthy after $(($(date +%s) - begin)) s; bootstrap brokers on this machine:" \
    "${KIPMESH_HOST:-127.0.0.1}:${KIPMESH_LEADER_1_PORT:-19092},${KIPMESH_HOST:-127.0.0.1}:${KIPMESH_FOLLOWER_1_PORT:-19093},${KIPMESH_HOST:-127.0.0.1}:${KIPMESH_FOLLOWER_2_PORT:-19094}"
[ -z "${TLS:-}" ] || echo "kipmesh: with TLS: kipmesh --command-config $certs/client.properties COMMAND --bootstrap ..."

#!/bin/sh
# Build the wheels for images: image_wheels.sh VENV service|spark. Versions come from requirements.lock.
# Writes build/wheels/kipmesh-*.whl, and its dependencies to build/wheels/service (and build/wheels/spark). Images have
# Linux and Python IMAGE_PYTHON (3.11). With another system or version, the build of an image downloads the wheels.
set -eu

venv=$1
set=$2
root=build/wheels
wanted=${IMAGE_PYTHON:-3.11}
have=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')

if [ "$(uname -s)" != Linux ] || [ "$have" != "$wanted" ]; then
    rm -rf "$root"
    echo "kipmesh: no wheels built ($(uname -s), Python $have; images have Linux, Python $wanted):" \
        "the build of the image downloads them"
    exit 0
fi

# Wheels have the time stamp of the sources, so that builds are reproducible.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 1767225600)}
export SOURCE_DATE_EPOCH PIP_DISABLE_PIP_VERSION_CHECK=1

# collect DIRECTORY REQUIREMENT: build the dependencies, without kipmesh's own wheel. Replaces the directory atomically.
collect() {
    target=$root/$1
    stamp=$target/made-from
    sum=$(cat pyproject.toml requirements.lock tools/image_wheels.sh | cksum)
    [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ] && return
    echo "kipmesh: collecting wheels in $target"
    rm -rf "$target" "$target.new"
    "$venv/bin/python" -m pip wheel --quiet --no-build-isolation --constraint requirements.lock \
        --wheel-dir "$target.new" "$2"
    rm -f "$target.new"/kipmesh-*.whl
    printf '%s\n' "$sum" >"$target.new/made-from"
    mv "$target.new" "$target"
}

mkdir -p "$root"
collect service '.[kubernetes,chaos]'
[ "$set" != spark ] || collect spark '.[demo]'
rm -rf "$root"/kipmesh-*.whl
"$venv/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$root" .

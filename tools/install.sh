#!/bin/sh
# Create or update the virtual environment: install.sh VENV. PYTHON is the interpreter (default: python3).
# Versions come from requirements.lock, with the user's configuration of pip. Creates VENV/installed at the end.
set -eu

venv=$1
python=${PYTHON:-python3}
here=$(pwd)

fail() {
    echo "kipmesh: $*" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || fail "$python is not installed: install Python 3.11 or newer, or choose another: make PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "Python must be at least 3.11, $python is $("$python" -V 2>&1 | cut -d' ' -f2): make PYTHON=python3.11"

# Recreate a venv of another directory, of a missing or old Python, and an incomplete one.
if [ -e "$venv/made-in" ] && [ "$(cat "$venv/made-in")" != "$here" ]; then
    rm -rf "$venv"
fi
if ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "kipmesh: creating $venv with $("$python" -V 2>&1)"
    "$python" -m venv --clear "$venv" || fail \
        "$python cannot create a virtual environment; on Debian and Ubuntu run: apt-get install python3-venv"
    printf '%s\n' "$here" >"$venv/made-in"
fi
rm -f "$venv/installed"

export PIP_DISABLE_PIP_VERSION_CHECK=1
echo "kipmesh: installing requirements.lock into $venv (about a minute the first time)"
"$venv/bin/python" -m pip install --quiet --no-compile --requirement requirements.lock ||
    fail "pip could not install requirements.lock; see its output above"
# The lock includes the build requirements, so that nothing is downloaded again.
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable . ||
    fail "pip could not install kipmesh; see its output above"
# Compile on all cores now. Otherwise each process compiles at its start if it cannot write bytecode.
"$venv/bin/python" -m compileall -q -j 0 -x '/tests?/' "$venv"/lib/python*/site-packages kipmesh kipmesh_chaos kipmesh_jobs services >/dev/null || true
printf '%s\n' "$here" >"$venv/installed"

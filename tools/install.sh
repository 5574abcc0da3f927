#!/bin/sh
# Make or renew the virtual environment: install.sh VENV. PYTHON names the interpreter (python3 by default).
# Versions come from requirements.lock, through pip as the user has it configured. Ends with VENV/installed.
set -eu

venv=$1
python=${PYTHON:-python3}
here=$(pwd)

fail() {
    echo "kipmesh: $*" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || fail "no $python here: install Python 3.11 or newer, or name one: make PYTHON=..."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "Python 3.11 or newer is needed, $python is $("$python" -V 2>&1 | cut -d' ' -f2): make PYTHON=python3.11"

# A venv of another folder, of a Python that is gone or too old, or half made, is made anew.
if [ -e "$venv/made-in" ] && [ "$(cat "$venv/made-in")" != "$here" ]; then
    rm -rf "$venv"
fi
if ! "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "kipmesh: making $venv with $("$python" -V 2>&1)"
    "$python" -m venv --clear "$venv" || fail \
        "$python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
    printf '%s\n' "$here" >"$venv/made-in"
fi
rm -f "$venv/installed"

export PIP_DISABLE_PIP_VERSION_CHECK=1
echo "kipmesh: installing requirements.lock into $venv (about a minute the first time)"
"$venv/bin/python" -m pip install --quiet --no-compile --requirement requirements.lock ||
    fail "pip could not install requirements.lock; what it says is above"
# The build requirements are in the lock, so that nothing is fetched a second time.
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable . ||
    fail "pip could not install kipmesh itself; what it says is above"
# Compiled here, on all cores, and not at the start of every process where Python may write no bytecode.
"$venv/bin/python" -m compileall -q -j 0 -x '/tests?/' "$venv"/lib/python*/site-packages kipmesh kipmesh_chaos kipmesh_jobs services >/dev/null || true
printf '%s\n' "$here" >"$venv/installed"

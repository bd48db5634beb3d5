#!/bin/sh
# The checks that need a GPU, on a machine with one: the last line is a JSON object. PYTHON names the interpreter, which
# needs torch for CUDA and what setup.cfg asks for; nothing is fetched.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1
if ! "$python" -c 'import importlib.metadata as m; m.distribution("hyperparallel")' 2>/dev/null; then
    # Components are found by the entry points of an installed package.
    "$python" -m pip install --quiet --no-deps --no-build-isolation --editable . >&2
fi
exec "$python" -m tests.benchmarks gpu

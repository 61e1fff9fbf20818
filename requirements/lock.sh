#!/bin/sh
# Write requirements/gpu-trainer.txt and gpu-rollout.txt: every package of the role, pinned, for Python 3.12 and glibc 2.39 (Ubuntu 24.04).
# Usage: requirements/lock.sh [FOLDER]     (needs uv; FOLDER: where to write, requirements/ if not given)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-$here}
cd "$here/.."
lock() { # ROLE EXTRA...
    role=$1
    shift
    # fast-hadamard-transform: optional to Megatron-core, without a wheel, and its sources lack the kernels.
    uv pip compile --quiet --no-annotate --no-emit-package fast-hadamard-transform --python-version 3.12 --python-platform x86_64-manylinux_2_39 \
        --custom-compile-command "requirements/lock.sh" --output-file "$out/gpu-$role.txt" \
        $(printf -- '--extra %s ' "$@") pyproject.toml "requirements/gpu-$role.in"
}
lock trainer trainer
lock rollout rollout data math

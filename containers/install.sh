#!/bin/sh
# Install the pinned packages of a role into /opt/areal_lora, while an image is built.
# Usage, in the folder of the sources: sh containers/install.sh trainer|rollout
set -eu
role=$1
export DEBIAN_FRONTEND=noninteractive
apt-get update
# Compilers: Triton, and the libraries that build kernels for the GPU they find, need them at run time too.
apt-get install --yes --no-install-recommends build-essential python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))'
python3 -m venv /opt/areal_lora
pip() { /opt/areal_lora/bin/python -m pip install --no-cache-dir --no-deps "$@"; }
# The pins are complete, so nothing is resolved. What has no wheel is built against the torch among them.
grep -v '^transformer-engine-torch==' "requirements/gpu-$role.txt" >/tmp/wheels.txt
pip -r /tmp/wheels.txt
if grep '^transformer-engine-torch==' "requirements/gpu-$role.txt" >/tmp/built.txt; then
    pip --no-build-isolation -r /tmp/built.txt
fi
rm /tmp/wheels.txt /tmp/built.txt

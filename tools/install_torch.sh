#!/bin/sh
# Installs torch: sh tools/install_torch.sh PYTHON CONSTRAINTS [arguments of pip install]
#
# With arguments pip installs them, for instance "torch" (the build of the package index, for CUDA on Linux) or
# "torch==2.12.0 --index-url ADDRESS". Without:
#   an NVIDIA driver, or a system other than Linux: torch from the package index
#   Linux without an NVIDIA driver: the CPU build, from pip's own sources, else by uv, which has PyTorch's index of CPU
#     builds; if neither has it, torch from the package index, after a line with the download size
set -eu
python=$1 constraints=$2
shift 2
: "${DRIVER_FILES:=/proc/driver/nvidia/version /dev/nvidia0 /dev/dxg}"
version=$(sed -n 's/^torch==//p' "$constraints")

pip() { "$python" -m pip --disable-pip-version-check "$@"; }
driver() {
  for file in $DRIVER_FILES; do [ ! -e "$file" ] || return 0; done
  nvidia-smi -L >/dev/null 2>&1
}

with_uv() {
  pip install -qq uv 2>/dev/null || return 1
  "$python" -m uv pip install -q --python "$python" --no-deps --torch-backend=cpu "torch==$version"
}

if [ $# != 0 ]; then
  pip install -q "$@"
  exit
fi
installed=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
[ "${installed%%+*}" != "$version" ] || exit 0  # any build of this version: it was chosen before
if [ "$(uname -s)" != Linux ]; then
  pip install -q -c "$constraints" torch
elif driver; then
  echo "torch $version: an NVIDIA driver is here, so the build for CUDA (a download of some 3 GB)"
  pip install -q -c "$constraints" torch
else
  echo "torch $version: no NVIDIA driver is here, so the CPU build (a download of some 200 MB)"
  # the install of moe-engine installs the dependencies, from the usual index
  pip install -qq --no-deps --retries 1 --timeout 30 "torch==$version+cpu" 2>/dev/null || with_uv || {
    echo "torch $version: neither pip's own sources nor uv have a CPU build. Next is the build of the usual index, on Linux"
    echo "the one for CUDA, a download of some 3 GB. To avoid it, stop here and run make again with PIP_FIND_LINKS=FOLDER"
    echo "that holds a CPU wheel, or with PIP_EXTRA_INDEX_URL=ADDRESS of PyTorch's index of CPU builds."
    pip install -q -c "$constraints" torch
  }
fi

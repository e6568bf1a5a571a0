#!/bin/sh
# Installs torch: sh tools/install_torch.sh PYTHON CONSTRAINTS [arguments of pip install]
#
# With arguments those are installed, for instance "torch" (what the package index has, on Linux the build for CUDA) or
# "torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126". Without:
#   an NVIDIA driver, or a system other than Linux: torch from the package index
#   Linux without an NVIDIA driver: the CPU build, from pip's find-links or from PyTorch's own index; where neither has
#     it, torch from the package index, after a line that says how much that is
set -eu
python=$1 constraints=$2
shift 2
: "${DRIVER_FILES:=/proc/driver/nvidia/version /dev/nvidia0 /dev/dxg}"
: "${TORCH_CPU_INDEX:=https://download.pytorch.org/whl/cpu}"
version=$(sed -n 's/^torch==//p' "$constraints")

pip() { "$python" -m pip --disable-pip-version-check "$@"; }
driver() {
  for file in $DRIVER_FILES; do [ ! -e "$file" ] || return 0; done
  nvidia-smi -L >/dev/null 2>&1
}

if [ $# != 0 ]; then
  pip install -q "$@"
  exit
fi
installed=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true)
[ "${installed%%+*}" != "$version" ] || exit 0  # of whatever build: it was chosen before
if [ "$(uname -s)" != Linux ]; then
  pip install -q -c "$constraints" torch
elif driver; then
  echo "torch $version: an NVIDIA driver is here, so the build for CUDA (a download of some 3 GB)"
  pip install -q -c "$constraints" torch
else
  echo "torch $version: no NVIDIA driver is here, so the CPU build (a download of some 200 MB)"
  # its dependencies are left to the install of moe-engine, from the usual index
  pip install -qq --no-deps --retries 1 --timeout 30 --index-url "$TORCH_CPU_INDEX" "torch==$version+cpu" || {
    echo "torch $version: no CPU build was found at $TORCH_CPU_INDEX or in pip's find-links. Next is the build of the"
    echo "usual index; PyPI's is for CUDA, a download of some 3 GB. To avoid it, stop here and run make again with"
    echo "TORCH_CPU_INDEX=ADDRESS of a mirror of that index, or with PIP_FIND_LINKS=FOLDER that holds a CPU wheel."
    pip install -q -c "$constraints" torch
  }
fi

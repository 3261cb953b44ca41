#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Tries every way to install torch_sm3, each in a fresh environment: editable, `cmake --install` and wheel; from each it
# imports, calls an operator, prints the report and builds, runs and checks the C++ consumer. Works on a copy of the tree.
#
#   TORCH=torch==2.14.1   what to install; or
#   TORCH_SITE=FOLDER     an existing site-packages whose torch and tools are linked into the environments: quicker
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$root/build/test-install
PYTHON=${PYTHON:-python3}
export MAX_JOBS=${MAX_JOBS:-2}

fail() { echo "install.sh: $*" >&2; exit 1; }
say() { echo "== $*"; }

# fresh NAME: an environment with torch and the build tools, which is made the active one.
fresh() {
  local venv=$work/$1
  say "environment $1"
  "$PYTHON" -m venv "$venv"
  if [[ -n ${TORCH_SITE:-} ]]; then
    local site
    site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$site"/setuptools* "$site"/_distutils_hack
    for entry in "$TORCH_SITE"/*; do
      case $(basename "$entry") in
        pip | pip-* | __editable__* | torch_sm3* | *.pth | __pycache__) ;;
        *) ln -s "$entry" "$site" ;;
      esac
    done
    export PATH=$venv/bin:$(cd "$TORCH_SITE/../../../bin" && pwd):$start_path
  else
    "$venv/bin/python" -m pip install -q "${TORCH:-torch==2.14.1}" "setuptools>=77" "cmake>=3.30" "ninja>=1.11"
    export PATH=$venv/bin:$start_path
  fi
}

# python_works EXPECTED: import, operator and report, from a folder that holds no sources.
python_works() {
  cd "$work/elsewhere"
  local file
  file=$(python -c 'import torch_sm3; print(torch_sm3.__file__)')
  [[ $file == "$1"/* ]] || fail "expected torch_sm3 below $1, but got $file"
  python - <<'END'
import torch, torch_sm3
w = torch.nn.Parameter(torch.ones(2, 2))
w.grad = torch.full((2, 2), 3.0)
torch_sm3.SM3([w], lr=0.5).step()
assert torch.equal(w.detach(), torch.full((2, 2), 0.5)), w
END
  python -m torch_sm3.info | grep -E ' (library|commit|cuda|no_cuda_because) '
  cd "$root"
}

# consumer_works NAME PREFIX: the C++ project outside the tree, against one installed package.
consumer_works() {
  say "C++ consumer of $1"
  local folder=$work/consumer-$1
  cmake -G Ninja -S tests/consumer -B "$folder" \
    -DCMAKE_PREFIX_PATH="$2;$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')" >/dev/null
  cmake --build "$folder" -j "$MAX_JOBS" | tail -1
  # A pipeline of two processes, where the headers of Gloo are.
  cmake -G Ninja -S examples/cpp -B "$folder-examples" \
    -DCMAKE_PREFIX_PATH="$2;$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')" >/dev/null
  cmake --build "$folder-examples" -j "$MAX_JOBS" | tail -1
  [[ ! -x $folder-examples/pipeline ]] || env -u LD_LIBRARY_PATH "$folder-examples/pipeline"
  readelf -d "$folder/operators" | grep -q 'NEEDED.*libtorch_sm3' || fail "the linker dropped libtorch_sm3.so"
  env -u LD_LIBRARY_PATH "$folder/operators"
  (
    cd "$folder"
    python "$root/tests/consumer/model.py" make model.pt
    env -u LD_LIBRARY_PATH ./consumer model.pt 5 trained.pt >losses
    python "$root/tests/consumer/model.py" compare model.pt 5 trained.pt <losses
    for depth in 2 16; do
      python "$root/tests/consumer/model.py" make --exact grid --depth $depth grid$depth.pt
    done
    env -u LD_LIBRARY_PATH ./memory grid2.pt grid16.pt
    env -u LD_LIBRARY_PATH ./consumer grid16.pt 5 trained.pt >losses
    python "$root/tests/consumer/model.py" compare grid16.pt 5 trained.pt <losses
    env -u LD_LIBRARY_PATH ./modules
    env -u LD_LIBRARY_PATH ./adasum
    python "$root/tests/consumer/model.py" make-trainer trainer.pt
    env -u LD_LIBRARY_PATH ./consumer trainer.pt 5 trained.pt >losses
    python "$root/tests/consumer/model.py" compare trainer.pt 5 trained.pt <losses
  )
}

# What must and must not be in a wheel; no folder of this machine in the library's run path.
wheel_is_right() {
  local names
  names=$(python -c 'import sys, zipfile; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep="\n")' "$1")
  echo "$(wc -l <<<"$names") files, $(stat -c %s "$1") bytes"
  for name in torch_sm3/__init__.py torch_sm3/py.typed torch_sm3/lib/libtorch_sm3.so torch_sm3/include/torch_sm3/torch_sm3.h \
    torch_sm3/share/cmake/torch_sm3/torch_sm3Config.cmake; do
    grep -qx "$name" <<<"$names" || fail "expected $name in the wheel"
  done
  ! grep -E '(^|/)(tests|csrc|examples|benchmarks|build|__pycache__)/|\.(cpp|cu|cuh|in)$' <<<"$names" || fail "files in the wheel that do not belong there"
  python -m zipfile -e "$1" "$work/unpacked"
  ! readelf -d "$work/unpacked/torch_sm3/lib/libtorch_sm3.so" | grep -E 'R(UN)?PATH' | grep -E '\[/|:/' || fail "a folder of this machine in the run path"
}

start_path=$PATH
rm -rf "$work"
mkdir -p "$work/src" "$work/elsewhere"
git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -xf - -C "$work/src"
unset PYTHONPATH

fresh editable
say "editable install"
start=$SECONDS
python -m pip install -q --no-build-isolation --no-deps -e "$work/src"
echo "$((SECONDS - start)) s"
python_works "$work/src"
consumer_works editable "$(cd "$work/elsewhere" && python -c 'import torch_sm3; print(torch_sm3.cmake_prefix_path)')"

say "cmake --install"
cmake --install "$(cd "$work/src" && python setup.py --build-dir)" --prefix "$work/prefix" >/dev/null
consumer_works prefix "$work/prefix"

say "wheel"
python -m pip wheel -q --no-build-isolation --no-deps -w "$work/dist" "$work/src"
wheel=$(ls "$work"/dist/torch_sm3-*.whl)
echo "$wheel"
wheel_is_right "$wheel"
fresh wheel
python -m pip install -q --no-deps "$wheel"
python_works "$work/wheel"
consumer_works wheel "$(cd "$work/elsewhere" && python -c 'import torch_sm3; print(torch_sm3.cmake_prefix_path)')"
say "editable install, cmake --install and wheel work"

#!/usr/bin/env bash
# Builds the compiled engine with AddressSanitizer and UndefinedBehaviorSanitizer in a temporary folder and runs
# its tests on that build, with the .venv of this checkout (made if there is none, as test.sh does). Takes many minutes.
#   Usage: [JOBS=2] bash tests/native_sanitize.sh [pytest arguments]
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/setup.sh" "dev,docs,flower"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# What builds the engine is not installed with it.
tools=nanobind
command -v cmake >/dev/null || tools="$tools cmake"
"$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" --target "$work/tools" $tools
export PATH="$PATH:$work/tools/bin"
PYTHONPATH="$work/tools" cmake -S "$root" -B "$work/build" -DFEDVEIL_SANITIZE=ON -DPython_EXECUTABLE="$python" > "$work/cmake.log" \
  || { cat "$work/cmake.log"; exit 1; }
cmake --build "$work/build" -j "${JOBS:-1}" > "$work/build.log" || { cat "$work/build.log"; exit 1; }
# A copy of the package with the checked build in it, before any installed one.
mkdir "$work/package"
cp -r "$root/src/fedveil" "$work/package/fedveil"
rm -f "$work/package/fedveil/"_native* "$work/package/fedveil/"_leak*
cp "$work/build/"_native*.so "$work/build/"_leak*.so "$work/package/fedveil/"
# An editable install would send every import of fedveil to the checkout, in this process and in those that it starts.
cat > "$work/package/sitecustomize.py" <<'PYTHON'
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
PYTHON
cat > "$work/package/conftest_sanitized.py" <<'PYTHON'
from fedveil.attacks.leakage import kernels
from fedveil.protect import noise
for module in (kernels._leak, noise._native):  # used by the package, and these very builds: tests are not skipped for want of them
    assert module is not None and "/package/fedveil/" in module.__file__
PYTHON
compiler=${CXX:-c++}
cd "$root"
# Leaks are those of the interpreter and torch; ours would be allocations in module.cpp, all owned by containers.
LD_PRELOAD="$($compiler -print-file-name=libasan.so) $($compiler -print-file-name=libubsan.so) $($compiler -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0:protect_shadow_gap=0:log_path="$work/found" \
  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1:log_path="$work/found" \
  PYTHONPATH="$work/package" OMP_NUM_THREADS=1 \
  "$python" -m pytest -p conftest_sanitized -p no:cacheprovider tests/training/test_native.py tests/training/test_native_graphs.py tests/training/test_products.py tests/training/torch/test_graph.py \
  tests/protect/test_noise.py tests/protect/test_exact.py tests/secure_sum/test_pieces.py tests/attacks/leakage/test_kernels.py "$@" \
  || { cat "$work"/found* 2>/dev/null; exit 1; }  # pytest keeps what a dying process says to itself
echo "AddressSanitizer and UndefinedBehaviorSanitizer: clean"

#!/usr/bin/env bash
# Cross-compiles the plain (NEON) path of the compiled engine for 64-bit ARM and runs native_check.cpp under an emulator
# and on this machine: equal noise bits, equal updates to 1e-3. Debian packages: g++-aarch64-linux-gnu qemu-user.
#   Usage: [ARM=aarch64-linux-gnu-g++] [RUN="qemu-aarch64 -L /usr/aarch64-linux-gnu"] bash tests/native_arm.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
native=$root/src/native
flags="-std=c++20 -O3 -fno-math-errno -fno-trapping-math -I$native"
build() {  # compiler, name
  for file in noise noise_base exact exact_base engine_base; do
    contract=$([ $file = engine_base ] || echo -ffp-contract=off)  # as in CMakeLists.txt
    $1 $flags $contract -c "$native/$file.cpp" -o "$work/$2-$file.o"
  done
  $1 $flags -ffp-contract=off "$root/tests/native_check.cpp" "$work/$2"-*.o -o "$work/$2"
}
build "${ARM:-aarch64-linux-gnu-g++} -Wall -Wextra -Wshadow" arm
build "${CXX:-c++}" host
${RUN:-qemu-aarch64 -L /usr/aarch64-linux-gnu} "$work/arm" > "$work/arm.txt" || { grep -a WRONG "$work/arm.txt"; exit 1; }
"$work/host" > "$work/host.txt" || { grep WRONG "$work/host.txt"; exit 1; }
paste -d '\n' "$work/arm.txt" "$work/host.txt" | awk '
  NR % 2 { n = split($0, a); next }
  { m = split($0, b); if (m != n) bad = 1
    for (i = 1; i <= n; i++) if (a[i] != b[i] && !(a[i] + 0 == a[i] && (a[i] - b[i]) ^ 2 < 1e-6)) { print a[i], b[i]; bad = 1 } }
  END { exit bad }'
cat "$work/arm.txt" | grep -v '^-\?[0-9]'
echo "ARM and this machine agree"

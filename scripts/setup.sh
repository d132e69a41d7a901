#!/usr/bin/env bash
# Creates .venv in the checkout (unless a virtual environment is active) and installs fedveil with the given
# extras. Does nothing when they are installed already. Sourced by demo.sh and test.sh.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
extras=${1:-}
venv=${VIRTUAL_ENV:-$root/.venv}
if [ ! -x "$venv/bin/python" ]; then
  base=${PYTHON:-python3}
  command -v "$base" >/dev/null || { echo "error: $base not found: install Python 3.10 or newer" >&2; exit 2; }
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "error: Python 3.10 or newer is needed (set PYTHON=…)" >&2; exit 2; }
  "$base" -m venv "$venv" || { echo "error: cannot create a virtual environment: on Debian, apt-get install python3-venv" >&2; exit 2; }
fi
python="$venv/bin/python"
stamp="$venv/.fedveil-$(printf '%s' "$extras" | tr ',' '-')"
want=$(cd "$root" && cat pyproject.toml constraints.txt CMakeLists.txt src/native/* 2>/dev/null | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  echo "Installing fedveil${extras:+ with $extras} (the first time takes a few minutes) …" >&2
  "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root${extras:+[$extras]}" >&2
  echo "$want" > "$stamp"
fi

#!/usr/bin/env bash
# Sets everything up and runs the tests (arguments go to pytest).
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh" "dev,docs,flower"
cd "$root"
"$python" -m ruff check .
"$python" -m mypy
export OMP_NUM_THREADS="${FEDVEIL_TEST_THREADS:-1}"
exec "$python" -m pytest -n "${FEDVEIL_TEST_WORKERS:-2}" "$@"

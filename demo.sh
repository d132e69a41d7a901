#!/usr/bin/env bash
# Sets everything up and shows the idea: no privacy, a paper's recipe and a sound one on the same digits, each attacked and audited.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh" ""
cd "$root" && exec "$python" -m fedveil demo "$@"

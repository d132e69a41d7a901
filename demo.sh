#!/usr/bin/env bash
# Sets everything up and runs the main job: Fed-αCDP and its sound sibling on embedded data.
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh" ""
cd "$root" && exec "$python" -m fedveil demo "$@"

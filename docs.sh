#!/usr/bin/env bash
# Builds the documentation into site/ (arguments go to mkdocs build). Open site/index.html, or: python -m http.server -d site
source "$(dirname "${BASH_SOURCE[0]}")/scripts/setup.sh" "docs"
cd "$root"
"$python" scripts/reference.py
export NO_MKDOCS_2_WARNING=1
exec "$python" -m mkdocs build --strict "$@"

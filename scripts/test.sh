#!/usr/bin/env bash
# Everything that must hold before a change goes in: environment, lint, format, types, tests. From a fresh clone too.
#
#   bash scripts/test.sh                    all of it
#   bash scripts/test.sh tests/cli -x       arguments go to pytest
#   XGR_TEST_DATA=DIR bash scripts/test.sh  with the tests over the shared fixture data, skipped otherwise
#   XGR_TEST_WORKERS=8                      test processes (2)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

# One thread for each test process: the processes share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false

step environment prepare_environment dev
bin="$XGR_VENV/bin"
step "ruff check" "$bin/ruff" check .
step "ruff format" "$bin/ruff" format --check .
step mypy "$bin/mypy"
step pytest "$bin/python" -m pytest -n "${XGR_TEST_WORKERS:-2}" --durations=15 "$@"
echo "== all: $SECONDS s"

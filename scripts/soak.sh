#!/usr/bin/env bash
# The nightly job under fire: kill -9 at 25 random moments and SIGTERM at 10, each time run again to the end and
# compared with an uninterrupted run. Results go to benchmarks/results/soak.json; exit 1 if any differs.
#
#   bash scripts/soak.sh                     about 6 minutes on 2 cores
#   bash scripts/soak.sh --kills 3 --terms 1 --out /tmp/soak.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
prepare_environment dev
exec "$XGR_VENV/bin/python" scripts/soak.py "$@"

#!/usr/bin/env bash
# From nothing but Python 3.11 to 3.13 to recommendations for 943 people: environment, MovieLens 100K, the four commands.
#
#   bash scripts/quickstart.sh
#   XGR_ML100K_WHEEL=recbole-1.2.1-py3-none-any.whl bash scripts/quickstart.sh   data from this file, no download
#   XGR_QUICKSTART_DIR=/some/place      everything but the environment goes there (work/movielens)
#   PYTHON=python3.12, XGR_VENV=/place  see scripts/env.sh
#
# Run it again: it finds what is there and only measures and shows.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

place="${XGR_QUICKSTART_DIR:-work/movielens}"
wheel="${XGR_ML100K_WHEEL:-}"
# The reader's own settings must not change what this page promises.
for name in $(compgen -e XGR_ || true); do
    case "$name" in XGR_VENV) ;; *) unset "$name" ;; esac
done

# Show a command the way one would type it, then run it.
run() {
    printf '\n$'
    printf ' %q' "$@"
    printf '\n'
    "$XGR_VENV/bin/$1" "${@:2}"
}

step "environment ($XGR_VENV)" prepare_environment ""
started=$SECONDS
mkdir -p "$place"
# An empty configuration: an xgr.toml of the reader's stays out of it.
: >"$place/quickstart.toml"
settings=(--config "$place/quickstart.toml")

run python datasets/movielens/prepare.py --out "$place" ${wheel:+--wheel "$wheel"}
run xgr build-vocab "$place/catalog.parquet" --out "$place/vocab" --update "${settings[@]}"
run xgr convert datasets/movielens/checkpoint --vocab "$place/vocab" --out "$place/model" --prompt sids-only "${settings[@]}"
run xgr recommend --in "$place/users.parquet" --model "$place/model" --vocab "$place/vocab" --out "$place/recs" \
    --beam 50 --top-k 50 --max-history 50 --exclude-seen "${settings[@]}"
run xgr eval --recs "$place/recs" --truth "$place/users.parquet" --k 1,5,10,50 "${settings[@]}"
run python datasets/movielens/show.py --data "$place" --recs "$place/recs"

printf '\n%s s after the installation. Everything lies in %s; `xgr inspect` shows what each directory holds.\n' \
    "$((SECONDS - started))" "$place"

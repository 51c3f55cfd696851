#!/usr/bin/env bash
# From nothing but Python 3.11 to 3.13 to recommendations for 943 people: environment, MovieLens 100K, the four commands.
#
#   bash scripts/quickstart.sh
#   XGR_ML100K_WHEEL=recbole-1.2.1-py3-none-any.whl bash scripts/quickstart.sh   data from this file, no download
#   XGR_QUICKSTART_DIR=/some/place      everything but the environment goes there (work/movielens)
#   PYTHON=python3.12, XGR_VENV=/place  see scripts/env.sh
#
# Run it again: it finds what is there and only measures and shows. After a change of the code or of the demo model it
# makes vocabulary, model and recommendations anew.
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
    local word
    printf '\n$'
    for word in "$@"; do
        case "$word" in
        *[!A-Za-z0-9_.,/=:-]*) printf ' %q' "$word" ;;
        *) printf ' %s' "$word" ;;
        esac
    done
    printf '\n'
    "$XGR_VENV/bin/$1" "${@:2}"
}

step "environment ($XGR_VENV)" prepare_environment ""
started=$SECONDS
mkdir -p "$place"
# An empty configuration: an xgr.toml of the reader's stays out of it.
: >"$place/quickstart.toml"
export XGR_CONFIG="$place/quickstart.toml"

made_by="$("$XGR_VENV/bin/python" - <<'PY'
import hashlib, pathlib
files = [path for room in ("src", "datasets/movielens") for path in pathlib.Path(room).rglob("*") if path.is_file()]
ours = sorted(path for path in files if path.suffix in (".py", ".j2", ".json", ".csv", ".safetensors"))
print(hashlib.sha256(b"\0".join(str(path).encode() + path.read_bytes() for path in ours)).hexdigest())
PY
)"
if [ "$(cat "$place/made_by" 2>/dev/null)" != "$made_by" ]; then
    rm -rf "$place/vocab" "$place/model" "$place/recs"
    echo "$made_by" >"$place/made_by"
fi

run python datasets/movielens/prepare.py --out "$place" ${wheel:+--wheel "$wheel"}
run xgr build-vocab "$place/catalog.parquet" --out "$place/vocab"
run xgr convert datasets/movielens/checkpoint --vocab "$place/vocab" --out "$place/model" --prompt sids-only
# One thread: so small a model gains nothing from a second, and on a busy machine two would wait for each other.
run xgr recommend --in "$place/users.parquet" --model "$place/model" --vocab "$place/vocab" --out "$place/recs" \
    --beam 50 --top-k 50 --max-history 50 --exclude-seen --threads 1
run xgr eval --recs "$place/recs" --truth "$place/users.parquet" --k 1,5,10,50
run python datasets/movielens/show.py --data "$place" --recs "$place/recs"

printf '\n%s s after the installation. Everything lies in %s; `xgr inspect` shows what each directory holds.\n' \
    "$((SECONDS - started))" "$place"

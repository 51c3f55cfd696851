# Sourced by the other scripts: make .venv with the pinned packages, quickly when nothing has changed.
#
#   PYTHON=python3.12 bash scripts/test.sh     an interpreter other than the first of 3.11, 3.12, 3.13 that runs
#   XGR_VENV=/some/place                       another place than .venv

XGR_VENV="${XGR_VENV:-.venv}"

# Print the first interpreter that runs and is a version xgr supports. A shim without its Python does not run.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            echo "$candidate"
            return 0
        fi
    done
    echo "no Python 3.11, 3.12 or 3.13 found (tried: ${PYTHON:-python3.11 python3.12 python3.13 python3 python});" \
        "set PYTHON=/path/to/python" >&2
    return 1
}

# prepare_environment EXTRAS: .venv holds the package, editable, with these extras (dev, or none) and the pins of
# constraints.txt. Nothing is done if it does already: a stamp for each set of extras tells.
prepare_environment() {
    local extras="$1" python wanted stamp
    if [ -x "$XGR_VENV/bin/python" ] && "$XGR_VENV/bin/python" -c '' 2>/dev/null; then
        python="$XGR_VENV/bin/python"
    else
        python="$(find_python)"
        "$python" -m venv --clear "$XGR_VENV"
    fi
    wanted="$("$python" - <<'PY'
import hashlib, pathlib, sys
texts = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
print(hashlib.sha256(b"\0".join([*texts, str(pathlib.Path.cwd()).encode(), sys.version.encode()])).hexdigest())
PY
)"
    # An environment for development has all that a plain one has.
    for stamp in "$XGR_VENV/.xgr-installed-${extras:-plain}" "$XGR_VENV/.xgr-installed-dev"; do
        if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
            return 0
        fi
    done
    "$XGR_VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
        -e ".${extras:+[$extras]}"
    rm -f "$XGR_VENV"/.xgr-installed-*
    echo "$wanted" >"$XGR_VENV/.xgr-installed-${extras:-plain}"
}

# step NAME COMMAND...: run it, print its name and seconds.
step() {
    local name="$1" started=$SECONDS
    shift
    echo "== $name"
    "$@"
    echo "== $name: $((SECONDS - started)) s"
}

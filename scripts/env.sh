# Sourced by the other scripts: make .venv with the pinned packages, quickly when nothing has changed.
#
#   PYTHON=python3.12 bash scripts/test.sh     another interpreter than the first of 3.11, 3.12, 3.13 that runs
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

# prepare_environment EXTRAS: .venv holds the package, editable, with these extras and the pins of constraints.txt.
prepare_environment() {
    local extras="$1" stamp="$XGR_VENV/.xgr-installed" python wanted
    if [ -x "$XGR_VENV/bin/python" ] && "$XGR_VENV/bin/python" -c '' 2>/dev/null; then
        python="$XGR_VENV/bin/python"
    else
        python="$(find_python)"
        "$python" -m venv --clear "$XGR_VENV"
    fi
    wanted="$("$python" - "$extras" <<'PY'
import hashlib, pathlib, sys
texts = [pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
place = str(pathlib.Path.cwd()).encode()
print(hashlib.sha256(b"\0".join([*texts, place, sys.version.encode(), sys.argv[1].encode()])).hexdigest())
PY
)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        "$XGR_VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$extras]"
        echo "$wanted" >"$stamp"
    fi
}

# step NAME COMMAND...: run it, print its name and seconds.
step() {
    local name="$1" started=$SECONDS
    shift
    echo "== $name"
    "$@"
    echo "== $name: $((SECONDS - started)) s"
}

"""The shape of the house, checked: who imports whom, sizes of files and functions, what the repository may not name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

# Library -> where it may be imported, as the start of a module's name below xgr_engine (or xgr_cli).
LIBRARIES = {
    "typer": ["xgr_cli"],
    "rich": ["xgr_cli"],
    "tqdm": ["xgr_cli.progress"],
    "click": [],
    "polars": ["job.where"],
    "torch": [
        *("models", "search", "xattention", "xbeam", "kernels", "recommender"),
        *("xschedule", "checkpoint", "bench", "api"),
        *("job.run", "job.engine", "system", "xgr_cli.commands.doctor"),
    ],
    "triton": [
        "xattention.triton",
        "xattention.prefill.triton",
        "xattention.hopper",
        "xbeam.triton",
        "kernels.triton",
        "kernels.hopper",
        "bench.kernels",
        "xgr_cli.commands.doctor",
    ],
    "transformers": ["checkpoint.verify", "bench"],
}

FILE_LIMIT = 400
FUNCTION_LIMIT = 60
# A kernel is one program for the device: cutting it up hides which values live in registers together.
KERNEL_LIMIT = 125

# Built from pieces, so that this file does not hold what it looks for.
FORBIDDEN = [
    r"(?<![\w.])/" + r"work/(dev|main|shared|\.)",
    r"(?<![\w.])/" + "root/",
    "files" + r"\.pythonhosted",
    r"pypi\.org/" + "simple",
    "download" + r"\.pytorch\.org",
    "extra-" + "index-url",
    "find-" + "links",
]


def _import_table() -> dict[str, set[str]]:
    """Room -> what it may import, from the block fenced as "imports" in docs/architecture.md."""
    fenced = re.search(r"```imports\n(.*?)```", ARCHITECTURE.read_text("utf-8"), re.S)
    assert fenced, "docs/architecture.md has no block fenced as imports"
    lines = fenced.group(1).strip().splitlines()
    return {room.strip(): set(may.split()) for room, _, may in (line.partition(":") for line in lines)}


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """Module names without ``xgr_engine.``, and their syntax trees."""
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__").removeprefix("xgr_engine").lstrip(".")
        yield name, ast.parse(path.read_text("utf-8"), str(path))


def _imports(tree: ast.Module) -> Iterator[str]:
    """Every imported module, also inside functions; ``from a import b`` counts as ``a.b`` where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            for alias in node.names:
                longer = SRC.joinpath(*node.module.split("."), alias.name)
                is_module = longer.is_dir() or longer.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def _within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def test_rooms_import_only_what_the_table_allows() -> None:
    table = _import_table()
    common = table.pop("common")
    wrong = []
    for module, tree in _modules():
        room = module.split(".")[0]
        if not room:
            continue
        assert room in table or room in common, f"{room} is not in the table of rooms"
        allowed = table.get(room, set()) | {room, "errors"} | (common if room not in common else set())
        for imported in _imports(tree):
            if not imported.startswith("xgr_"):
                continue
            target = imported.removeprefix("xgr_engine").lstrip(".")
            if target and not any(_within(target, name) for name in allowed):
                wrong.append(f"{module} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_the_table_allows_nothing_that_nobody_imports() -> None:
    table = _import_table()
    table.pop("common")
    for module, tree in _modules():
        allowed = table.get(module.split(".")[0], set())
        for imported in _imports(tree):
            target = imported.removeprefix("xgr_engine").lstrip(".")
            allowed -= {name for name in allowed if _within(target, name)}
    assert not {room: unused for room, unused in table.items() if unused}


def test_every_room_is_described() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", ARCHITECTURE.read_text("utf-8"), re.M)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert described == {room for module, _ in _modules() if (room := module.split(".")[0])}


def test_table_of_rooms_has_no_circle() -> None:
    table = {room: {name.split(".")[0] for name in may} for room, may in _import_table().items()}
    # A room whose single modules lie lower (catalog.trie, models.spec) is checked at its own imports.
    done: set[str] = set()
    while remaining := set(table) - done:
        free = {room for room in remaining if table[room] & set(table) <= done | {room}}
        assert free, f"circle among {sorted(remaining)}"
        done |= free


def test_libraries_stay_in_their_rooms() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, tree in _modules()
        for imported in _imports(tree)
        if imported.split(".")[0] in LIBRARIES
        and not any(_within(module, room) for room in LIBRARIES[imported.split(".")[0]])
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("xgr_cli.main", ["torch", "polars", "pyarrow", "numpy"]),
        ("xgr_engine.job.run", ["polars", "transformers"]),
        ("xgr_engine.catalog.vocabulary", ["torch", "polars"]),
        ("xgr_engine.tokens.prompt", ["torch", "polars", "transformers"]),
    ],
)
def test_importing_a_room_does_not_load(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print(*(name for name in {absent!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def _own_code() -> list[Path]:
    return [
        path
        for folder in ("src", "scripts", "benchmarks", "datasets")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def test_files_fit_on_a_few_screens() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in _own_code()}
    long = [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in lengths.items() if lines > FILE_LIMIT]
    assert not long, "\n".join(long)


def test_functions_fit_on_a_screen() -> None:
    """Counted from the first statement: a command's signature is its list of options."""
    long = []
    for path in _own_code():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
                kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                if lines > (KERNEL_LIMIT if kernel else FUNCTION_LIMIT):
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_repository_names_no_place_outside_itself() -> None:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if not name or not path.is_file():
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {word.group()}" for pattern in FORBIDDEN for word in re.finditer(pattern, text)]
    assert not found, "\n".join(found)


def test_command_line_document_and_frozen_options_are_current() -> None:
    """docs/cli.md comes from the application; a new option is a deliberate act (gen_cli_docs.py --freeze)."""
    script = ROOT / "scripts" / "gen_cli_docs.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

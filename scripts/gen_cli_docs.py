"""Write docs/cli.md and the frozen list of options from the application itself.

python scripts/gen_cli_docs.py            write docs/cli.md
python scripts/gen_cli_docs.py --freeze   also accept new, changed or removed options (tests/cli/options.txt)
python scripts/gen_cli_docs.py --check    write nothing; exit 1 if either file is out of date
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from xgr_cli.main import COMMANDS, build_app
from xgr_cli.options import SHARED_OPTIONS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "cli.md"
FROZEN = ROOT / "tests" / "cli" / "options.txt"

INTRODUCTION = """# The command line

<!-- Written by scripts/gen_cli_docs.py from the application; do not edit. -->
"""

EVERY_COMMAND = "## Options of every command\n"

GENERAL = """## Settings, output, exit codes

A setting comes from the command line, else from its `XGR_*` variable, else from the configuration file (`--config
FILE.toml`, else `./xgr.toml`, else `[tool.xgr]` of `./pyproject.toml`), else it is the default. `--show-config` prints
each value with its origin. Of an option that is given twice the last value counts, unless its help says *repeatable*:
two conditions for `--where` are one text, joined by `and`. An empty variable counts as not set; a variable for a
repeatable option is split at spaces. Keys of the file are the names of options without the leading dashes:

```toml
vocab = "/data/vocab"        # shared by every command: the name of the variable, XGR_VOCAB, in lower case
model = "/data/model"

[recommend]                  # for one command; wins over a shared key
beam = 256
exclude-seen = true
```

Unknown keys, values of the wrong type and a file that cannot be read are errors (so is an `xgr.toml` that is a dangling
link). Relative paths are relative to the working directory. An empty path is an error (`--in "$USERS"` with a variable
that is not set); use `.` for the working directory.

A file that a command writes appears whole and replaces a file of the same name. A link is followed and stays a link.
Anything that is not a regular file (a directory, a device, a pipe, `/dev/stdout`), and the file that the command prints
to, are refused with exit code 2; for a result on stdout there is `--json`.

The result goes to stdout, as text or, with `--json`, as one JSON object with `schema_version`. Notes, warnings,
progress and errors go to stderr; `--log-format json` makes each of them one line of JSON. `XGR_DEBUG=1` or `-v` adds
tracebacks to errors. A result that cannot be written to stdout (closed, or a full disk) is an error with exit code 1; a
reader that goes away (`| head`) is not an error, and notes that cannot be written to stderr are lost.

Colours and bold are for terminals, and for `FORCE_COLOR=1`; `NO_COLOR=1` (any value that is not empty) turns both off
and overrides `FORCE_COLOR`, and `--color` overrides both variables. Text is UTF-8 whatever the locale: if the locale
has another encoding (`LC_ALL=C`), `xgr` restarts itself in Python's UTF-8 mode, so that file names, ids and partitions
beyond ASCII work; characters that a stream cannot represent (`PYTHONIOENCODING=ascii`) are escaped.

| exit code | meaning |
| --- | --- |
| 0 | done, or nothing to do |
| 1 | failed |
| 2 | bad usage, configuration or input |
| 3 | finished, with more rejects than `--max-rejects` |
| 75 | another run holds the output |
| 130, 143 | stopped by a signal |
"""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true")
    arguments.add_argument("--freeze", action="store_true")
    wish = arguments.parse_args()
    group: Any = typer.main.get_command(build_app())
    texts = {DOCUMENT: document(group), FROZEN: frozen(group)}
    if wish.check:
        stale = [path for path, text in texts.items() if not path.is_file() or path.read_text("utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python scripts/gen_cli_docs.py --freeze")
        return 1 if stale else 0
    for path in (DOCUMENT, FROZEN) if wish.freeze else (DOCUMENT,):
        path.write_text(texts[path], encoding="utf-8")
    return 0


def document(group: Any) -> str:
    """docs/cli.md: one section per command, its options by panel."""
    contents = "\n".join(
        f"- [`xgr {name}`](#xgr-{name}): {_summary(command)}" for name, command in group.commands.items()
    )
    sections = [_section(command) for command in group.commands.values()]
    name, last = list(group.commands.items())[-1]
    shared = _tables([param for param in last.params if param.name in SHARED_OPTIONS], _types(name))
    return "\n".join([INTRODUCTION, contents, "", *sections, EVERY_COMMAND, *shared, GENERAL])


def frozen(group: Any) -> str:
    """One line per option: the surface that users' scripts and configuration files rely on."""
    lines = set()
    for name, command in group.commands.items():
        types = _types(name)
        for param in command.params:
            owner = "*" if param.name in SHARED_OPTIONS else name
            entries = (owner, _names(param), _type(param, types), param.envvar or "-", _default(param) or "-")
            lines.add("  ".join(entries))
    return "\n".join(sorted(lines)) + "\n"


def _section(command: Any) -> str:
    summary, _, rest = _plain(command.help).partition("\n\n")
    examples, _, more = rest.removeprefix("Examples\n\n").partition("\n\n")
    commands = "\n".join(line.strip().removeprefix("$ ") for line in examples.splitlines())
    parts = [f"## xgr {command.name}\n", f"{summary}\n", f"```bash\n{commands}\n```\n"]
    parts += [textwrap.fill(text, 120, break_on_hyphens=False) + "\n" for text in more.split("\n\n") if text]
    own = [param for param in command.params if param.name not in SHARED_OPTIONS]
    return "\n".join([*parts, *_tables(own, _types(command.name))])


def _tables(params: list[Any], types: dict[str, Any]) -> list[str]:
    """A table for each panel."""
    panels: dict[str, list[Any]] = {}
    for param in params:
        panels.setdefault(param.rich_help_panel or "Arguments", []).append(param)
    lines = []
    for panel, members in panels.items():
        lines.append(f"| {panel} | | default | variable |\n| --- | --- | --- | --- |")
        lines.extend(_row(param, types) for param in members)
        lines.append("")
    return lines


def _row(param: Any, types: dict[str, Any]) -> str:
    kind = _type(param, types)
    name = _names(param) if kind == "flag" or param.param_type_name == "argument" else f"{_names(param)} {kind}"
    default, variable = _default(param), param.envvar
    cells = [
        f"`{name}`".replace("|", r"\|"),
        _plain(param.help).replace("|", r"\|"),
        f"`{default}`" if default else "",
        f"`{variable}`" if variable else "",
    ]
    return "| " + " | ".join(cells) + " |"


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar)
    return "/".join([", ".join(sorted(param.opts, key=len)), *param.secondary_opts])


def _type(param: Any, types: dict[str, Any]) -> str:
    """A metavar, the choices, or the type's name."""
    if getattr(param, "is_flag", False):
        return "flag"
    return str(param.metavar or _type_name(types[param.name]))


def _types(name: str) -> dict[str, Any]:
    """Parameter name -> declared type. From the function: how the parser names types changes with its version."""
    entry = COMMANDS[name]
    function = getattr(importlib.import_module(f"xgr_cli.commands.{entry.module}"), entry.function)
    shared = {key: annotation for key, (annotation, _) in SHARED_OPTIONS.items()}
    hints = {**get_type_hints(function, include_extras=True), **shared}
    return {key: get_args(hint)[0] for key, hint in hints.items() if hasattr(hint, "__metadata__")}


def _type_name(kind: Any) -> str:
    choices = [entry for entry in get_args(kind) if entry is not type(None)]
    if get_origin(kind) is Literal:
        return "|".join(str(choice) for choice in choices)
    if get_origin(kind) is list:
        return f"{_type_name(choices[0])}..."
    if len(choices) == 1:
        return _type_name(choices[0])
    return {Path: "path", str: "text", float: "number"}.get(kind) or str(kind.__name__)


def _default(param: Any) -> str:
    if isinstance(getattr(param, "show_default", None), str):
        return str(param.show_default)
    value = param.default
    if value is None or value == [] or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(str(entry) for entry in value) if isinstance(value, list | tuple) else str(value)


def _summary(command: Any) -> str:
    return _plain(command.help).partition("\n\n")[0]


def _plain(text: str) -> str:
    """Help text without rich markup."""
    return re.sub(r"(?<!\\)\[/?bold\]", "", text or "").replace(r"\[", "[")


if __name__ == "__main__":
    sys.exit(main())

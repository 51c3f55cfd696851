"""Where a setting comes from: command line, then ``XGR_*`` environment, then configuration file, then default.

The file is ``--config F.toml``, else ``./xgr.toml``, else ``[tool.xgr]`` of ``./pyproject.toml``::

    vocab = "./vocab"            # shared: every command that has this setting
    [recommend]                  # this command alone; wins over a shared key
    beam = 256
    exclude-seen = true

Keys are the names of options without the dashes in front. A shared key is the option's variable in lower case
(``XGR_VOCAB``: ``vocab``), so that ``vocab`` serves ``build-vocab --out`` and ``recommend --vocab``. A key that no
command knows is an error; one that means nothing to the run at hand is ignored, as in the environment, though it would
be an error on the command line. Relative paths are relative to the working directory, as on the command line.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from xgr_engine.errors import UsageError

_TYPED, _DEFAULT = "command line", "default"
_ORIGINS = "xgr.config_origins"  # key of ctx.meta: parameter name -> "xgr.toml [recommend]"


@dataclass(frozen=True)
class Setting:
    """One merged setting: its key as in a configuration file, its value, and where the value came from."""

    key: str
    value: object
    origin: str

    @property
    def configured(self) -> bool:
        """Whether it comes from the environment or a file. Nobody typed it for this command, so where it means nothing
        it is ignored rather than refused."""
        return self.origin not in (_TYPED, _DEFAULT)


@dataclass(frozen=True)
class _Config:
    name: str
    table: Mapping[str, object]


def load_config(ctx: typer.Context, value: Path | None) -> Path | None:
    """Callback of ``--config``: read the file and make its values the defaults of this command's options."""
    if ctx.resilient_parsing:
        return value
    config = _find(value)
    if config is not None:
        ctx.default_map, ctx.meta[_ORIGINS] = _defaults(ctx, config)
    return value


def merged(ctx: typer.Context) -> list[Setting]:
    """Every setting of the running command with its origin, in the order of ``--help``."""
    settings = []
    for param in ctx.command.params:
        name = param.name or ""
        if name not in ctx.params or name in ("config", "show_config"):
            continue
        source = ctx.get_parameter_source(name)
        match source.name if source else "DEFAULT":
            case "COMMANDLINE":
                origin = _TYPED
            case "ENVIRONMENT":
                origin = f"environment {environment_variable(param)}"
            case "DEFAULT_MAP":
                origin = config_place(ctx, name)
            case _:
                origin = _DEFAULT
        settings.append(Setting(option_key(param), ctx.params[name], origin))
    return settings


def config_place(ctx: Any, name: str) -> str:
    """File and section that gave a parameter its value: ``xgr.toml [recommend]``."""
    return str(ctx.meta.get(_ORIGINS, {}).get(name, "configuration file"))


def option_key(param: Any) -> str:
    """``top-k`` for the option ``--top-k``; the metavar in lower case for an argument."""
    long_flag = next((flag for flag in param.opts if flag.startswith("--")), None)
    if long_flag:
        return str(long_flag).removeprefix("--")
    return str(param.metavar or param.name).strip(".[]").lower()


def environment_variable(param: Any) -> str | None:
    """The variable of an option (its ``XGR_*`` name), None for arguments."""
    variable = param.envvar
    return variable if isinstance(variable, str) or variable is None else str(variable[0])


def shared_key(param: Any) -> str:
    """Key outside the sections: the variable without ``XGR_``, so that commands share paths."""
    variable = environment_variable(param)
    return variable.removeprefix("XGR_").replace("_", "-").lower() if variable else option_key(param)


def near_miss(word: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: ``did you mean "beam"?``, or what there is."""
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f'did you mean "{close[0]}"?' if close else "known names: " + ", ".join(names)


def mistyped_variables(ctx: typer.Context) -> list[tuple[str, str]]:
    """Variables that are set but that no option has, each with the one that was probably meant (``XGR_BAEM``)."""
    known = {environment_variable(param) or "" for params in _commands(ctx).values() for param in params}
    suspects = []
    for name in sorted(os.environ):
        if name.startswith("XGR_") and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            suspects += [(name, meant) for meant in close]
    return suspects


def _find(explicit: Path | None) -> _Config | None:
    if explicit is not None:
        return _Config(str(explicit), _read(explicit))
    if os.path.lexists("xgr.toml"):  # a dangling link is an error: its settings would silently be missing
        return _Config("xgr.toml", _read(Path("xgr.toml")))
    project = Path("pyproject.toml")
    if project.is_file():
        # Not our file: if it is broken or has no table of ours, that is none of our business.
        try:
            table = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {}).get("xgr")
        except (OSError, ValueError, AttributeError):
            return None
        if isinstance(table, dict):
            return _Config("pyproject.toml [tool.xgr]", table)
    return None


def _read(path: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"configuration file {path} cannot be read",
            why=error.strerror or str(error),
            hint="fix it, or name another file with --config",
        ) from error
    except ValueError as error:
        raise UsageError(f"configuration file {path} is not valid TOML", why=str(error)) from error


def _defaults(ctx: typer.Context, config: _Config) -> tuple[dict[str, object], dict[str, str]]:
    """Defaults of the running command and their origins, after a check of the whole file."""
    commands = _commands(ctx)
    command = ctx.command.name or ctx.info_name or ""
    shared, sections = _split(config, commands)
    defaults: dict[str, object] = {}
    origins: dict[str, str] = {}
    for param in commands[command]:
        section = sections.get(command, {})
        for key, table, place in (
            (shared_key(param), shared, config.name),
            (shared_key(param), section, f"{config.name} [{command}]"),
            (option_key(param), section, f"{config.name} [{command}]"),
        ):
            if key in table:
                defaults[param.name] = _as_typed(param, table[key], f"{place}: {key}")
                origins[param.name] = place
    return defaults, origins


def _commands(ctx: typer.Context) -> dict[str, list[Any]]:
    """Parameters of every command that a configuration file may set."""
    group: Any = ctx.find_root().command
    found = {}
    for name in group.list_commands(ctx):
        params = group.get_command(ctx, name).params
        found[name] = [param for param in params if param.name not in ("config", "show_config", "help")]
    return found


def _split(
    config: _Config, commands: Mapping[str, list[Any]]
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Shared keys and sections, with dashes for underscores; unknown names are errors."""
    shared: dict[str, object] = {}
    sections: dict[str, dict[str, object]] = {}
    shared_names = {shared_key(param) for params in commands.values() for param in params}
    for raw, value in config.table.items():
        key = raw.replace("_", "-")
        if isinstance(value, dict):
            if key not in commands:
                raise UsageError(f"{config.name}: unknown section [{raw}]", hint=near_miss(key, commands))
            section = {name.replace("_", "-"): entry for name, entry in value.items()}
            names = {name for param in commands[key] for name in (option_key(param), shared_key(param))}
            for name in section:
                if name not in names:
                    raise UsageError(f'{config.name} [{raw}]: unknown key "{name}"', hint=near_miss(name, names))
            sections[key] = section
        elif key in shared_names:
            shared[key] = value
        else:
            raise UsageError(f'{config.name}: unknown key "{raw}"', hint=near_miss(key, shared_names | set(commands)))
    return shared, sections


def _as_typed(param: Any, value: object, where: str) -> object:
    """A TOML value as the command line would give it, so that both go through the same checks."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise UsageError(f"{where} = {value!r}: must be true or false")
        return value
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, list | dict) for v in value)):
        raise UsageError(f"{where}: must be a single value or a list of values")
    several = getattr(param, "multiple", False) or param.nargs == -1
    if isinstance(value, list):
        texts = [_text(entry) for entry in value]
        return texts if several else ",".join(texts)
    return [_text(value)] if several else _text(value)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

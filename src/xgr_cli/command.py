"""From a plain function to a command: shared options, ``--show-config``, one place for errors and exit codes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from xgr_cli import errors
from xgr_cli.logs import engine_logs_to
from xgr_cli.options import SHARED_OPTIONS
from xgr_cli.output import Output
from xgr_cli.settings import Setting, merged, mistyped_variables, option_key, shared_key
from xgr_cli.signals import obeyed
from xgr_engine.errors import UsageError

# Options that name paths without having the type ``Path``, because they may be a pattern, a URI, a preset or a word.
_PATHS_AS_TEXT = {"--in", "--out", "--recs", "--truth", "--vocab", "--prompt", "CATALOG", "ACTION"}
# Of these, what may lie in an object store.
_MAY_BE_URI = {"--in", "--out", "--truth"}

CommandFunction = Callable[..., int | None]


def as_command(function: CommandFunction) -> Callable[..., None]:
    """``function(output, **options)`` as typer wants it, with the shared options added.

    Options without a default are made optional for the parser and checked here, so that ``--show-config`` works
    before everything is given, and a missing one is reported with its variable and configuration key.
    """
    hints = get_type_hints(function, include_extras=True)
    own = list(inspect.signature(function).parameters.values())
    if not own or hints.get(own[0].name) is not Output:
        raise TypeError(f"{function.__name__}: the first parameter of a command is its Output")
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context]
    needed: set[str] = set()
    for parameter in own[1:]:
        default = parameter.default
        if default is inspect.Parameter.empty and _is_option(hints[parameter.name]):
            needed.add(parameter.name)
            default = None
        parameters.append(_keyword(parameter.name, hints[parameter.name], default))
    for name, (annotation, default) in SHARED_OPTIONS.items():
        parameters.append(_keyword(name, annotation, default))
    for parameter in parameters[1:]:
        _check_paths(parameter.annotation)

    def command(**values: Any) -> None:
        ctx: typer.Context = values.pop("ctx")
        shared = {name: values.pop(name) for name in SHARED_OPTIONS}
        settings = merged(ctx)
        output = Output(
            shared["json_mode"],
            shared["quiet"],
            shared["verbose"],
            color=shared["color"],
            log_format=shared["log_format"],
            settings=settings,
        )
        for name, meant in mistyped_variables(ctx):
            output.warn(f"{name} is not an xgr variable and is ignored: did you mean {meant}?")
        try:
            if shared["show_config"]:
                code = _show_settings(ctx, settings, output)
            else:
                _check_needed(ctx, needed, values)
                with engine_logs_to(output), obeyed():
                    code = function(output, **values) or errors.DONE
        except (typer.Exit, typer.Abort, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # polars panics and Ctrl-C are not Exceptions
            code = errors.report(error, output)
        if code:
            raise typer.Exit(code)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    return command


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _is_option(hint: Any) -> bool:
    return any(type(extra) is type(typer.Option()) for extra in getattr(hint, "__metadata__", ()))


def _check_paths(hint: Any) -> None:
    """Have the parser refuse a text that is no path where a path is wanted.

    An empty one would mean the working directory; a shell gives one for a variable that is not set (``--in "$USERS"``).
    ``s3://bucket/file`` would mean a file in a directory ``s3:``.
    """
    for extra in getattr(hint, "__metadata__", ()):
        names = [extra.default, *(extra.param_decls or ())]  # in an annotation typer keeps the first name as default
        flag = next((name for name in names if str(name).startswith("--")), str(extra.metavar))
        is_path = _mentions_path(hint.__origin__)
        if is_path or flag in _PATHS_AS_TEXT:
            extra.parser = partial(_as_path, flag, Path if is_path else str)


def _mentions_path(hint: Any) -> bool:
    """``Path``, ``Path | None``, ``list[Path] | None``."""
    return hint is Path or any(map(_mentions_path, get_args(hint)))


def _as_path(flag: str, kind: Callable[[Any], Any], text: str | Path) -> Any:
    """A path of the command line, or the default, which comes here too."""
    if text == "":
        raise UsageError(f"{flag} is empty", hint="give a path; '.' is the working directory")
    if "://" in str(text) and (kind is Path or flag not in _MAY_BE_URI):
        raise UsageError(f"{flag} {text}: must be a local path", hint="copy it from or to the object store separately")
    return kind(text)


def _check_needed(ctx: typer.Context, needed: set[str], values: dict[str, Any]) -> None:
    for param in ctx.command.params:
        if param.name in needed and values[param.name] in (None, [], ()):
            flag, variable = "--" + option_key(param), param.envvar
            raise UsageError(
                f"{ctx.command_path} needs {flag}",
                hint=f'give {flag}, set {variable}, or put "{shared_key(param)}" into xgr.toml '
                f"(see {ctx.command_path} --help)",
            )


def _show_settings(ctx: typer.Context, settings: list[Setting], output: Output) -> int:
    record = {
        "command": ctx.command.name,
        "settings": {setting.key: {"value": setting.value, "origin": setting.origin} for setting in settings},
    }
    rows = [(setting.key, setting.value, setting.origin) for setting in settings]
    output.result(record, lambda out: out.table(["setting", "value", "from"], rows))
    return errors.DONE

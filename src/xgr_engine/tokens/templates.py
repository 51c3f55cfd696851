"""Prompt templates: Jinja text with the settings of the prompt at its top. Presets and users' templates are such files.

Variables of a template:

``history``
    the items, oldest first, each ``item_prefix`` + its tokens + ``item_suffix``, joined by ``joiner``.
``items``
    the same as a list, for templates that number or loop; such prompts are tokenised as a whole, which takes longer.
``cut``
    the texts before and after it are tokenised separately (for BPE that is not the same as tokenising the whole).

Settings are texts assigned outside all blocks, such as ``{% set joiner = ", " %}``:

``joiner``, ``item_prefix``, ``item_suffix``
    ``", "``, and empty, by default.
``bos``
    ``tokenizer``, the default: the special tokens that the tokenizer itself puts in front. ``bos-token``: the BOS token
    that its configuration names, if any. ``none``.
``eos``
    ``none``, the default. ``eos-token``: the end token of the checkpoint comes last, as encoders expect.
``single_tokens``
    tokens, separated by blanks, each of which must be a single id of the tokenizer.

The line break after a ``{% %}`` or ``{# #}`` is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from xgr_engine.errors import UsageError

# Noncharacters of Unicode, which never occur in text that systems exchange.
CUT = "\ufdd0"
HISTORY = "\ufdd1"

PRESETS = ("lc-rec", "minionerec-eval", "openonerec", "sids-only", "tiger")
BOS_RULES = ("tokenizer", "bos-token", "none")
EOS_RULES = ("none", "eos-token")
VARIABLES = ("history", "items", "cut")

_DEFAULTS = {
    "joiner": ", ",
    "item_prefix": "",
    "item_suffix": "",
    "bos": "tokenizer",
    "eos": "none",
    "single_tokens": "",
}


@dataclass(frozen=True)
class PromptTemplate:
    """A parsed template.

    Attributes:
        name: for messages.
        joiner, item_prefix, item_suffix, bos, eos, single_tokens: the settings at its top.
        one_history: the text is fixed except for one ``history``.
        fixed_head: what every rendering begins with, up to the first ``cut``; empty if that depends on the history.
    """

    name: str
    joiner: str
    item_prefix: str
    item_suffix: str
    bos: str
    eos: str
    single_tokens: tuple[str, ...]
    one_history: bool
    fixed_head: str
    _compiled: jinja2.Template

    def join(self, items: Sequence[str]) -> str:
        """The text of ``history``, for items given as the text of their tokens."""
        return self.joiner.join(self.wrap(items))

    def wrap(self, items: Sequence[str]) -> list[str]:
        """Each item between ``item_prefix`` and ``item_suffix``."""
        return [f"{self.item_prefix}{item}{self.item_suffix}" for item in items]

    def parts(self, items: Sequence[str]) -> list[str]:
        """The texts to tokenise separately, in order."""
        return self._render(history=self.join(items), items=self.wrap(items)).split(CUT)

    def parts_around_history(self) -> list[list[str]]:
        """:meth:`parts`, each split where the history belongs; only if ``one_history``."""
        return [part.split(HISTORY) for part in self._render(history=HISTORY, items=[]).split(CUT)]

    def _render(self, **values: Any) -> str:
        try:
            return self._compiled.render(cut=CUT, **values)
        except Exception as error:  # whatever a template may do wrong: the sandbox, undefined names, filters
            raise UsageError(f"prompt template {self.name}: cannot be rendered", why=str(error)) from error


def read_template(choice: str) -> tuple[str, str]:
    """Name and text of a preset, or of the user's template file.

    Raises:
        UsageError: ``choice`` is neither a preset nor a readable file.
    """
    if choice in PRESETS:
        file = resources.files("xgr_engine.tokens") / "presets" / f"{choice}.j2"
        return choice, file.read_text(encoding="utf-8")
    path = Path(choice)
    if not path.is_file():
        raise UsageError(
            f"--prompt {choice}: neither a preset nor a file",
            why=f"presets are {', '.join(PRESETS)}",
            hint="for any other wording write a Jinja template file, see docs/checkpoints.md",
        )
    try:
        return path.name, path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompt {choice}: cannot read the file as UTF-8", why=str(error)) from error


def parse_template(name: str, text: str) -> PromptTemplate:
    """Check a template's text and find its settings.

    Raises:
        UsageError: a syntax error, an unknown variable or setting, or a template that never uses the history.
    """
    environment = _environment()
    try:
        tree = environment.parse(text)
        compiled = environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"prompt template {name}, line {error.lineno}: {error.message}") from error
    if CUT in text or HISTORY in text:
        raise UsageError(f"prompt template {name}: holds U+FDD0 or U+FDD1, which xgr uses as marks")
    used = meta.find_undeclared_variables(tree)
    if unknown := sorted(used - set(VARIABLES)):
        raise UsageError(
            f"prompt template {name}: unknown variable {', '.join(unknown)}", why=f"known: {', '.join(VARIABLES)}"
        )
    if not used & {"history", "items"}:
        raise UsageError(
            f"prompt template {name}: uses neither history nor items, so every user would get the same prompt"
        )
    settings = {**_DEFAULTS, **_settings(name, tree)}
    for key, rules in (("bos", BOS_RULES), ("eos", EOS_RULES)):
        if settings[key] not in rules:
            raise UsageError(f"prompt template {name}: {key} must be one of {', '.join(rules)}, not {settings[key]!r}")
    return PromptTemplate(
        name=name,
        joiner=settings["joiner"],
        item_prefix=settings["item_prefix"],
        item_suffix=settings["item_suffix"],
        bos=settings["bos"],
        eos=settings["eos"],
        single_tokens=tuple(settings["single_tokens"].split()),
        one_history=_has_one_plain_history(tree, used),
        fixed_head=_fixed_head(tree),
        _compiled=compiled,
    )


@functools.cache
def _environment() -> jinja2.Environment:
    # Sandboxed: a template file may come from anywhere and must not reach Python.
    return ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )


def _settings(name: str, tree: nodes.Template) -> dict[str, str]:
    """Texts assigned at the top level. What is assigned but not a setting must be used by the template."""
    loaded = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
    found = {}
    for node in tree.body:
        if not isinstance(node, nodes.Assign) or not isinstance(node.target, nodes.Name):
            continue
        target = node.target.name
        if target in _DEFAULTS:
            if not isinstance(node.node, nodes.Const) or not isinstance(node.node.value, str):
                raise UsageError(f"prompt template {name}, line {node.lineno}: {target} must be a text in quotes")
            found[target] = node.node.value
        elif target not in loaded:
            raise UsageError(
                f"prompt template {name}, line {node.lineno}: {target} is set but never used",
                why=f"settings are {', '.join(_DEFAULTS)}",
            )
    return found


def _has_one_plain_history(tree: nodes.Template, used: set[str]) -> bool:
    loads = [node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"]
    plain = [
        child.name
        for node in tree.body
        if isinstance(node, nodes.Output)
        for child in node.nodes
        if isinstance(child, nodes.Name)
    ]
    return "items" not in used and loads.count("history") == 1 and plain.count("history") == 1


def _fixed_head(tree: nodes.Template) -> str:
    head = ""
    for node in tree.body:
        if isinstance(node, nodes.Assign):
            continue
        if not isinstance(node, nodes.Output):
            return ""
        for child in node.nodes:
            if isinstance(child, nodes.Name) and child.name == "cut":
                return head
            if isinstance(child, nodes.TemplateData):
                head += child.data
            elif isinstance(child, nodes.Const):
                head += str(child.value)
            else:
                return ""
    return ""

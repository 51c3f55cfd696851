"""Prompt templates: the presets' wording, the settings, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from xgr_engine.errors import UsageError
from xgr_engine.tokens.templates import PRESETS, parse_template, read_template

ITEMS = ["<a_1><b_2>", "<a_3><b_4>"]

# As the sources have them; a preset that drifts from its source asks the model another question.
WORDING = {
    "minionerec-eval": [
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request. \n\n### Instruction:\n"
        "Can you predict the next possible item that the user may expect?\n\n",
        "### User Input: \nCan you predict the next possible item the user may expect, given the following "
        "chronological interaction history: <a_1><b_2>, <a_3><b_4>\n\n### Response:\n",
    ],
    "lc-rec": [
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nThe user has interacted with items <a_1><b_2>, <a_3><b_4> in chronological order. "
        "Can you predict the next possible item that the user may expect?\n\n### Response:"
    ],
    "sids-only": ["<a_1><b_2><a_3><b_4>"],
    "tiger": ["<a_1><b_2><a_3><b_4>"],  # and the end token, which is no text
    "openonerec": [
        "<|im_start|>system\n你是一个智能推荐助手，能够根据用户的浏览历史预测用户可能感兴趣的下一个内容。<|im_end|>\n"
        "<|im_start|>user\n根据以下用户浏览记录，请预测用户接下来可能观看的内容：\n"
        "<|sid_begin|><a_1><b_2><|sid_end|><|sid_begin|><a_3><b_4><|sid_end|>/no_think<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n<|sid_begin|>"
    ],
}


@pytest.mark.parametrize("preset", PRESETS)
def test_wording_of_presets(preset: str) -> None:
    template = parse_template(*read_template(preset))
    assert template.parts(ITEMS) == WORDING[preset]
    assert template.one_history


def test_every_preset_has_a_file_and_a_wording() -> None:
    files = {path.stem for path in Path(read_template.__code__.co_filename).with_name("presets").glob("*.j2")}
    assert files == set(PRESETS) == set(WORDING)


def test_unknown_preset_says_that_a_file_does_the_job() -> None:
    with pytest.raises(UsageError, match="neither a preset nor a file") as caught:
        read_template("lcrec")
    assert "lc-rec" in caught.value.why
    assert "template file" in caught.value.hint


def test_settings_of_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.j2"
    file.write_text(
        '{% set joiner = "\\n" %}\n{% set item_prefix = "[" %}\n{% set item_suffix = "]" %}\n{% set bos = "none" %}\n'
        '{% set single_tokens = "<x> <y>" %}\nSeen:\n{{ history }}\nNext:'
    )
    template = parse_template(*read_template(str(file)))
    assert template.name == "mine.j2"
    assert template.parts(ITEMS) == ["Seen:\n[<a_1><b_2>]\n[<a_3><b_4>]\nNext:"]
    assert (template.bos, template.eos, template.single_tokens) == ("none", "none", ("<x>", "<y>"))


def test_loops_and_conditions_over_items() -> None:
    text = "{% for item in items %}{{ loop.index }}. {{ item }} {% endfor %}{% if not items %}nothing{% endif %}"
    template = parse_template("t", text)
    assert not template.one_history
    assert template.parts(ITEMS) == ["1. <a_1><b_2> 2. <a_3><b_4> "]
    assert template.parts([]) == ["nothing"]


@pytest.mark.parametrize(
    ("text", "one_history", "fixed_head"),
    [
        ("x {{ history }} y", True, ""),
        ("x{{ cut }}{{ history }}", True, "x"),
        ("{{ history }}{{ history }}", False, ""),
        ("{{ history | upper }}", False, ""),
        ("{% if history %}{{ history }}{% endif %}", False, ""),
        ("{% set h = history %}{{ h }}", False, ""),
        ("{{ 'a' }}b{{ cut }}{% for item in items %}{{ item }}{% endfor %}", False, "ab"),
        ("{{ items | length }}{{ cut }}{{ history }}", False, ""),
    ],
)
def test_when_the_history_can_be_placed_by_id(text: str, one_history: bool, fixed_head: str) -> None:
    template = parse_template("t", text)
    assert template.one_history is one_history
    assert template.fixed_head == fixed_head


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ history", "line 1"),
        ("{{ history }} {{ user }}", "unknown variable user"),
        ("no history", "neither history nor items"),
        ('{{ history }}{% set joner = ", " %}', "joner is set but never used"),
        ("{{ history }}{% set joiner = 3 %}", "joiner must be a text"),
        ('{{ history }}{% set bos = "yes" %}', "bos must be one of"),
        ('{{ history }}{% set eos = "yes" %}', "eos must be one of none, eos-token"),
        ("{{ history }}\ufdd0", r"U\+FDD0"),
    ],
)
def test_broken_templates_are_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_template("t", text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ history }}{{ ''.__class__.__mro__ }}",
        "{{ history }}{{ history.__init__.__globals__ }}",
        "{{ history }}{{ items.append('x') }}",
        "{{ history }}{% include '/etc/hostname' %}",
        "{{ history }}{{ items[0].no_such }}",
    ],
)
def test_templates_cannot_reach_python_or_files(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be rendered"):
        parse_template("t", text).parts(ITEMS)

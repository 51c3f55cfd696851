"""Which prompt a checkpoint gets: a decoder continues a text, an encoder reads a history and an end token after it."""

from __future__ import annotations

import json

from xgr_engine.checkpoint.hf_config import HfConfig
from xgr_engine.checkpoint.options import ConvertOptions
from xgr_engine.errors import UsageError
from xgr_engine.models.spec import EncoderDecoderSpec
from xgr_engine.tokens.prompt import PromptRenderer, PromptSpec, make_prompt_spec, tokenizer_end_token
from xgr_engine.tokens.table import SidTokenTable
from xgr_engine.tokens.tokenizer_files import SourceTokenizer

# Prompts of checkpoints for which --prompt is not given.
DECODER_PROMPT = "sids-only"
ENCODER_PROMPT = "tiger"
_WORDS_OF_DECODERS = ("lc-rec", "minionerec-eval", "openonerec")


def choose_prompt(
    options: ConvertOptions, config: HfConfig, tokenizer: SourceTokenizer | None, table: SidTokenTable
) -> PromptSpec:
    """The prompt that ``options`` ask for, else the default of the architecture.

    Args:
        tokenizer: None where there is none, or it does not know the semantic-ID tokens.

    Raises:
        UsageError: a preset of the other architecture, an end token that the prompt does not use or the model does
            not have, or as :func:`make_prompt_spec`.
        CheckpointError: as :func:`make_prompt_spec`.
    """
    encodes = isinstance(config.spec, EncoderDecoderSpec)
    choice = options.prompt or (ENCODER_PROMPT if encodes else DECODER_PROMPT)
    if encodes and choice in _WORDS_OF_DECODERS:
        raise UsageError(
            f"--prompt {choice}: is worded for a decoder, but this model has an encoder",
            why="an encoder reads the history alone; the answer begins in the decoder",
            hint=f"give --prompt {ENCODER_PROMPT}, or a template file with the words that the model was trained with",
        )
    if not encodes and choice == ENCODER_PROMPT:
        raise UsageError(
            f"--prompt {choice}: is made for an encoder, but this model is a decoder",
            why="after the end token a decoder generates nothing more",
            hint=f"give --prompt {DECODER_PROMPT} for the history without words",
        )
    end_token = chosen_end_token(options, config, tokenizer)
    prompt = make_prompt_spec(choice, tokenizer, table, end_token)
    if options.end_token is not None and not prompt.eos_ids:
        raise UsageError(
            f"--end-token {options.end_token}: the prompt {prompt.name} does not end with an end token",
            hint="leave it out, or set eos in the template",
        )
    if prompt.eos_ids and not 0 <= prompt.eos_ids[0] < config.spec.vocab_size:
        raise UsageError(
            f"the end token {prompt.eos_ids[0]} is not a token of the model: it has 0 to {config.spec.vocab_size - 1}",
            hint="give the right one with --end-token ID",
        )
    return prompt


def missing_end(
    options: ConvertOptions, config: HfConfig, tokenizer: SourceTokenizer | None, renderer: PromptRenderer
) -> tuple[str, ...]:
    """A warning if an encoder's prompt does not end with the checkpoint's end token."""
    if not isinstance(config.spec, EncoderDecoderSpec):
        return ()
    ids = renderer.render([[]])[0].token_ids
    if len(ids) and ids[-1] == chosen_end_token(options, config, tokenizer):
        return ()
    return (
        f"the prompt {renderer.spec.name} does not end with the end token, which T5's tokenizer appends to every "
        f"text: right only if the model was trained that way (--prompt {ENCODER_PROMPT} has it)",
    )


def unreadable_words(
    tokenizer: SourceTokenizer | None, table: SidTokenTable, renderer: PromptRenderer
) -> tuple[str, ...]:
    """A warning if the tokenizer turns words of the prompt into its unknown token, so that the model cannot read them.

    Args:
        tokenizer: None where there is none, or it does not know the semantic-ID tokens.
    """
    if tokenizer is None or (unknown := _unknown_token(tokenizer)) is None:
        return ()
    sid = tuple(int(codes[0]) for codes in table.codes)
    ids = renderer.render([[sid, sid]])[0].token_ids  # two items, so that what joins them is looked at too
    if not (count := int((ids == unknown).sum())):
        return ()
    return (
        f"the tokenizer does not know all words of the prompt {renderer.spec.name}: of two items' {len(ids)} tokens "
        f"{count} are {tokenizer.tokenizer.id_to_token(unknown)}; right only if the model was trained that way",
    )


def _unknown_token(tokenizer: SourceTokenizer) -> int | None:
    """Id of the unknown token. Most kinds of tokenizer name its text, Unigram names its id, and some have none."""
    model = json.loads(tokenizer.tokenizer.to_str())["model"]
    number: int | None = model.get("unk_id")
    if model.get("unk_token") is not None:
        number = tokenizer.tokenizer.token_to_id(model["unk_token"])
    return number


def chosen_end_token(options: ConvertOptions, config: HfConfig, tokenizer: SourceTokenizer | None) -> int | None:
    """The end token that the user gave, else the tokenizer's, else that of config.json."""
    if options.end_token is not None:
        return options.end_token
    named = None if tokenizer is None else tokenizer_end_token(tokenizer)
    return config.eos_token_id if named is None else named

"""Convert a Hugging Face checkpoint to an xgr model directory: everything is checked before the first byte is written.

Peak memory is about one shard, whatever the size of the model.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from xgr_engine import __version__
from xgr_engine.catalog.swap import refuse_foreign, replacement
from xgr_engine.checkpoint.hf_config import HfConfig, parse_hf_config
from xgr_engine.checkpoint.hf_source import (
    CONFIG_FILE,
    Shards,
    WeightFiles,
    find_weights,
    hash_source,
    read_config,
)
from xgr_engine.checkpoint.model_dir import (
    KIND,
    METADATA_FILE,
    SCHEMA_VERSION,
    WEIGHTS_FILE,
    ModelDir,
    canonical_hash,
    fingerprint_of,
    load_model_dir,
    read_metadata,
)
from xgr_engine.checkpoint.options import ConvertOptions, ConvertReport
from xgr_engine.checkpoint.plan import make_plan
from xgr_engine.checkpoint.prompt_choice import choose_prompt, chosen_end_token, missing_end, unreadable_words
from xgr_engine.checkpoint.transfer import transfer_weights
from xgr_engine.checkpoint.verify import ParityReport, verify_parity
from xgr_engine.errors import CheckpointError, OutputExistsError
from xgr_engine.files import write_text
from xgr_engine.models.spec import AnySpec, EncoderDecoderSpec
from xgr_engine.progress import NoProgress, ProgressSink
from xgr_engine.tokens.contract import ScoreContract, make_score_contract
from xgr_engine.tokens.prompt import PromptRenderer, PromptSpec
from xgr_engine.tokens.sid_tokens import check_level_offsets, known_sid_token, offset_token_table, sid_token_table
from xgr_engine.tokens.table import SidTokenTable, SpelledCatalog
from xgr_engine.tokens.tokenizer_files import (
    COMPANION_FILES,
    TOKENIZER_FILE,
    SourceTokenizer,
    open_source_tokenizer,
)


class CheckedVocabulary(SpelledCatalog, Protocol):
    """What is checked of a vocabulary: that the model has a token for every code. ``Vocabulary`` is one."""

    @property
    def path(self) -> Path: ...
    @property
    def content_hash(self) -> str: ...


@dataclass(frozen=True)
class _Parts:
    """Everything that is known before the tensors are read."""

    config: HfConfig
    files: WeightFiles
    tokenizer: SourceTokenizer | None
    table: SidTokenTable
    prompt: PromptSpec
    contract: ScoreContract
    warnings: tuple[str, ...]


def convert(
    options: ConvertOptions, vocabulary: CheckedVocabulary | None = None, progress: ProgressSink | None = None
) -> ConvertReport:
    """Convert a checkpoint, unless the same conversion is already there.

    Args:
        vocabulary: the catalog whose codes must all have a token; None: no catalog is checked.

    Raises:
        CheckpointError: the checkpoint cannot be used as it is; nothing was written.
        InputError: ``vocabulary`` holds a code without a token.
        OutputExistsError: ``options.out`` holds something else and ``fresh`` is off.
        XgrError: ``verify`` found that the logits differ from those of transformers.
    """
    started = time.monotonic()
    parts = _prepare(options, vocabulary)
    hashes = hash_source(options.source, parts.files.shards)
    request = _request(options, parts, hashes)
    vocab_checked = None if vocabulary is None else _vocab_record(vocabulary)
    if (model := _already_there(options, request)) is not None:
        if vocab_checked is not None and model.vocab_checked != vocab_checked:
            model = _note_vocabulary(model, vocab_checked)
        parity = _verify(options, model)
        return ConvertReport("unchanged", model, parts.warnings, (), parity, time.monotonic() - started)
    with Shards(options.source, parts.files) as shards:
        plan = make_plan(parts.config, shards, options.dtype, options.source)
        with replacement(options.out) as stage:
            checksums, size = transfer_weights(
                stage / WEIGHTS_FILE, plan, shards, parts.table, progress or NoProgress()
            )
            copied = _copy_tokenizer(options.source, stage, parts.tokenizer, hashes)
            record: dict[str, Any] = {
                "schema_version": SCHEMA_VERSION,
                "kind": KIND,
                "xgr_version": __version__,
                "model": plan.spec.to_json(),
                "contract": parts.contract.to_json(),
                "sid_tokens": parts.table.to_json(),
                "prompt": parts.prompt.to_json(),
                "weights": {"size": size, "tensors": checksums},
                "tokenizer": copied,
                "vocab_checked": vocab_checked,
                "source": {"path": str(options.source.absolute()), "files": hashes, "request": request},
            }
            _write_metadata(stage, {**record, "fingerprint": fingerprint_of(record)})
            parity = _verify(options, load_model_dir(stage))
    model = load_model_dir(options.out)
    warnings = (*parts.warnings, *plan.warnings)
    return ConvertReport("written", model, warnings, plan.skipped, parity, time.monotonic() - started)


# ---- before anything is written -----------------------------------------------------------------------------------


def _prepare(options: ConvertOptions, vocabulary: CheckedVocabulary | None) -> _Parts:
    config = parse_hf_config(read_config(options.source), options.source / CONFIG_FILE)
    files = find_weights(options.source, _model_class(config.spec))
    tokenizer = open_source_tokenizer(options.source)
    table = _table(options, tokenizer, config)
    if options.token_offsets is not None:
        check_level_offsets(options.token_offsets, None if vocabulary is None else vocabulary.trie)
    if vocabulary is not None:
        table.bind_catalog(vocabulary)
    # With offsets the tokenizer, if any, does not know the SID tokens and cannot place them in a text.
    reader = tokenizer if options.token_offsets is None else None
    prompt = choose_prompt(options, config, reader, table)
    contract = make_score_contract(options.score_suffix, reader, table)
    reserve = table.levels + len(contract.suffix_ids)
    renderer = PromptRenderer(prompt, reader.path if reader else None, table, config.spec.max_context, reserve)
    warnings = [*missing_end(options, config, reader, renderer), *_spare_levels(options, vocabulary)]
    warnings += [*unreadable_words(reader, table, renderer), *_start_that_is_a_code(config.spec, table)]
    return _Parts(config, files, reader, table, prompt, contract, tuple(warnings))


def _spare_levels(options: ConvertOptions, vocabulary: CheckedVocabulary | None) -> tuple[str, ...]:
    """A warning if ``--token-offsets`` names levels that no SID of the catalog has."""
    offsets = options.token_offsets or ()
    if vocabulary is None or len(offsets) <= vocabulary.trie.levels:
        return ()
    return (
        f"--token-offsets names {len(offsets)} levels, but the SIDs of the catalog have {vocabulary.trie.levels}: "
        "an offset too many also cuts the codes of the level before it short",
    )


def _start_that_is_a_code(spec: AnySpec, table: SidTokenTable) -> tuple[str, ...]:
    """A warning if the decoder's start token is also the token of a code: a sign of offsets that are one too low."""
    if not isinstance(spec, EncoderDecoderSpec):
        return ()
    for level, ids in enumerate(table.token_ids):
        if len(at := np.flatnonzero(ids == spec.start_token)):
            code = table.spell(level, int(table.codes[level][at[0]]))
            return (
                f"the decoder's start token {spec.start_token} is also the token of {code}, level {level + 1}: "
                "right only if the model was trained that way",
            )
    return ()


def _model_class(spec: AnySpec) -> str:
    """The class of transformers that loads and saves such a checkpoint; for messages."""
    return "AutoModelForSeq2SeqLM" if isinstance(spec, EncoderDecoderSpec) else "AutoModelForCausalLM"


def _table(options: ConvertOptions, tokenizer: SourceTokenizer | None, config: HfConfig) -> SidTokenTable:
    spec = config.spec
    if options.token_offsets is not None:
        named = known_sid_token(tokenizer.tokenizer) if tokenizer is not None else None
        if named is not None:
            raise CheckpointError(
                f"{options.source}: the tokenizer has semantic-ID tokens such as {named}, but --token-offsets ignores "
                "them by",
                why="tokens are computed from offsets only where no tokenizer says which token stands for which code",
                hint="leave --token-offsets out",
            )
        special = []
        if isinstance(spec, EncoderDecoderSpec):  # a decoder's config may name an end token that means nothing to it
            end_token = chosen_end_token(options, config, None)
            special = [spec.start_token, *([] if end_token is None else [end_token])]
        return offset_token_table(options.token_offsets, spec.vocab_size, special)
    if tokenizer is None:
        raise CheckpointError(
            f"{options.source}: has no tokenizer",
            why="which token stands for which code is read from tokenizer.json",
            hint="if a token is an offset plus the code, say so: --token-offsets 2,258,514,770",
        )
    table = sid_token_table(tokenizer.tokenizer, options.sid_tokens)
    if table.max_token_id >= spec.vocab_size:
        level = next(at for at, ids in enumerate(table.token_ids) if int(ids.max()) == table.max_token_id)
        text = table.texts[level][int(table.token_ids[level].argmax())]
        raise CheckpointError(
            f"{options.source}: token {text} has id {table.max_token_id}, but the embedding has {spec.vocab_size} rows",
            why="the tokenizer has more tokens than the model: resize_token_embeddings was not called, or not saved",
            hint="use the checkpoint that was saved together with this tokenizer",
        )
    return table


def _request(options: ConvertOptions, parts: _Parts, hashes: dict[str, str]) -> str:
    """Equal requests give equal model directories (with the same xgr)."""
    return canonical_hash(
        {
            "schema_version": SCHEMA_VERSION,
            "files": hashes,
            "dtype": options.dtype,
            "sid_tokens": parts.table.to_json(),
            "prompt": parts.prompt.to_json(),
            "contract": parts.contract.to_json(),
        }
    )


def _already_there(options: ConvertOptions, request: str) -> ModelDir | None:
    """The model directory at ``out`` if it is the same conversion; None if ``out`` is free or may be replaced."""
    out = options.out
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / METADATA_FILE).is_file():
        raise OutputExistsError(
            f"{out}: exists and was not written by `xgr convert`", hint="give another --out, or remove it yourself"
        )
    try:
        record = read_metadata(out)
        if record["source"]["request"] == request:
            return load_model_dir(out)
        why = f"it holds a model converted from {record['source']['path']} with other files or options"
    except (CheckpointError, KeyError, TypeError) as error:
        why = f"it holds a model directory that cannot be used: {error}"
    if options.fresh:
        refuse_foreign(out, (METADATA_FILE, WEIGHTS_FILE, TOKENIZER_FILE, *COMPANION_FILES))
        return None
    raise OutputExistsError(f"{out}: exists", why=why, hint="replace it with --fresh, or give another --out")


# ---- writing --------------------------------------------------------------------------------------------------------


def _copy_tokenizer(
    source: Path, stage: Path, tokenizer: SourceTokenizer | None, hashes: dict[str, str]
) -> dict[str, str]:
    names = [name for name in (TOKENIZER_FILE, *COMPANION_FILES) if tokenizer is not None and name in hashes]
    for name in names:
        shutil.copyfile(source / name, stage / name)
    return {name: hashes[name] for name in names}


def _write_metadata(directory: Path, record: dict[str, Any]) -> None:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    write_text(directory / METADATA_FILE, text + "\n")


def _vocab_record(vocabulary: CheckedVocabulary) -> dict[str, str]:
    return {"path": str(Path(vocabulary.path).absolute()), "content_hash": vocabulary.content_hash}


def _note_vocabulary(model: ModelDir, vocab_checked: dict[str, str]) -> ModelDir:
    """Note in ``xgr.json`` that the model, itself unchanged, was now checked against this vocabulary."""
    _write_metadata(model.path, {**read_metadata(model.path), "vocab_checked": vocab_checked})
    return load_model_dir(model.path)


def _verify(options: ConvertOptions, model: ModelDir) -> ParityReport | None:
    return verify_parity(options.source, model, options.verify_prompts) if options.verify else None

"""Small tokenizers of the kinds that checkpoints come with, with semantic-ID tokens added as trainers add them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from xgr_engine.tokens.sid_tokens import sid_token_table
from xgr_engine.tokens.table import SidTokenTable

SID_TEXTS = sorted(f"<{level}_{code}>" for level, codes in (("a", 5), ("b", 12), ("c", 12)) for code in range(codes))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|sid_begin|>", "<|sid_end|>", "<think>", "</think>")
CORPUS = [
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
    "The user has interacted with items, in chronological order. Can you predict the next possible item?",
    "### User Input: ### Response: ### Instruction: 1. 2. 3. a b c; d\n\n",
]


def byte_level(sids: Sequence[str] = SID_TEXTS, *, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Qwen's kind: byte-level BPE without BOS."""
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    return _with_tokens(tokenizer, sids, special)


def llama_legacy(sids: Sequence[str] = SID_TEXTS) -> Tokenizer:
    """Llama 2's kind: a blank is put before *every* piece between added tokens, BOS in front, EOS known."""
    tokenizer = _sentence_pieces()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_bos(_with_tokens(tokenizer, sids, ()))


def llama_first(sids: Sequence[str] = SID_TEXTS) -> Tokenizer:
    """The newer kind: a blank is put before the first piece of a text only."""
    tokenizer = _sentence_pieces()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return _with_bos(_with_tokens(tokenizer, sids, ()))


def t5_like(sids: Sequence[str] = SID_TEXTS) -> Tokenizer:
    """T5's kind: unigram pieces, a blank in front of every piece of text, the end token behind a whole text."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -2.0), ("▁", -3.0)]
    pieces += [(character, -4.0) for character in sorted({character for line in CORPUS for character in line})]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return _with_tokens(tokenizer, sids, ())


KINDS = {"byte_level": byte_level, "llama_legacy": llama_legacy, "llama_first": llama_first}


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, bos: str | None = None, eos: str | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": bos, "eos_token": eos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


def table_of(tokenizer: Tokenizer) -> SidTokenTable:
    return sid_token_table(tokenizer)


def random_history(table: SidTokenTable, length: int, seed: int, *, whole: bool = False) -> list[tuple[int, ...]]:
    """SIDs of one to all levels (``whole``: all)."""
    rng = np.random.default_rng(seed)
    return [
        tuple(
            int(rng.choice(table.codes[level]))
            for level in range(table.levels if whole else rng.integers(1, table.levels + 1))
        )
        for _ in range(length)
    ]


def _sentence_pieces() -> Tokenizer:
    words = {word for line in CORPUS for word in line.replace("\n", " ").split()}
    characters = sorted({character for line in CORPUS for character in line} | set("▁<>_0123456789|"))
    vocabulary: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *characters]:
        vocabulary.setdefault(token, len(vocabulary))
    merges = []
    for word in sorted(words)[:12]:
        built = "▁"
        for character in word:
            if built + character not in vocabulary:
                vocabulary[built + character] = len(vocabulary)
                merges.append((built, character))
            built += character
    return Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))


def _with_tokens(tokenizer: Tokenizer, sids: Iterable[str], special: Sequence[str]) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in sids])
    return tokenizer


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer

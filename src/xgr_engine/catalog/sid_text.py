"""Semantic IDs as text: ``<a_12><b_3>``, ``<|sid_begin|><s_a_1><s_b_2><|sid_end|>``, ``12-3-7``, ``[12, 3, 7]``.

Everything works on whole columns: texts are cut into pieces by Arrow, and only the distinct pieces (at most a few
thousand codes a level) are looked at in Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

IntArray = NDArray[np.int32]

MAX_CODE = 2**31 - 2
# A token such as <a_12>, <s_a_340>, <item_L0_C12> or <|a_12|>: its last number is the code. No leading zero: the
# token must be spelt again exactly from its code.
_TOKEN = re.compile(r"<([^<>]*?)(?<![0-9])(0|[1-9][0-9]*)([^<>0-9]*)>")
# What may stand after a token: nothing, or what a list printed as text puts there.
_BETWEEN = re.compile(r"[\s,'\"\])]*")
# Begin and end marks carry no code. Only this form: "<a_>" is a broken token, not a mark.
_MARK = re.compile(r"<\|[^<>0-9|]+\|>")
# RE2, for Arrow. A line break between numbers is an unclosed quote of a CSV file, whose next row would become codes;
# only in brackets is it the wrapping of a printed list.
_NUMBERS = r"^\s*(?:[0-9]+(?:[ \t]*[-,; \t][ \t]*[0-9]+)*|[\[(]\s*[0-9]+(?:\s*[-,;\s]\s*[0-9]+)*\s*[\])])\s*$"

_BAD, _SKIP = -1, -2


@dataclass(frozen=True)
class ParsedSids:
    """SIDs of a column.

    Attributes:
        codes: int32 [n, L], padded with -1; a row that is not ``ok`` is all -1.
        ok: [n] whether the row is a SID.
        templates: per level the token with ``{}`` for the code, such as ``<a_{}>``; None for bare numbers.
        odd_row: a row that spells a level unlike the rows before it, or None; ``templates`` are then None.
    """

    codes: IntArray
    ok: NDArray[np.bool_]
    templates: tuple[str, ...] | None
    odd_row: int | None = None


def parse_sid_texts(
    texts: pa.Array | pa.ChunkedArray, templates: tuple[str, ...] | None = None
) -> tuple[IntArray, NDArray[np.bool_]]:
    """Codes of SIDs in text form, each row read by itself: tokens and bare numbers may stand in one column.

    Args:
        texts: [n] strings of any Arrow string type, nulls allowed.
        templates: token spelling of each level (``Vocabulary.sid_templates``); a SID that spells a level otherwise
            is then not ok.

    Returns:
        codes int32 [n, L] padded with -1, and ok [n]: False for null, empty or malformed text (its codes are -1).
    """
    parsed = parse_sids(texts, templates)
    if parsed.ok.all():
        return parsed.codes, parsed.ok
    # Where any row has tokens, parse_sids takes the rows of bare numbers for malformed.
    numbers = _parse_numbers(_one_array(texts))
    codes = np.full((len(parsed.ok), max(parsed.codes.shape[1], numbers.codes.shape[1])), -1, np.int32)
    for form in (parsed, numbers):
        codes[form.ok, : form.codes.shape[1]] = form.codes[form.ok]
    return codes, parsed.ok | numbers.ok


def parse_sids(texts: pa.Array | pa.ChunkedArray, templates: tuple[str, ...] | None = None) -> ParsedSids:
    """As ``parse_sid_texts``, with the token spelling found; a column of tokens has no rows of bare numbers."""
    texts = _one_array(texts)
    with_tokens = pc.fill_null(pc.match_substring(texts, "<"), False)
    if not pc.any(with_tokens).as_py():
        return _parse_numbers(texts)
    pieces = pc.split_pattern(pc.if_else(with_tokens, texts, None), "<")
    # Before the first "<" there may be nothing but the head of a printed list.
    head_ok = pc.match_substring_regex(texts, r"^[\s\[('\"]*<")
    lengths = pc.fill_null(pc.list_value_length(pieces), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    tokens, keep = _drop_first(pieces, lengths)
    lengths = np.maximum(lengths - 1, 0)
    parsed = parse_tokens(tokens, lengths, templates, opened=True)
    ok = parsed.ok & keep & pc.fill_null(head_ok, False).to_numpy(zero_copy_only=False)
    codes = parsed.codes
    if not ok.all():
        codes = np.where(ok[:, None], codes, -1).astype(np.int32)
    return ParsedSids(codes, ok, parsed.templates, parsed.odd_row)


def parse_tokens(
    tokens: pa.Array, lengths: NDArray[np.int64], templates: tuple[str, ...] | None = None, *, opened: bool = False
) -> ParsedSids:
    """SIDs given as lists of token texts.

    Args:
        tokens: [sum of lengths] the tokens of all rows, one after the other.
        lengths: [n] tokens of each row.
        templates: as in ``parse_sid_texts``.
        opened: the tokens lack their leading ``<``.
    """
    encoded = tokens.cast(pa.large_string()).dictionary_encode()
    distinct = encoded.dictionary.to_pylist()
    spelling: dict[str, int] = {}
    code_of, style_of = np.full(len(distinct) + 1, _BAD, np.int32), np.full(len(distinct) + 1, _BAD, np.int32)
    for at, text in enumerate(distinct):
        code, template = _parse_token("<" + text if opened else text)
        code_of[at] = code
        style_of[at] = spelling.setdefault(template, len(spelling)) if code >= 0 else code
    at = pc.fill_null(encoded.indices, len(distinct)).to_numpy(zero_copy_only=False)
    codes, styles = code_of[at], style_of[at]
    rows = np.repeat(np.arange(len(lengths)), lengths)
    is_code = codes != _SKIP
    codes, styles, rows = codes[is_code], styles[is_code], rows[is_code]
    kept = np.bincount(rows, minlength=len(lengths)).astype(np.int64)
    table, style_table = pad_rows(codes, kept), pad_rows(styles, kept)
    ok = (kept > 0) & ~((table < 0) & (np.arange(table.shape[1]) < kept[:, None])).any(axis=1)
    table[~ok] = -1
    names = list(spelling)
    if templates is not None:
        ok &= _spelt_as(style_table, kept, names, templates)
        table[~ok] = -1
        return ParsedSids(table, ok, templates)
    found, odd_row = _one_style_a_level(style_table, ok, names)
    return ParsedSids(table, ok, found, odd_row)


def pad_rows(values: NDArray[np.int32], lengths: NDArray[np.int64]) -> IntArray:
    """[n, longest] ``values`` [sum of lengths] as rows, padded with -1."""
    width = int(lengths.max(initial=0))
    if len(values) == len(lengths) * width:
        return values.reshape(len(lengths), width)
    rows = np.full((len(lengths), width), -1, np.int32)
    rows[np.arange(width) < lengths[:, None]] = values
    return rows


def sid_text(codes: tuple[int, ...], templates: tuple[str, ...] | None) -> str:
    """A SID for messages and tables: as the catalog spells it, else ``12-3-7``."""
    if templates is None:
        return "-".join(str(code) for code in codes)
    return "".join(template.replace("{}", str(code)) for template, code in zip(templates, codes, strict=False))


def _one_array(texts: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(texts, pa.ChunkedArray):
        texts = pa.concat_arrays(texts.chunks) if texts.num_chunks else pa.array([], pa.large_string())
    return texts.cast(pa.large_string())


def _parse_token(text: str | None) -> tuple[int, str]:
    """Code and template of one token, such as ``(12, "<a_{}>")``; ``(_SKIP, "")`` for a mark without a code."""
    text = (text or "").strip()
    match = _TOKEN.match(text)
    if match and _BETWEEN.fullmatch(text, match.end()):
        code = int(match[2])
        return (code, f"<{match[1]}{{}}{match[3]}>") if code <= MAX_CODE else (_BAD, "")
    mark = _MARK.match(text)
    return (_SKIP, "") if mark and _BETWEEN.fullmatch(text, mark.end()) else (_BAD, "")


def _drop_first(pieces: pa.Array, lengths: NDArray[np.int64]) -> tuple[pa.Array, NDArray[np.bool_]]:
    """The pieces after the first one of each row, flat, and which rows have any."""
    flat = pieces.flatten()
    first = np.cumsum(lengths) - lengths
    keep = np.ones(len(flat), np.bool_)
    keep[first[lengths > 0]] = False
    return flat.filter(pa.array(keep)), lengths > 1


def _parse_numbers(texts: pa.Array) -> ParsedSids:
    ok = pc.fill_null(pc.match_substring_regex(texts, _NUMBERS), False)
    cleaned = pc.utf8_trim(pc.if_else(ok, texts, None), " \t\r\n[]()")
    pieces = pc.split_pattern_regex(cleaned, r"\s*[-,;\s]\s*")
    lengths = pc.fill_null(pc.list_value_length(pieces), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    encoded = pieces.flatten().dictionary_encode()
    values = np.array([int(text) for text in encoded.dictionary.to_pylist()] or [0], object)
    too_large = np.array([value > MAX_CODE for value in values])
    codes_of = np.where(too_large, -1, values).astype(np.int32)
    codes = pad_rows(codes_of[encoded.indices.to_numpy()], lengths)
    valid = ok.to_numpy(zero_copy_only=False) & ~((codes < 0) & (np.arange(codes.shape[1]) < lengths[:, None])).any(1)
    codes[~valid] = -1
    return ParsedSids(codes, valid, None)


def _spelt_as(
    styles: IntArray, lengths: NDArray[np.int64], names: list[str], templates: tuple[str, ...]
) -> NDArray[np.bool_]:
    """[n] whether every level of a row is spelt as ``templates`` say."""
    wanted = np.array([names.index(template) if template in names else _SKIP for template in templates], np.int32)
    width = min(styles.shape[1], len(wanted))
    inside = np.arange(width) < lengths[:, None]
    same: NDArray[np.bool_] = ((styles[:, :width] == wanted[:width]) | ~inside).all(axis=1) & (lengths <= len(wanted))
    return same


def _one_style_a_level(
    styles: IntArray, ok: NDArray[np.bool_], names: list[str]
) -> tuple[tuple[str, ...] | None, int | None]:
    """The spelling of each level; or the first row that departs from it."""
    rows = np.flatnonzero(ok)
    templates = []
    for level in range(styles.shape[1] if len(rows) else 0):
        column = styles[rows, level]
        used = np.flatnonzero(column >= 0)
        if len(used) == 0:
            break
        odd = used[column[used] != column[used[0]]]
        if len(odd):
            return None, int(rows[odd[0]])
        templates.append(names[int(column[used[0]])])
    return tuple(templates) or None, None

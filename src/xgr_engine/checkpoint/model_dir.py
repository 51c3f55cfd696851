"""The xgr model directory: ``xgr.json``, ``model.safetensors``, tokenizer files. Written by ``convert``, read by all.

``xgr.json`` (schema version 1)::

    {"schema_version": 1, "kind": "model", "xgr_version": "...", "model": {ModelSpec fields},
     "contract": {"score_suffix": [token ids], "score_suffix_text": "\\n"},
     "sid_tokens": [{"codes": [...], "token_ids": [...], "texts": [...]}, ...one a level],
     "prompt": {PromptSpec fields}, "vocab_checked": {"path": "...", "content_hash": "..."} | null,
     "source": {"path": "...", "files": {name: sha256}}, "fingerprint": sha256 over weights, tokenizer, contract, prompt}
"""

from __future__ import annotations

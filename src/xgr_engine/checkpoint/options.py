"""What a conversion is asked for, and what it reports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from xgr_engine.checkpoint.model_dir import ModelDir
from xgr_engine.checkpoint.verify import ParityReport
from xgr_engine.errors import UsageError
from xgr_engine.models.spec import DTYPES
from xgr_engine.options import check_types


@dataclass(frozen=True)
class ConvertOptions:
    """What to convert and how.

    Attributes:
        source: the checkpoint directory.
        out: the model directory to write.
        dtype: of the stored weights; None for the source's.
        prompt: a preset's name or a template file; None for the history without words, in the architecture's form.
        end_token: id of the end token of prompts that have one; None for the tokenizer's, else that of config.json.
        sid_tokens: spelling of the semantic-ID tokens, ``<a_{}><b_{}><c_{}>``; None to find them.
        token_offsets: one per level, for checkpoints whose tokens are offset + code; None to read the tokenizer.
        score_suffix: text scored after each SID, ``eos``, or empty.
        fresh: replace a model directory that is already there.
        verify: compare logits with transformers before the result is put in place.
        verify_prompts: file with prompts for that; None to make some.
    """

    source: Path
    out: Path
    dtype: str | None = None
    prompt: str | None = None
    end_token: int | None = None
    sid_tokens: str | None = None
    token_offsets: tuple[int, ...] | None = None
    score_suffix: str = ""
    fresh: bool = False
    verify: bool = False
    verify_prompts: Path | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.dtype == "fp8":
            raise UsageError(
                "--dtype fp8 is not available yet", why="its kernels are later work", hint="use bfloat16 on a GPU"
            )
        if self.dtype is not None and self.dtype not in DTYPES:
            raise UsageError(f"--dtype {self.dtype}: must be one of {', '.join(DTYPES)}")
        if self.token_offsets is not None and self.sid_tokens is not None:
            raise UsageError("--sid-tokens and --token-offsets exclude each other")
        if self.end_token is not None and self.end_token < 0:
            raise UsageError(f"--end-token {self.end_token}: must be a token id, 0 or more")
        if self.verify_prompts is not None and not self.verify:
            raise UsageError("--prompts is for --verify")
        source, out = self.source.absolute(), self.out.absolute()
        if out == source or source in out.parents:
            raise UsageError(f"--out {self.out}: must not be the checkpoint or a directory in it")


@dataclass(frozen=True)
class ConvertReport:
    """What conversion did.

    Attributes:
        status: ``written``, or ``unchanged`` when the same conversion is already there.
        model: the directory, opened.
        warnings: what the user should know.
        skipped: tensors of the source that were left out (computed tables, stored copies of the embedding).
        parity: the comparison with transformers, if asked for.
        seconds: how long it took.
    """

    status: Literal["written", "unchanged"]
    model: ModelDir
    warnings: tuple[str, ...]
    skipped: tuple[str, ...]
    parity: ParityReport | None
    seconds: float


def describe(report: ConvertReport) -> dict[str, Any]:
    """The report as plain values, for ``--json`` and manifests."""
    model = report.model
    spellings = model.table.templates or ("",) * model.table.levels
    return {
        "status": report.status,
        "model": str(model.path),
        "fingerprint": model.fingerprint,
        "family": model.spec.family,
        "spec": model.spec.to_json(),
        "parameters": sum(math.prod(shape) for shape in model.spec.tensor_shapes().values()),
        "sid_tokens": [
            {"level": number, "spelling": spelling, "codes": len(codes)}
            for number, (spelling, codes) in enumerate(zip(spellings, model.table.codes, strict=True), 1)
        ],
        "prompt": model.prompt.name,
        "end_token": model.prompt.eos_ids[0] if model.prompt.eos_ids else None,
        "contract": model.contract.to_json(),
        "vocab_checked": model.vocab_checked,
        "warnings": list(report.warnings),
        "skipped": list(report.skipped),
        "parity": None if report.parity is None else report.parity.to_json(),
        "seconds": report.seconds,
    }

"""Does the converted model compute what transformers computes? Logits of the last position, in float32 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xgr_engine.errors import BackendUnavailableError, HistoryError, InputError, XgrError
from xgr_engine.tokens.prompt import PromptRenderer

if TYPE_CHECKING:
    from torch import Tensor

    from xgr_engine.checkpoint.model_dir import ModelDir

IntArray = NDArray[np.int32]

# Two float32 forward passes that add in another order differ by about 1e-5 of a log-probability and a layer.
TOLERANCE = 1e-3
_BATCH = 8
_MADE_LENGTHS = (1, 2, 5, 10)


@dataclass(frozen=True)
class ParityReport:
    """``max_difference``: the largest difference of a log-probability over all prompts and tokens."""

    prompts: int
    tokens: int
    max_difference: float
    same_best_token: bool
    tolerance: float = TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify_parity(source: Path, model: ModelDir, prompts_file: Path | None = None) -> ParityReport:
    """Compare ``model`` with its source as transformers computes it, the source rounded to the stored dtype.

    Args:
        prompts_file: see :func:`read_prompts`; None makes some from the model's own tokens.

    Raises:
        BackendUnavailableError: transformers is not installed.
        InputError: ``prompts_file`` cannot be used.
        XgrError: the log-probabilities differ by more than ``TOLERANCE``.
    """
    import torch

    prompts = made_prompts(model) if prompts_file is None else read_prompts(prompts_file, model.renderer())
    worst, same_best = 0.0, True
    with torch.inference_mode():
        theirs = _transformers_log_probs(source, model, prompts)
        for at, ours in enumerate(_xgr_log_probs(model, prompts)):
            worst = max(worst, float((ours - theirs[at]).abs().max()))
            same_best &= int(ours.argmax()) == int(theirs[at].argmax())
    report = ParityReport(len(prompts), sum(len(prompt) for prompt in prompts), worst, same_best)
    if not worst <= TOLERANCE:  # NaN fails too
        raise XgrError(
            f"the converted model differs from transformers by {worst:.3g} in log-probability",
            why=f"over {report.prompts} prompts; the tolerance is {TOLERANCE:g}",
            hint="nothing was written; please report this with the checkpoint's config.json",
        )
    return report


def read_prompts(path: Path, renderer: PromptRenderer) -> list[IntArray]:
    """Prompts from a text file (one a line) or a ``.json`` file (a list of texts or of lists of token ids).

    Raises:
        InputError: unreadable, empty, or a prompt that the model cannot take.
    """
    try:
        text = path.read_text(encoding="utf-8")
        entries = json.loads(text) if path.suffix == ".json" else [line for line in text.splitlines() if line]
        prompts = [renderer.encode_ready(entry) for entry in entries]
    except (OSError, ValueError, TypeError, HistoryError) as error:
        raise InputError(f"--prompts {path}: cannot be used", why=str(error)) from error
    if not prompts:
        raise InputError(f"--prompts {path}: holds no prompts")
    return prompts


def made_prompts(model: ModelDir) -> list[IntArray]:
    """Prompts of random histories of a few lengths, always the same for a model."""
    rng = np.random.default_rng(0)
    histories = [
        [tuple(int(rng.choice(codes)) for codes in model.table.codes) for _ in range(length)]
        for length in _MADE_LENGTHS
    ]
    return [prompt.token_ids for prompt in model.renderer().render(histories)]


def _xgr_log_probs(model: ModelDir, prompts: Sequence[IntArray]) -> list[Tensor]:
    import torch

    from xgr_engine.models.loading import load_model
    from xgr_engine.models.packing import PackedPrompts

    decoder, head = load_model(model.spec, model.weights_path, "cpu", torch.float32)
    rows: list[Tensor] = []
    for start in range(0, len(prompts), _BATCH):
        batch = PackedPrompts.of(list(prompts[start : start + _BATCH]), decoder.device)
        hidden = decoder.prefill(batch, decoder.new_cache(batch.cache_tokens, len(batch.lengths), slots=1))
        rows += list(torch.log_softmax(hidden.float() @ head.float().T, dim=-1))
    return rows


def _transformers_log_probs(source: Path, model: ModelDir, prompts: Sequence[IntArray]) -> list[Tensor]:
    import torch

    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailableError(
            "--verify compares with transformers, which is not installed", hint="pip install 'xgr[hf]'"
        ) from error
    library: Any = transformers  # typed in part only
    library.utils.logging.disable_progress_bar()
    kind = "dtype" if int(library.__version__.split(".")[0]) >= 5 else "torch_dtype"
    reference = library.AutoModelForCausalLM.from_pretrained(
        str(source), local_files_only=True, **{kind: torch.float32}
    )
    if not model.spec.tied and reference.config.tie_word_embeddings:
        # The file holds a head of its own beside the flag; transformers drops it, xgr keeps it.
        from xgr_engine.models.loading import load_model

        _, head = load_model(model.spec, model.weights_path, "cpu", torch.float32)
        reference.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    stored = getattr(torch, model.spec.dtype)
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(stored).float()
    rows = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        rows.append(torch.log_softmax(reference(input_ids=ids).logits[0, -1].float(), dim=-1))
    return rows

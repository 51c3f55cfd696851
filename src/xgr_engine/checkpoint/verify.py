"""Does the converted model compute what transformers does? Log-probabilities after prompts, in float32 on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from xgr_engine.errors import BackendUnavailableError, CheckpointError, HistoryError, InputError, XgrError
from xgr_engine.models.spec import EncoderDecoderSpec
from xgr_engine.tokens.prompt import PromptRenderer

if TYPE_CHECKING:
    from torch import Tensor

    from xgr_engine.checkpoint.model_dir import ModelDir
    from xgr_engine.models.packing import PackedPrompts
    from xgr_engine.models.rows import Rows

IntArray = NDArray[np.int32]

# Float32 forward passes that add in different orders differ by about 1e-5 per layer in log-probability.
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
    """Compare ``model`` with its source, rounded to the stored dtype, as transformers computes it.

    The next token is compared after every prompt, and after the prompt and one code, which is fed as a beam would be.

    Args:
        prompts_file: see :func:`read_prompts`; None: :func:`made_prompts`.

    Raises:
        BackendUnavailableError: transformers is not installed.
        CheckpointError: transformers cannot load the checkpoint.
        InputError: ``prompts_file`` cannot be used.
        XgrError: the log-probabilities differ by more than ``TOLERANCE``.
    """
    import torch

    prompts = made_prompts(model) if prompts_file is None else read_prompts(prompts_file, model.renderer())
    first = model.table.token_ids[0]
    codes = [int(first[at % len(first)]) for at in range(len(prompts))]
    worst, same_best = 0.0, True
    with torch.inference_mode():
        theirs = _transformers_log_probs(source, model, prompts, codes)
        for at, ours in enumerate(_xgr_log_probs(model, prompts, codes)):
            worst = max(worst, float((ours - theirs[at]).abs().max()))
            same_best &= bool((ours.argmax(-1) == theirs[at].argmax(-1)).all())
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
        InputError: the file is unreadable or empty, or has a prompt that the model cannot take.
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


def _xgr_log_probs(model: ModelDir, prompts: Sequence[IntArray], codes: Sequence[int]) -> list[Tensor]:
    """Per prompt [2, V]: after it, and after it and its code."""
    import torch

    from xgr_engine.models.loading import load_model
    from xgr_engine.models.packing import PackedPrompts

    network, head = load_model(model.spec, model.weights_path, "cpu", torch.float32)
    rows: list[Tensor] = []
    for start in range(0, len(prompts), _BATCH):
        batch = PackedPrompts.of(list(prompts[start : start + _BATCH]), network.device, share=network.causal)
        cache = network.new_cache(batch.cache_tokens, len(batch.lengths), slots=1)
        hidden = [network.prefill(batch, cache)]
        hidden.append(network.decode(_one_row_a_user(batch, codes[start : start + _BATCH], cache.slots), cache))
        rows += list(torch.log_softmax(torch.stack(hidden, 1).float() @ head.float().T, dim=-1))
    return rows


def _one_row_a_user(batch: PackedPrompts, codes: Sequence[int], slots: int) -> Rows:
    import torch

    from xgr_engine.models.rows import Rows

    users = len(batch.lengths)
    return Rows(
        tokens=torch.tensor(codes),
        position=torch.tensor(batch.lengths),
        slots=torch.arange(users) * slots,
        ancestors=torch.zeros((users, 1, 1), dtype=torch.int32),
        cells=None,
    )


def _transformers_log_probs(
    source: Path, model: ModelDir, prompts: Sequence[IntArray], codes: Sequence[int]
) -> list[Tensor]:
    """As :func:`_xgr_log_probs`, computed by transformers."""
    import torch

    reference = _reference(source, model)
    rows = []
    for prompt, code in zip(prompts, codes, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        if isinstance(model.spec, EncoderDecoderSpec):
            answer = torch.tensor([[model.spec.start_token, code]])
            logits = reference(input_ids=ids, decoder_input_ids=answer).logits
        else:
            logits = reference(input_ids=torch.cat([ids, torch.tensor([[code]])], 1)).logits
        rows.append(torch.log_softmax(logits[0, -2:].float(), dim=-1))
    return rows


def _reference(source: Path, model: ModelDir) -> Any:
    """The source loaded by transformers, in float32, with weights rounded to the stored dtype."""
    import torch

    try:
        import transformers
    except ImportError as error:
        raise BackendUnavailableError(
            "--verify compares with transformers, which is not installed", hint="pip install transformers"
        ) from error
    library: Any = transformers  # typed in part only
    library.utils.logging.disable_progress_bar()
    encodes = isinstance(model.spec, EncoderDecoderSpec)
    kind = library.AutoModelForSeq2SeqLM if encodes else library.AutoModelForCausalLM
    argument = "dtype" if int(library.__version__.split(".")[0]) >= 5 else "torch_dtype"
    try:
        reference = kind.from_pretrained(str(source), local_files_only=True, **{argument: torch.float32})
    except Exception as error:  # whatever its classes raise about a config
        raise CheckpointError(
            f"{source}: transformers cannot load the checkpoint",
            why=str(error),
            hint="correct config.json so that transformers can read it, or leave --verify out",
        ) from error
    if not model.spec.tied and reference.config.tie_word_embeddings:
        # The file holds a head of its own in spite of the flag; transformers drops it, xgr keeps it.
        from xgr_engine.models.loading import load_model

        _, head = load_model(model.spec, model.weights_path, "cpu", torch.float32)
        reference.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    if isinstance(model.spec, EncoderDecoderSpec):
        # transformers 4 scales by this flag and does not know scale_decoder_outputs; 5 ignores the flag here.
        reference.config.tie_word_embeddings = model.spec.scaled_output
    stored = getattr(torch, model.spec.dtype)
    for parameter in reference.parameters():
        parameter.data = parameter.data.to(stored).float()
    return reference.eval()

"""Convert a checkpoint to an xgr model directory: weights, semantic-ID tokens, prompt and score contract.

SOURCE is a Hugging Face directory of a Qwen2, Qwen2.5, Qwen3, Llama or T5 (TIGER) model in safetensors. Everything is
checked before anything is written; running the same conversion again does nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from xgr_cli.options import LogEvery, argument, option
from xgr_cli.output import Output
from xgr_cli.progress import make_progress
from xgr_cli.views import layers
from xgr_engine.errors import UsageError

if TYPE_CHECKING:
    from xgr_engine.catalog.vocabulary import Vocabulary

EXAMPLES = (
    "xgr convert checkpoint/ --vocab vocab --out model --prompt minionerec-eval",
    "xgr convert checkpoint/ --prompt my_prompt.j2 --score-suffix eos --verify",
    "xgr convert t5-tiger/ --token-offsets 2,258,514,770 --prompt tiger",
)

DEFAULT_VOCAB = Path("vocab")

Dtype = Literal["float32", "bfloat16", "float16", "fp8"]


def convert(
    output: Output,
    source: Annotated[Path, argument(metavar="SOURCE", help="directory of the checkpoint")],
    vocab: Annotated[
        Path | None,
        option(
            "--vocab",
            help="vocabulary whose codes must all have a token",
            panel="Input",
            env="XGR_VOCAB",
            show_default="./vocab if there is one",
        ),
    ] = None,
    out: Annotated[Path, option("--out", help="model directory to write", panel="Output", env="XGR_MODEL")] = Path(
        "model"
    ),
    dtype: Annotated[
        Dtype | None,
        option(
            "--dtype",
            help="type of the stored weights (fp8 is not available yet)",
            panel="Output",
            show_default="the source's",
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        option(
            "--prompt",
            help="lc-rec, minionerec-eval, openonerec, sids-only, tiger, or a Jinja template file",
            panel="Model",
            metavar="PRESET|FILE.j2",
            show_default="sids-only; tiger for a T5",
        ),
    ] = None,
    end_token: Annotated[
        int | None,
        option(
            "--end-token",
            help="id of the end token after the prompt, for prompts that have one (tiger)",
            panel="Model",
            metavar="ID",
            show_default="the tokenizer's, else that of config.json",
        ),
    ] = None,
    sid_tokens: Annotated[
        str | None,
        option(
            "--sid-tokens",
            help="spelling of the semantic-ID tokens, such as '<a_{}><b_{}><c_{}>'",
            panel="Model",
            show_default="found in the tokenizer",
        ),
    ] = None,
    token_offsets: Annotated[
        str | None,
        option(
            "--token-offsets",
            help="for checkpoints without a tokenizer: a token is its level's offset plus the code",
            panel="Model",
            metavar="N,N,...",
        ),
    ] = None,
    score_suffix: Annotated[
        str,
        option("--score-suffix", help="text scored after each semantic ID, such as '\\n', or eos", panel="Model"),
    ] = "",
    verify: Annotated[
        bool,
        option(
            "--verify", help="compare log-probabilities with transformers before accepting the result", panel="Check"
        ),
    ] = False,
    prompts: Annotated[
        Path | None,
        option(
            "--prompts",
            help="prompts for --verify: text, one per line, or a .json list of texts or token ids",
            panel="Check",
            metavar="FILE",
        ),
    ] = None,
    fresh: Annotated[
        bool, option("--fresh", help="replace a model directory that is already there", panel="Output")
    ] = False,
    log_every: LogEvery = 60.0,
) -> None:
    """The module's docstring is the help text."""
    from xgr_engine.checkpoint.options import ConvertOptions, describe

    options = ConvertOptions(
        source=source,
        out=out,
        dtype=dtype,
        prompt=prompt,
        end_token=end_token,
        sid_tokens=sid_tokens,
        token_offsets=None if token_offsets is None else _offsets(token_offsets),
        score_suffix=score_suffix,
        fresh=fresh,
        verify=verify,
        verify_prompts=prompts,
    )
    vocabulary = _vocabulary(vocab, output)

    from xgr_engine.checkpoint.convert import convert as run

    report = run(options, vocabulary, make_progress(output, log_every))
    if prompt is None:  # only now: beside an error about something else it would mislead
        kind = "and the end token" if report.model.prompt.eos_ids else "without any words"
        output.note(f"no --prompt: {report.model.prompt.name}, the tokens of the history {kind}")
    for warning in report.warnings:
        output.warn(warning)
    record = describe(report)
    output.result(record, lambda out: _show(out, record))


def _vocabulary(vocab: Path | None, output: Output) -> Vocabulary | None:
    from xgr_engine.catalog.vocabulary import load_vocabulary

    if vocab is None and not DEFAULT_VOCAB.exists():
        output.warn("no vocabulary (--vocab): not checked whether every code of the catalog has a token")
        return None
    return load_vocabulary(vocab or DEFAULT_VOCAB)


def _offsets(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            f"--token-offsets {text}: must be whole numbers separated by commas, such as 2,258,514,770"
        ) from error


def _show(output: Output, record: dict[str, Any]) -> None:
    unchanged = "nothing to do: this conversion is already there"
    spec, vocabulary, parity = record["spec"], record["vocab_checked"], record["parity"]
    tokens = [f"{level['codes']:,} {level['spelling']}".strip() for level in record["sid_tokens"]]
    output.fields(
        {
            "model": record["model"],
            "state": "written" if record["status"] == "written" else unchanged,
            "architecture": f"{record['family']}, {layers(spec)}, hidden {spec['hidden_size']}",
            "parameters": record["parameters"],
            "dtype": spec["dtype"],
            "output head": "the embedding (tied)" if spec["tied"] else "its own",
            "context": spec["max_context"],
            "tokens per level": ", ".join(tokens),
            "prompt": record["prompt"],
            "end token": record["end_token"],
            "score suffix": repr(record["contract"]["score_suffix_text"])
            if record["contract"]["score_suffix"]
            else None,
            "vocabulary": vocabulary and vocabulary["path"],
            "parity": parity and f"log-probabilities within {parity['max_difference']:.2g} of transformers",
            "fingerprint": record["fingerprint"],
        }
    )

"""Real prompts from a users file, made as ``xgr recommend`` makes them."""

from __future__ import annotations

import re
from pathlib import Path

from xgr_engine.bench.options import BenchOptions
from xgr_engine.bench.workloads import Prompt
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.checkpoint.model_dir import load_model_dir
from xgr_engine.errors import HistoryError, UsageError
from xgr_engine.job.histories import HistoryResolver
from xgr_engine.job.inputs import RowReader, open_inputs
from xgr_engine.job.options import HistoryOptions
from xgr_engine.job.prompts import Reject, make_prompt_maker

_MOST_PROMPTS = 512


def prompts_of(options: BenchOptions, longest: int) -> tuple[Prompt, ...]:
    """Prompts of the first 512 users of ``options.inputs``; those longer than ``longest`` tokens are left out.

    Raises:
        UsageError: no row makes a prompt, or one that short.
        HistoryError: a column that is missing or holds no lists.
    """
    assert options.model is not None and options.vocab is not None
    history = HistoryOptions(
        paths=options.inputs,
        user_col=options.history_col,
        history_col=options.history_col,
        history_format=options.history_format,  # type: ignore[arg-type]
        limit=_MOST_PROMPTS,
    )
    model, vocabulary = load_model_dir(Path(options.model)), load_vocabulary(Path(options.vocab))
    maker = make_prompt_maker(model, HistoryResolver(vocabulary, model.table, history), history)
    prompts: list[Prompt] = []
    rejects: list[Reject] = []
    try:
        inputs = open_inputs(history)
        reader = RowReader(inputs)
        for number, file in enumerate(inputs.files):
            stop = min(file.rows, _MOST_PROMPTS - len(prompts))
            if stop > 0:
                prepared = maker.prepare(reader.read(number, 0, stop))
                prompts += prepared.prompts
                rejects += prepared.rejects
    except HistoryError as error:
        if set(re.findall("--[a-z-]+", error.hint)) <= {"--in", "--history-col", "--history-format"}:
            raise
        # the hint names options that only xgr recommend has
        hint = "name a column of lists with --history-col; only xgr recommend reads lists stored as text"
        raise HistoryError(error.what, why=error.why, hint=hint) from error
    if not prompts:
        raise UsageError(
            f"--in: none of the first {_MOST_PROMPTS} rows makes a prompt",
            why=f"the first of them: {rejects[0].detail}" if rejects else "there are no rows",
            hint="check --in, --vocab, --history-col and --history-format",
        )
    fitting = tuple(prompt for prompt in prompts if len(prompt) <= longest)
    if not fitting:
        raise UsageError(
            f"--in: none of the first {_MOST_PROMPTS} rows makes a prompt of at most {longest} tokens",
            why=f"{len(prompts)} prompts were made, the shortest has {min(map(len, prompts))} tokens",
            hint="raise --context, or check --history-col and --history-format",
        )
    return fitting

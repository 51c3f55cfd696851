"""The Python interface, with a real (tiny, random) model."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import SIDS, Place

import xgr_engine as xgr
from xgr_engine.errors import BackendUnavailableError, HistoryError, UsageError, XgrError, with_arguments
from xgr_engine.job.run import run_job
from xgr_engine.options import SearchOptions
from xgr_engine.recommender import Recommender


@pytest.fixture(scope="module")
def loaded(assets: tuple[Path, Path]) -> xgr.Recommender:
    return xgr.load(model=assets[1], vocab=assets[0], device="cpu")


def test_ten_lines(loaded: xgr.Recommender) -> None:
    recs = loaded.recommend([["112", "108"], ["107"]], top_k=10, beam=40, exclude_seen=True)
    assert [len(one or []) for one in recs] == [10, 10] and recs.short == [False, False]
    for number, seen in enumerate(({112, 108}, {107})):
        found = recs[number]
        assert found is not None
        for item_id, score, sid in found:
            assert item_id not in seen and score <= 0 and list(sid) == SIDS[item_id - 100]
        assert [r.score for r in found] == sorted((r.score for r in found), reverse=True)
        assert len({r.item_id for r in found}) == 10
    assert recs.table.column_names == ["items", "short"] and recs.rejects == []


@pytest.mark.parametrize(("name", "value"), [("device", None), ("device", 1), ("max_memory", 0), ("max_memory", 10**9)])
def test_what_load_takes_as_text_only(assets: tuple[Path, Path], name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"^{name} {value}: must be text"):
        xgr.load(model=assets[1], vocab=assets[0], **{"device": "cpu", name: value})  # type: ignore[arg-type]


def test_histories_of_every_sequence_type(loaded: xgr.Recommender) -> None:
    forms = [
        [101, 102],
        (101, 102),
        np.array([101, 102]),
        pa.array([101, 102]),
        ["101", "102"],
        list(np.array([101, 102])),
        pa.scalar([101, 102]),
    ]
    results = [loaded.recommend([form], top_k=3, beam=8)[0] for form in forms]
    assert all(result == results[0] for result in results)


def test_columns_of_arrow_with_nulls(loaded: xgr.Recommender) -> None:
    for column in (pa.array([[101], None, []]), pa.chunked_array([[[101]], [None, []]], pa.list_(pa.int64()))):
        recs = loaded.recommend(column, top_k=2, beam=8)
        assert [one is None for one in recs] == [False, True, True]
        assert [r.reason for r in recs.rejects] == ["empty-history"] * 2


def test_rejected_histories_are_none_and_told(loaded: xgr.Recommender) -> None:
    recs = loaded.recommend([[101], [], None, [999], [None]], top_k=2, beam=8)
    assert [one is None for one in recs] == [False, True, True, True, True]
    assert [(r.row, r.reason) for r in recs.rejects] == [
        (1, "empty-history"), (2, "empty-history"), (3, "empty-history"), (4, "null-in-list"),
    ]  # fmt: skip
    with pytest.raises(HistoryError, match="'999'"):
        loaded.recommend([[101], [999]], top_k=2, beam=8, on_unknown="fail")
    with pytest.raises(UsageError, match="top_k 9 is larger than beam 8"):
        loaded.recommend([[101]], top_k=9, beam=8)


@pytest.mark.parametrize(
    ("histories", "more", "said"),
    [
        ([[100]], {"beam": 8.5}, "^beam 8.5: must be a whole number"),
        ([[100]], {"top_k": True}, "^top_k True: must be a whole number"),
        ([[100]], {"exclude_seen": "no"}, "^exclude_seen no: must be True or False$"),
        ([[100]], {"max_history": 1.5}, "^max_history 1.5: must be a whole number"),
        (None, {}, "histories is None"),
        (([100] for _ in range(2)), {}, "histories is a generator"),
        ("100", {}, "histories is a str"),
        (np.array(100), {}, "histories is a ndarray, not a sequence"),
        ([np.int64(100)], {}, r"histories\[0\] is a int64, not a list"),
        ([["\ud800"]], {}, r"histories\[0\]: '\\ud800' is not valid text"),
        (["\ud800"], {"history_format": "prompt"}, r"histories\[0\]: '\\ud800' is not valid text"),
        ([100], {}, r"histories\[0\] is a int"),
        (["100"], {}, r"histories\[0\] is text, not a list"),
        ([[100]], {"exclude": iter([[1]])}, "exclude is a list_iterator"),
        ([[100]], {"exclude": ["100"]}, r"exclude\[0\] is text"),
        ([[100]], {"on_error": "ignore"}, "^on_error ignore: must be one of reject, fail"),
        ([[100]], {"score_over": "all"}, "^score_over all: must be one of"),
        ([[100]], {"history_format": "prompt", "exclude_seen": True}, "give each user's seen items with exclude$"),
        ([[100]], {"history_format": "prompt", "max_history": 3}, "^max_history cannot cut ready prompts"),
        ([[100]], {"history_format": "prompt", "on_empty": "template"}, "^on_empty template .*\nuse on_empty reject"),
        ([[100]], {"item_cols": ["nothing"]}, "^item_cols nothing: the vocabulary has no such column"),
        ([[100]], {"item_cols": ["kind", "kind"]}, "^item_cols names 'kind' twice"),
        ([[100]], {"item_cols": "kind"}, "^item_cols is the text 'kind', not a list"),
        ([[100]], {"item_cols": 5}, "^item_cols is 5, not a list of columns"),
        ([[999]], {"on_unknown": "fail"}, "'999' is not in the catalog\non_unknown fail\n.* or use on_unknown drop"),
    ],
)
def test_arguments_of_a_wrong_kind_are_said_plainly(
    loaded: xgr.Recommender, histories: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(XgrError, match=said) as raised:
        loaded.recommend(histories, **{"beam": 8, "top_k": 2, **more})
    assert "--" not in str(raised.value) and "--" not in str(raised.value.args)


def test_memory_errors_name_arguments(place: Place) -> None:
    with pytest.raises(UsageError, match=r"^max_memory much: must be a size"):
        xgr.load(model=place.model, vocab=place.vocab, device="cpu", max_memory="much")
    small = xgr.load(model=place.model, vocab=place.vocab, device="cpu", max_memory="1KB")
    with pytest.raises(XgrError, match="give more with max_memory, or ask for a smaller beam") as raised:
        small.recommend([[100]], beam=8, top_k=2)
    assert "--" not in str(raised.value)


def test_command_lines_in_messages_stay() -> None:
    said = with_arguments("use --top-k 5 -- or --no-x, or run `xgr convert --dtype float32` with --exclude-col")
    assert said == "use top_k 5 -- or no_x, or run `xgr convert --dtype float32` with exclude"


def test_every_flag_that_the_engine_may_name_here_is_an_argument() -> None:
    """What :func:`with_arguments` makes of a flag must be something that load or recommend takes."""
    names = {*inspect.signature(xgr.load).parameters, *inspect.signature(xgr.Recommender.recommend).parameters}
    flags = {"--beam", "--top-k", "--max-memory", "--device", "--threads", "--item-cols", "--where", "--allow-items"}
    flags |= {"--deny-items", "--match", "--diversify", "--exclude-col", "--exclude-seen", "--on-error", "--on-empty"}
    flags |= {"--on-unknown", "--history-format", "--max-history", "--score-over", "--collisions"}
    assert {with_arguments(flag) for flag in flags} <= names


def test_a_failing_history_is_rejected_on_request(loaded: xgr.Recommender, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recommender.launch

    def broken(self: Any, ready: Any) -> Any:
        raise RuntimeError("broken row")

    monkeypatch.setattr(Recommender, "launch", broken)
    with pytest.raises(XgrError, match="broken row") as raised:
        loaded.recommend([[101]], top_k=2, beam=8)
    assert "on_error" in str(raised.value) and "--" not in str(raised.value)
    recs = loaded.recommend([[101]], top_k=2, beam=8, on_error="reject")
    assert recs == [None] and recs.rejects[0].reason == "engine-error"
    monkeypatch.setattr(Recommender, "launch", run)
    assert loaded.recommend([[101]], top_k=2, beam=8)[0] is not None


def test_no_threads_cannot_compute(place: Place) -> None:
    with pytest.raises(UsageError, match="threads 0"):
        xgr.load(model=place.model, vocab=place.vocab, threads=0)
    with pytest.raises(UsageError, match="threads 100000: must be at most"):  # OpenMP would end the process
        xgr.load(model=place.model, vocab=place.vocab, threads=100_000)


def test_exclude_and_short(loaded: xgr.Recommender) -> None:
    recs = loaded.recommend([[101], [101]], exclude=[list(range(100, 135)), None], top_k=8, beam=40)
    assert {r.item_id for r in recs[0] or []} == set(range(135, 140)) and recs.short == [True, False]
    with pytest.raises(UsageError, match="exclude has 1 lists for 2 histories"):
        loaded.recommend([[101], [101]], exclude=[[1]])


def test_no_histories_give_no_results(loaded: xgr.Recommender) -> None:
    assert loaded.recommend([], top_k=2, beam=8) == []


def test_the_job_writes_what_the_api_returns(place: Place, loaded: xgr.Recommender) -> None:
    """cases.md: batches of 1, 7 and 64: the job batches many users, the API here one at a time."""
    histories = [[100 + (i * 7 + j) % 40 for j in range(i % 6 + 1)] for i in range(30)]
    users = place.users(histories)
    search = SearchOptions(beam=16, top_k=12)
    report = run_job(place.options(users, exclude_seen=True, search=search, shard_rows=11))
    assert report.failure is None and report.record["audit"]["line"].startswith("users=30, items=360, invalid=0")
    written = place.written()["items"].to_pylist()
    for history, items in zip(histories, written, strict=True):
        [alone] = loaded.recommend([history], exclude_seen=True, top_k=12, beam=16)
        assert alone is not None and len(alone) == len(items) == 12
        np.testing.assert_allclose([i["score"] for i in items], [r.score for r in alone], atol=1e-5)
        gaps = np.abs(np.diff([r.score for r in alone]))
        if (gaps > 1e-4).all():
            assert [i["item_id"] for i in items] == [r.item_id for r in alone]


def test_two_runs_give_the_same_bits(place: Place) -> None:
    users = place.users([[100 + i % 40, 105] for i in range(25)])
    options = place.options(users, search=SearchOptions(beam=16, top_k=10), shard_rows=10)
    run_job(options)
    first = place.written()
    run_job(place.options(users, search=SearchOptions(beam=16, top_k=10), shard_rows=10, fresh=True))
    assert place.written().equals(first)


def test_items_seen_shrink_the_list_inside_the_search(place: Place) -> None:
    """cases.md: implicit#198: the rule is inside the search: of 40 items 36 seen, K 3 gives 3, K 8 gives 4, short."""
    users = place.users([list(range(100, 136))])
    for top_k, expected in ((3, 3), (8, 4)):
        run_job(place.options(users, exclude_seen=True, search=SearchOptions(beam=8, top_k=top_k), fresh=True))
        table = place.written()
        assert len(table["items"].to_pylist()[0]) == expected
        assert table["short"].to_pylist() == [expected < top_k]


def test_a_device_asked_for_by_name_must_be_there(assets: tuple[Path, Path]) -> None:
    import torch

    with pytest.raises(UsageError, match=r"^device tpu"):
        xgr.load(model=assets[1], vocab=assets[0], device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailableError, match="no CUDA device"):
            xgr.load(model=assets[1], vocab=assets[0], device="cuda:3")
        said: list[str] = []
        assert xgr.load(model=assets[1], vocab=assets[0], note=said.append).device.name == "cpu"
        assert said == ["no CUDA device: computing on the CPU"]


def test_import_alone_is_light() -> None:
    code = (
        "import sys, xgr_engine as xgr; "
        "heavy = {'torch', 'pyarrow', 'polars', 'transformers'} & sys.modules.keys(); "
        "assert not heavy, heavy; assert callable(xgr.load); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_recommending_needs_no_polars(place: Place) -> None:
    users = place.users([[100]])
    code = (
        "import sys\n"
        "sys.modules['polars'] = None\n"
        "import xgr_engine as xgr\n"
        f"r = xgr.load(model={str(place.model)!r}, vocab={str(place.vocab)!r}, device='cpu')\n"
        "assert len(r.recommend([[101]], top_k=3, beam=8)[0]) == 3\n"
        "from xgr_cli.main import run\n"
        f"assert run(['recommend', '--in', {str(users)!r}, '--model', {str(place.model)!r}, '--vocab', "
        f"{str(place.vocab)!r}, '--out', {str(place.out)!r}, '--beam', '8', '--top-k', '3', '-q']) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
    assert len(pq.ParquetFile(place.out / "part-00000-of-00001.parquet").read()["items"].to_pylist()[0]) == 3


def test_a_damaged_model_is_mended_by_a_command(place: Place, tmp_path: Path) -> None:
    model = tmp_path / "cut"
    shutil.copytree(place.model, model)
    (model / "model.safetensors").write_bytes(b"short")
    with pytest.raises(XgrError, match="run `xgr convert --fresh` again"):
        xgr.load(model=model, vocab=place.vocab, device="cpu")

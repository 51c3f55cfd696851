"""vocab.json, xgr.json and manifest.json edited by hand: the file, the key and what to do are said, at any depth."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_support import RunCli
from job_support import make_model, make_vocabulary

from xgr_cli.commands.inspect import inspect
from xgr_cli.output import Output
from xgr_engine.checkpoint.model_dir import fingerprint_of
from xgr_engine.errors import InputError
from xgr_engine.metrics.recs import open_recommendations

RETYPED: tuple[Any, ...] = (None, "x", [None], {}, {"a": 1}, 1.5, 0)
Place = tuple[str | int, ...]


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Every place in JSON; of a list the first entry stands for the others."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, below in inner:
        yield (*above, key)
        yield from places(below, (*above, key))


def edits(document: dict[str, Any], place: Place) -> Iterator[dict[str, Any]]:
    """The document without the value at a place, and with values of other types in its place."""

    def edited() -> tuple[dict[str, Any], Any]:
        whole = copy.deepcopy(document)
        parent: Any = whole
        for key in place[:-1]:
            parent = parent[key]
        return whole, parent

    whole, parent = edited()
    old = parent.pop(place[-1])
    yield whole
    for value in RETYPED:
        if type(value) is not type(old):
            whole, parent = edited()
            parent[place[-1]] = value
            yield whole


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary, a model, and users."""
    root = tmp_path_factory.mktemp("edited")
    make_vocabulary(root / "vocab")
    make_model(root / "model")
    users = {"user_id": ["u0", "u1", "u2"], "history": [[100, 101], [105], []], "target": [102, 103, 104]}
    pq.write_table(pa.table(users), root / "users.parquet")
    return root


def refused(directory: Path, file: Path, document: dict[str, Any]) -> bool:
    """Whether ``inspect`` refuses the directory with this in its file. Any other error is raised."""
    file.write_text(json.dumps(document))
    try:
        inspect(Output(), directory)
    except InputError as error:
        assert (file.name in error.what or str(directory) in error.what) and error.hint, document
        return True
    return False


def test_a_vocabulary(cli: RunCli, made: Path) -> None:
    vocab, file = Path("vocab"), Path("vocab/vocab.json")
    shutil.copytree(made / "vocab", vocab)
    whole = json.loads(file.read_text())
    assert sum(refused(vocab, file, edited) for place in places(whole) for edited in edits(whole, place)) > 200
    again = ("build-vocab", str(made / "vocab.catalog.parquet"), "--out", "vocab", "--update", "-q")
    for key in ("written_by", "rank", "collisions", "level_reports", "files"):
        assert refused(vocab, file, {**whole, key: {"a": 1}})
        assert cli(*again).code == 0 and json.loads(file.read_text()) == whole
    file.write_text(json.dumps({**whole, "collisions": {"groups": 4, "items": "8", "largest": 2}}))
    ended = cli("inspect", "vocab")
    assert ended.code == 2 and "vocab.json" in ended.err and "xgr build-vocab" in ended.err
    assert '"collisions.items" is missing or has the wrong type' in ended.err


def test_a_model(cli: RunCli, made: Path) -> None:
    model, file = Path("model"), Path("model/xgr.json")
    shutil.copytree(made / "model", model)
    whole = json.loads(file.read_text())

    def signed(record: dict[str, Any]) -> dict[str, Any]:
        """With the fingerprint of its content, if that can have one, so that reading goes on to the content."""
        with suppress(KeyError):
            record["fingerprint"] = fingerprint_of(record)
        return record

    assert sum(refused(model, file, signed(edited)) for place in places(whole) for edited in edits(whole, place)) > 200
    for key, value in (("source", {"files": {}}), ("vocab_checked", {"path": 5})):  # not in the fingerprint
        file.write_text(json.dumps({**whole, key: value}))
        ended = cli("inspect", "model")
        assert ended.code == 2 and "xgr.json" in ended.err and "xgr convert" in ended.err
        assert f'"{key}.path" is missing' in ended.err or '"vocab_checked" is missing' in ended.err


def test_a_manifest(cli: RunCli, made: Path) -> None:
    """What inspect refuses, eval refuses as well."""
    recs, file = Path("recs"), Path("recs/_xgr/manifest.json")
    again = ("recommend", "--in", str(made / "users.parquet"), "--model", str(made / "model"), "--out", "recs", "-q")
    again = (*again, "--vocab", str(made / "vocab"), "--device", "cpu", "--beam", "8", "--top-k", "3")
    again = (*again, "--max-rejects", "1", "--shard-rows", "1")
    assert cli(*again).code == 0
    whole = json.loads(file.read_text())
    wrong = 0
    for place in places(whole):
        for edited in edits(whole, place):
            if refused(recs, file, edited):
                wrong += 1
                if place == ("kind",):
                    continue  # then it is another program's, which is nothing to eval
                with pytest.raises(InputError, match=r"manifest\.json"):
                    open_recommendations(recs, None)
            else:
                open_recommendations(recs, None)
    assert wrong > 200


def test_a_run_goes_on_after_a_manifest_that_was_edited(cli: RunCli, made: Path) -> None:
    """One that lacks what it can do without, or is refused: then --fresh begins anew."""
    file = Path("recs/_xgr/manifest.json")
    again = ("recommend", "--in", str(made / "users.parquet"), "--model", str(made / "model"), "--out", "recs", "-q")
    again = (*again, "--vocab", str(made / "vocab"), "--device", "cpu", "--beam", "8", "--top-k", "3")
    assert cli(*again, "--max-rejects", "0").code == 3
    whole = json.loads(file.read_text())
    without = ("attempts", "events", "parts", "memory", "counts", "audit", "batches", "engine", "filters", "finished")
    file.write_text(json.dumps({key: value for key, value in whole.items() if key not in without}))
    assert cli(*again, "--max-rejects", "1").code == 0
    file.write_text(json.dumps({**whole, "attempts": [{}]}))
    ended = cli(*again, "--max-rejects", "1")
    assert ended.code == 2 and "manifest.json is damaged" in ended.err and "--fresh" in ended.err
    assert '"attempts[0].state" is missing' in ended.err
    file.write_text(json.dumps({**whole, "fingerprint_fields": {**whole["fingerprint_fields"], "inputs": [[]]}}))
    ended = cli(*again, "--max-rejects", "1")
    assert ended.code == 2 and '"fingerprint" is not that of "fingerprint_fields"' in ended.err
    assert cli(*again, "--max-rejects", "1", "--fresh").code == 0

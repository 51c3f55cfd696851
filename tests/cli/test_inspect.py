"""xgr inspect: what it tells about each kind of directory, and about everything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_support import RunCli
from job_support import make_model, make_vocabulary


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a vocabulary, a model and users."""
    root = tmp_path_factory.mktemp("made")
    make_vocabulary(root / "vocab")
    make_model(root / "model")
    users = {"user_id": ["u0", "u1", "u2"], "history": [[100, 101], [105], []]}
    pq.write_table(pa.table(users), root / "users.parquet")
    return root


def _recommend(cli: RunCli, made: Path, *more: str) -> int:
    if "--in" not in more:
        more = ("--in", str(made / "users.parquet"), *more)
    places = ("--model", str(made / "model"), "--vocab", str(made / "vocab"), "--out", "recs", "--device", "cpu")
    search = ("--beam", "8", "--top-k", "3", "--max-rejects", "1")
    return cli("recommend", *places, *search, *more).code


@pytest.mark.parametrize("marker", ["", "vocab.json"])
def test_vocabulary(cli: RunCli, made: Path, marker: str) -> None:
    record = cli("inspect", str(made / "vocab" / marker), "--json").json
    assert (record["kind"], record["num_items"], record["num_sids"]) == ("vocabulary", 40, 36)
    assert record["collisions"]["groups"] == 4
    shown = cli("inspect", str(made / "vocab")).out
    assert "8 items on 4 SIDs" in shown and record["content_hash"] in shown and "branching" in shown


@pytest.mark.parametrize("marker", ["", "xgr.json"])
def test_model(cli: RunCli, made: Path, marker: str) -> None:
    record = cli("inspect", str(made / "model" / marker), "--json").json
    assert (record["kind"], record["spec"]["family"], record["prompt"]["name"]) == ("model", "qwen3", "sids-only")
    assert [level["codes"] for level in record["sid_tokens"]] == [8, 8, 8]
    shown = cli("inspect", str(made / "model")).out
    assert "qwen3, 1 layers of 16" in shown and record["fingerprint"] in shown


def test_recommendations(cli: RunCli, made: Path) -> None:
    assert _recommend(cli, made) == 0
    record = cli("inspect", "recs", "--json").json
    assert (record["kind"], record["complete"], record["parts_present"]) == ("recommendations", True, 1)
    assert record["manifest"]["counts"]["rejects"] == 1
    for place in ("recs", "recs/_xgr", "recs/_xgr/manifest.json"):
        shown = cli("inspect", place).out
        assert "invalid=0" in shown and "1 of 1" in shown and "rejected because" in shown


def test_rules_and_parts_in_partition_directories_are_shown(cli: RunCli, made: Path) -> None:
    """Parts below ``day=...`` count as present, and the rules that a run had are named."""
    assert _recommend(cli, made) == 0 and "filters" not in cli("inspect", "recs").out
    users = Path("users") / "day=1" / "users.parquet"
    users.parent.mkdir(parents=True)
    shutil.copy(made / "users.parquet", users)
    Path("never.txt").write_text("101\n102\n")
    rules = ("--in", "users", "--deny-items", "never.txt", "--partition-by", "day", "--fresh")
    assert _recommend(cli, made, *rules) == 0
    assert cli("inspect", "recs", "--json").json["parts_present"] == 1
    shown = " ".join(cli("inspect", "recs").out.split())
    assert "1 of 1" in shown and "--deny-items never.txt; 38 of 40 items are left" in shown


def test_unfinished_recommendations_are_shown_as_such(cli: RunCli, made: Path) -> None:
    assert _recommend(cli, made, "--max-rejects", "0") == 3
    assert cli("inspect", "recs", "--json").json["complete"] is False
    assert "no _SUCCESS" in cli("inspect", "recs").out
    manifest = Path("recs/_xgr/manifest.json")
    record = json.loads(manifest.read_text())
    # what a run that was killed early leaves
    for key in ("counts", "audit", "engine", "finished"):
        record.pop(key)
    manifest.write_text(json.dumps({**record, "state": "running", "durations": {}}))
    assert "running" in cli("inspect", "recs").out


def test_verify_finds_a_damaged_byte(cli: RunCli, tmp_path: Path) -> None:
    vocab, model = make_vocabulary(tmp_path / "v"), make_model(tmp_path / "m")
    assert cli("inspect", str(vocab), "--verify", "--json").json["verified"] is True
    assert cli("inspect", str(model), "--verify", "--json").json["verified"] is True
    for place in (vocab, model):
        assert "all files match their checksums" in cli("inspect", str(place), "--verify").out
        assert "checksums" not in cli("inspect", str(place)).out
        assert cli("inspect", str(place), "--json").json["verified"] is False
    for file in (vocab / "items.parquet", model / "model.safetensors"):
        data = bytearray(file.read_bytes())
        data[-9] ^= 1
        file.write_bytes(data)
        outcome = cli("inspect", str(file.parent), "--verify")
        assert outcome.code == 2 and str(file.parent) in outcome.err and outcome.out == ""


def test_verify_is_not_for_recommendations(cli: RunCli, made: Path) -> None:
    _recommend(cli, made)
    outcome = cli("inspect", "recs", "--verify")
    assert outcome.code == 2 and outcome.out == "" and "below" not in outcome.err
    assert "next: xgr inspect recs" in outcome.err


def test_anything_else_is_an_error_that_says_what_it_may_be(cli: RunCli, made: Path) -> None:
    Path("empty").mkdir()
    Path("checkpoint").mkdir()
    Path("checkpoint/config.json").write_text("{}")
    Path("foreign").mkdir()
    Path("foreign/part-00000.parquet").touch()
    Path("broken/_xgr").mkdir(parents=True)
    Path("broken/_xgr/manifest.json").write_text("{")
    for place, word in (
        ("nowhere", "no such file"),
        ("empty", "empty"),
        ("checkpoint", "xgr convert"),
        ("foreign", "part files"),
        ("broken", "manifest"),
        (str(made / "users.parquet"), "build-vocab"),
    ):
        outcome = cli("inspect", place)
        assert outcome.code == 2, place
        assert word in outcome.err and outcome.out == ""


def test_device_file_is_bad_input(cli: RunCli) -> None:
    run = cli("inspect", "/dev/null")
    assert run.code == 2 and "neither a file nor a directory" in run.err

"""``xgr build-vocab`` as users type it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from xgr_cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def xgr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main.run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write(name: str, table: dict[str, Any]) -> None:
    pq.write_table(pa.table(table), name)


def test_defaults(xgr: Run) -> None:
    write("catalog.parquet", {"item_id": ["a", "b"], "sid": [[1, 2], [1, 2]], "title": ["A", "B"]})
    code, out, err = xgr("build-vocab", "catalog.parquet")
    assert code == 0 and sorted(path.name for path in Path("vocab").iterdir())[0] == "items.parquet"
    assert "2 items on 1 SIDs" in out and "title (string)" in out and "built the vocabulary" in err
    code, _, err = xgr("build-vocab", "catalog.parquet")
    assert code == 0 and "nothing to do" in err


def test_json_and_update(xgr: Run) -> None:
    write("one.parquet", {"item_id": [1, 2], "sid": [[1, 2], [1, 3]]})
    write("two.parquet", {"item_id": [2, 3], "sid": [[1, 4], [1, 3]]})
    assert xgr("build-vocab", "one.parquet", "--out", "v", "-q")[0] == 0
    code, out, err = xgr("build-vocab", "two.parquet", "--out", "v", "--json")
    assert (code, out) == (2, "") and "holds another vocabulary" in err and "--update" in err
    code, out, err = xgr("build-vocab", "two.parquet", "--out", "v", "--update", "--json")
    record = json.loads(out)
    assert code == 0 and record["action"] == "updated" and record["num_items"] == 2 and record["path"] == "v"
    examples = {"added": [3], "removed": [1], "moved": [2]}
    assert record["changes"] == {"added": 1, "removed": 1, "moved": 1, "kept": 0, "examples": examples}
    assert all(warning in err for warning in record["warnings"])


def test_every_option_reaches_the_engine(xgr: Run) -> None:
    write(
        "c.dat",
        {"pid": [7, 5, 6], "code_0": [1, 1, 1], "code_1": [2, 2, 2], "views": [1, 9, None], "brand": ["x", "y", "z"]},
    )
    code, out, err = xgr(
        *(
            "build-vocab",
            "c.dat",
            "--out",
            "v",
            "--format",
            "table",
            "--item-col",
            "pid",
            "--sid-col",
            "code",
            "--json",
        ),
        *("--attributes", "brand", "--rank-column", "views", "--rank-desc", "--codebook", "32x2"),
    )
    assert code == 0, err
    record = json.loads(out)
    assert record["codebook"] == [32, 32] and record["rank"] == {"column": "views", "descending": True}
    assert record["attributes"] == {"brand": "string"}
    assert pq.read_table("v/items.parquet")["item_id"].to_pylist() == [5, 7, 6]
    code, _, err = xgr(
        *("build-vocab", "c.dat", "--out", "w", "--item-col", "pid", "--sid-col", "code", "--collisions", "error"),
    )
    assert code == 2 and "shared" in err and not Path("w").exists()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["absent.parquet"], "absent.parquet"),
        (["c.parquet", "--format", "tiger"], "lcrec-index"),
        (["c.parquet", "--codebook", "many"], "--codebook"),
        (["c.parquet", "--sid-col", "codes"], "--sid-col"),
        (["c.parquet", "--rank-column", "sales"], "sales"),
        (["c.parquet", "--attributes", "colour"], "colour"),
        ([], "CATALOG"),
    ],
)
def test_bad_usage_exits_2_and_writes_nothing(xgr: Run, arguments: list[str], names: str) -> None:
    write("c.parquet", {"item_id": [1], "sid": [[1]]})
    code, out, err = xgr("build-vocab", *arguments)
    assert code == 2 and out == "" and names in err
    assert sorted(path.name for path in Path().iterdir()) == ["c.parquet"]

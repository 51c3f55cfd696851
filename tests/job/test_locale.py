"""Names and ids beyond ASCII where the locale knows ASCII alone, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_support import make_model, make_vocabulary

LOCALES = [
    {"LC_ALL": "C", "PYTHONUTF8": "0"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C"},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``vocab``, ``model`` and ``users.parquet`` in a directory, with ids and titles, none of it ASCII."""
    root = tmp_path_factory.mktemp("locale") / "Plätze 日本"
    root.mkdir()
    make_vocabulary(root / "vocab", [f"ä{i}" for i in range(40)], [f"Tïtel {i}" for i in range(40)])
    make_model(root / "model")
    histories = [["ä1", "ä2"], ["日本"]]
    pq.write_table(pa.table({"user_id": ["ü1", "ü2"], "history": histories}), root / "users.parquet")
    return root


def xgr(place: Path, locale: dict[str, str], *arguments: str | bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "xgr_cli.main", *arguments],
        cwd=place.parent,
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", **locale},
        capture_output=True,
        timeout=120,
    )


@pytest.mark.parametrize("locale", LOCALES, ids=["C", "POSIX", "utf8-mode"])
def test_a_job_with_names_that_the_locale_cannot_spell(place: Path, tmp_path: Path, locale: dict[str, str]) -> None:
    out = tmp_path / "Ausgabe ½"
    given = ["--in", f"{place.name}/users.parquet", "--model", f"{place.name}/model", "--vocab", f"{place.name}/vocab"]
    given += ["--where", "title <> 'Tïtel 3'", "--max-rejects", "1", "--beam", "8", "--top-k", "3"]
    text = xgr(place, locale, "recommend", *given, "--out", str(out))
    assert text.returncode == 0, text.stderr.decode()
    assert b"users=1, items=3" in text.stdout
    rows = pq.ParquetFile(out / "part-00000-of-00001.parquet").read().to_pylist()
    assert [row["user_id"] for row in rows] == ["ü1", "ü2"] and rows[0]["items"][0]["item_id"].startswith("ä")
    record = json.loads((out / "_xgr" / "manifest.json").read_text(encoding="utf-8"))
    assert record["inputs"][0]["path"] == f"{place.name}/users.parquet"
    shown = xgr(place, locale, "inspect", str(out), "--json")
    assert json.loads(shown.stdout.decode("utf-8"))["path"].endswith("½"), shown.stderr.decode()
    refused = xgr(place, locale, "recommend", *given, "--out", str(tmp_path / "no"), "--on-unknown", "fail")
    assert refused.returncode == 2 and b"is not in the catalog" in refused.stderr
    assert "日本" in refused.stderr.decode("utf-8") or b"\\u65e5\\u672c" in refused.stderr


def test_a_name_that_is_no_utf8_is_a_usage_error(place: Path) -> None:
    catalog = f"{place.name}/vocab.catalog.parquet"
    refused = xgr(place, LOCALES[0], "build-vocab", catalog, "--out", b"name-\xff")
    assert refused.returncode == 2 and b"not valid UTF-8: " in refused.stderr and b"name-\\udcff" in refused.stderr
    assert not [left for left in place.parent.iterdir() if left != place]

"""Files that --compare is given: damaged records are named with the field, and what is no record is refused."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compare_support import LIMIT, Record, whole_record

from xgr_engine.bench.compare import compare_files
from xgr_engine.bench.record import read_record, write_record
from xgr_engine.errors import InputError


@pytest.fixture
def record() -> Record:
    return whole_record()


def _put(record: Record, place: str, value: object) -> Record:
    record = copy.deepcopy(record)
    *way, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    target: Any = record
    for part in way:
        target = target[part]
    target[last] = value
    return record


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("machine.device_name", None, "machine.device_name must be a text, not null"),
        ("machine.device_name", {"a": 1}, "machine.device_name must be a text"),
        pytest.param("rows.0.contenders.1.latency_ms.p50.value", 10**400, "value is too large a number", id="10**400"),
        ("rows.0.contenders.1.latency_ms.p50.value", True, "latency_ms.p50.value must be a number, not True"),
        ("rows.0.contenders.1.latency_ms.p50.value", -1, "must be a number from 0 on"),
        ("rows.0.contenders.1.latency_ms.p50.low", None, "latency_ms.p50 needs low and high"),
        ("rows.1.contenders.0.host_own_bytes", "5 MB", "rows[1].contenders[0].host_own_bytes must be a number"),
        ("rows.1.beam", [8], "rows[1].beam must be a whole number"),
        ("rows.1.model", {}, "rows[1].model must be a text"),
        ("rows.1.contenders", None, "rows[1].contenders must be a list"),
        ("online.0", 1, "online[0] must be an object"),
        ("options", [], "options must be an object"),
        ("options.beams", None, "options.beams must be a list"),
        ("subject", "model", "subject must be an object"),
        ("constraint.sizes.0", None, "constraint.sizes[0] must be an object"),
        ("left_out", [1], "left_out[0] must be an object"),
        ("warnings", [1], "warnings[0] must be a text"),
        ("rows.0.contenders.1.latency_ms.samples", "3", "latency_ms.samples must be a whole number"),
        ("state", 1, "state must be a text"),
    ],
)
def test_damaged_records_are_named_with_the_field(
    record: Record, tmp_path: Path, place: str, value: object, said: str
) -> None:
    write_record(tmp_path / "whole.json", record)
    write_record(tmp_path / "damaged.json", _put(record, place, value))
    for pair in (("whole.json", "damaged.json"), ("damaged.json", "whole.json")):
        with pytest.raises(InputError, match=r"damaged\.json: fields of") as raised:
            compare_files(tmp_path / pair[0], tmp_path / pair[1], LIMIT)
        assert said in raised.value.why


def test_files_that_are_no_records_are_refused(record: Record, tmp_path: Path) -> None:
    write_record(tmp_path / "a.json", record)
    (tmp_path / "bom.json").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.json").read_bytes())
    assert read_record(tmp_path / "bom.json") == record
    for version in (True, 1.0, "1", None, 2):
        (tmp_path / "b.json").write_text(json.dumps({**record, "schema_version": version}))
        with pytest.raises(InputError, match="has schema version"):
            read_record(tmp_path / "b.json")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match="is not a regular file"):
            read_record(place)


@pytest.mark.parametrize(
    ("content", "what", "why"),
    [
        (None, "there is no such file", ""),
        (b"", "is not the result of a benchmark", "it is empty"),
        (b"{\n  x", "is not the result of a benchmark", "it is not JSON: line 2, column 3"),
        (b"PAR1\xff\xfe", "is not the result of a benchmark", "it is not UTF-8 text, so it is not JSON"),
        (b"[" * 100_000, "is not the result of a benchmark", "its JSON is nested too deeply"),
        (b'{"kind": "manifest"}', "is not the result of a benchmark", 'its kind is "manifest", not bench'),
        (b"[1]", "is not the result of a benchmark", "it names no kind"),
        (b"9" * 5000, "is not the result of a benchmark", "it holds a number with too many digits"),
    ],
    ids=["missing", "empty", "text", "binary", "deep", "manifest", "list", "digits"],
)
def test_what_is_no_record_is_refused_in_words(tmp_path: Path, content: bytes | None, what: str, why: str) -> None:
    """Not in those of the system or of a codec."""
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as raised:
        read_record(path)
    assert (raised.value.what, raised.value.why) == (f"{path}: {what}", why)
    assert "xgr bench wrote with --out" in raised.value.hint


def test_exit_codes_tell_a_regression_from_damaged_input(record: Record, tmp_path: Path) -> None:
    running = {**copy.deepcopy(record), "state": "running"}
    running["rows"].pop()
    for name, one in (("a", record), ("b", running), ("c", _put(record, "machine.device_name", None))):
        write_record(tmp_path / f"{name}.json", one)

    def compare(*names: str) -> subprocess.CompletedProcess[str]:
        files = [str(tmp_path / f"{name}.json") for name in names]
        command = [sys.executable, "-m", "xgr_cli.main", "bench", "compare", *files, "--fail-over", "5%"]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert compare("a", "a").returncode == 0
    worse = compare("a", "b")
    assert worse.returncode == 1 and "missing" in worse.stdout
    assert "b.json: is not a complete result, its state is running" in worse.stderr
    damaged = compare("a", "c")
    assert damaged.returncode == 2 and damaged.stdout == ""
    assert "c.json: fields of" in damaged.stderr and "machine.device_name" in damaged.stderr

"""``s3://`` for inputs and outputs, against a local S3 server that the tests start on the loopback interface."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filter_support import lists_of, make_assets, options_for, write_users

pytest.importorskip("moto.server", reason="no local S3 server: moto[server] of the dev extra is not installed")

from pyarrow import fs

from xgr_cli.main import run
from xgr_engine.errors import (
    HistoryError,
    InputError,
    OutputExistsError,
    OutputLockedError,
    OutputWriteError,
    UsageError,
)
from xgr_engine.job import remote as remote_module
from xgr_engine.job.filesystems import list_remote, open_remote
from xgr_engine.job.inputs import find_partitioned, open_inputs
from xgr_engine.job.lock import hold
from xgr_engine.job.options import HistoryOptions, OperationOptions
from xgr_engine.job.run import Caller, plan_job, run_job


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_assets(tmp_path_factory.mktemp("store-assets"))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """An empty bucket."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"b{abs(hash(request.node.name)) % 10**12}"
    store = fs.S3FileSystem(
        endpoint_override=endpoint.removeprefix("http://"), scheme="http", region="us-east-1",
        access_key="key", secret_key="secret", allow_bucket_creation=True,
    )  # fmt: skip
    store.create_dir(name)
    return name


def upload(uri: str, content: Path | bytes) -> None:
    place = open_remote(uri)
    with place.filesystem.open_output_stream(place.key, compression=None) as stream:
        stream.write(content if isinstance(content, bytes) else content.read_bytes())


def objects(uri: str) -> dict[str, int]:
    return remote_module.RemoteOutput.open(uri).sizes()


def download(uri: str, folder: Path) -> Path:
    place = open_remote(uri)
    for name in objects(uri):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with place.filesystem.open_input_stream(f"{place.key}/{name}") as stream:
            target.write_bytes(stream.read())
    return folder


def remote_options(tmp_path: Path, assets: tuple[Path, Path], users: Any, out: str, **given: Any) -> Any:
    operation = OperationOptions(cache_dir=str(tmp_path / "cache"))
    return options_for(tmp_path, *assets, users, out=out, operation=operation, **given)


def test_a_run_from_bucket_to_bucket_equals_a_local_one(assets: tuple[Path, Path], tmp_path: Path, bucket: str) -> None:
    users = write_users(tmp_path / "users.parquet", 11, country=["AT"] * 11)
    upload(f"s3://{bucket}/in/dt=2026-11-29/a.parquet", users)
    upload(f"s3://{bucket}/in/dt=2026-11-30/b.parquet", users)
    upload(f"s3://{bucket}/in/_SUCCESS", b"")
    local = tmp_path / "in"
    for day, name in (("29", "a"), ("30", "b")):
        (local / f"dt=2026-11-{day}").mkdir(parents=True)
        (local / f"dt=2026-11-{day}" / f"{name}.parquet").write_bytes(users.read_bytes())
    given: dict[str, Any] = {"shard_rows": 4, "match": ("country",), "partition_by": ("dt",)}
    run_job(options_for(tmp_path, *assets, local, **given))
    out = f"s3://{bucket}/out/recs"
    options = remote_options(tmp_path, assets, f"s3://{bucket}/in", out, **given)
    plan = plan_job(options).record
    assert plan["output"]["path"] == out and plan["rows"] == 22
    report = run_job(options)
    assert report.failure is None and report.record["published"]["parts"] == 6
    fetched = download(out, tmp_path / "fetched")
    for part in sorted((tmp_path / "recs").rglob("part-*.parquet")):
        same = fetched / part.relative_to(tmp_path / "recs")
        assert pq.ParquetFile(same).read().equals(pq.ParquetFile(part).read())
    manifest = json.loads((fetched / "_xgr" / "manifest.json").read_text())
    assert manifest["state"] == "done" and manifest["options"]["out"]["value"] == out
    assert (fetched / "_SUCCESS").read_bytes() == b"" and (fetched / "_xgr" / "rejects.parquet").exists()
    assert not list((tmp_path / "cache" / "outputs").iterdir())
    assert run_job(options).record["state"] == "nothing-to-do"


def test_an_output_of_another_run_or_of_others_is_not_touched(
    assets: tuple[Path, Path], tmp_path: Path, bucket: str
) -> None:
    users, out = write_users(tmp_path / "users.parquet", 3), f"s3://{bucket}/recs"
    run_job(remote_options(tmp_path, assets, users, out))
    with pytest.raises(OutputExistsError, match="holds the output of another run: --shard-rows"):
        run_job(remote_options(tmp_path, assets, users, out, shard_rows=2))
    with pytest.raises(OutputExistsError, match="holds the output of another run: --shard-rows"):
        plan_job(remote_options(tmp_path, assets, users, out, shard_rows=2))
    plans = [plan_job(remote_options(tmp_path, assets, users, out, fresh=fresh)).record for fresh in (False, True)]
    assert [(plan["output"]["state"], plan["output"]["shards_finished"]) for plan in plans] == [("done", 1), ("new", 0)]
    assert run_job(remote_options(tmp_path, assets, users, out, shard_rows=2, fresh=True)).failure is None
    assert sorted(name for name in objects(out) if name.startswith("part")) == [
        "part-00000-of-00002.parquet", "part-00001-of-00002.parquet",
    ]  # fmt: skip
    upload(f"{out}/notes.txt", b"mine")
    for fresh in (False, True):
        with pytest.raises(OutputExistsError, match=r"did not write: notes.txt"):
            run_job(remote_options(tmp_path, assets, users, out, shard_rows=2, fresh=fresh))
    with pytest.raises(UsageError, match="name a folder"):
        run_job(remote_options(tmp_path, assets, users, f"s3://{bucket}"))
    with pytest.raises(UsageError, match="one contains the other"):
        run_job(remote_options(tmp_path, assets, f"s3://{bucket}/recs/in", out))


@pytest.mark.parametrize("job", [plan_job, run_job])
def test_a_bucket_that_does_not_exist_is_said_before_anything_is_computed(
    assets: tuple[Path, Path], tmp_path: Path, bucket: str, job: Any
) -> None:
    """Its listing is empty, like that of a new folder; the upload failed after the last shard."""
    options = remote_options(tmp_path, assets, write_users(tmp_path / "users.parquet", 3), "s3://not-there/recs")
    with pytest.raises(InputError, match="there is no bucket not-there"):
        job(options)
    assert not (tmp_path / "cache" / "outputs").exists()


def test_interrupted_publishing_goes_on_without_computing(
    assets: tuple[Path, Path], tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until all is there, _SUCCESS is not."""
    users, out = write_users(tmp_path / "users.parquet", 6), f"s3://{bucket}/recs"
    options = remote_options(tmp_path, assets, users, out, shard_rows=2)
    put, calls = remote_module.RemoteOutput.put, []

    def failing(self: Any, name: str, content: Any) -> int:
        calls.append(name)
        if len(calls) == 3:
            raise OSError("the network is gone")
        return put(self, name, content)

    monkeypatch.setattr(remote_module.RemoteOutput, "put", failing)
    with pytest.raises(OutputWriteError, match="the network is gone"):
        run_job(options)
    assert calls[0] == "_xgr/manifest.json" and "_SUCCESS" not in objects(out) and len(objects(out)) == 2
    monkeypatch.setattr(remote_module.RemoteOutput, "put", put)
    report = run_job(options)
    assert report.record["state"] == "nothing-to-do" and report.record["published"]["parts"] == 3
    assert report.record["out"] == out
    assert "_SUCCESS" in objects(out) and len(lists_of(download(out, tmp_path / "fetched"))) == 6


def test_a_run_that_publishes_still_holds_the_output(
    assets: tuple[Path, Path], tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both published at once: one removed what the other was sending, and an empty part stood beside _SUCCESS."""
    users, out = write_users(tmp_path / "users.parquet", 6), f"s3://{bucket}/recs"
    options = remote_options(tmp_path, assets, users, out, shard_rows=2)
    put, refused = remote_module.RemoteOutput.put, []

    def second_run(self: Any, name: str, content: Any) -> int:
        with pytest.raises(OutputLockedError, match=f"{out}: another run holds this output") as error:
            run_job(options)
        refused.append(error)
        return put(self, name, content)

    monkeypatch.setattr(remote_module.RemoteOutput, "put", second_run)
    assert run_job(options).record["published"]["parts"] == 3 and len(refused) == 6
    assert len(lists_of(download(out, tmp_path / "fetched"))) == 6
    assert not list((tmp_path / "cache" / "outputs").iterdir())


def test_a_run_that_waited_for_the_one_that_published_has_nothing_to_do(
    assets: tuple[Path, Path], tmp_path: Path, bucket: str
) -> None:
    users, out = write_users(tmp_path / "users.parquet", 6), f"s3://{bucket}/recs"
    options = remote_options(tmp_path, assets, users, out)
    waits = replace(options, operation=replace(options.operation, wait=600.0))
    lock = remote_module.staging_of(options).with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    other = ExitStack()
    other.enter_context(hold(lock))
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        other.close()
        assert run_job(options).record["published"]["parts"] == 1

    report = run_job(waits, Caller(note=note))
    assert report.record["state"] == "nothing-to-do" and "published" not in report.record
    assert len(notes) == 1 and notes[0].startswith(f"waiting for the run that holds {out} (process ")


def test_a_file_that_cannot_be_read_leaves_no_empty_object(tmp_path: Path, bucket: str) -> None:
    store = remote_module.RemoteOutput.open(f"s3://{bucket}/recs")
    with pytest.raises(FileNotFoundError):
        store.put("part", tmp_path / "part")
    assert store.sizes() == {}


def test_a_failed_run_publishes_nothing(assets: tuple[Path, Path], tmp_path: Path, bucket: str) -> None:
    empty = pa.array([[100], []], pa.list_(pa.int64()))
    pq.write_table(pa.table({"user_id": ["a", "b"], "history": empty}), tmp_path / "users.parquet")
    out = f"s3://{bucket}/recs"
    report = run_job(remote_options(tmp_path, assets, tmp_path / "users.parquet", out, max_rejects="0"))
    assert report.failure is not None and objects(out) == {}
    assert run_job(remote_options(tmp_path, assets, tmp_path / "users.parquet", out, max_rejects="1")).failure is None
    assert "_SUCCESS" in objects(out)


def test_damage_to_a_finished_output_in_the_store_is_said(
    assets: tuple[Path, Path], tmp_path: Path, bucket: str
) -> None:
    """A part of another size, a part that is gone, a manifest that cannot be read."""
    pq.write_table(pa.table({"user_id": ["a"], "history": pa.array([[100]])}), tmp_path / "users.parquet")
    out = f"s3://{bucket}/recs"
    options = remote_options(tmp_path, assets, tmp_path / "users.parquet", out)
    run_job(options)
    assert run_job(options).record["state"] == "nothing-to-do"
    upload(f"{out}/part-00000-of-00001.parquet", b"PAR1")
    with pytest.raises(OutputExistsError, match="missing or damaged: part-00000-of-00001"):
        run_job(options)
    upload(f"{out}/_xgr/manifest.json", b"{")
    with pytest.raises(OutputExistsError, match="is damaged"):
        run_job(options)
    fresh = remote_options(tmp_path, assets, tmp_path / "users.parquet", out, fresh=True)
    assert run_job(fresh).record["state"] == "done"
    assert run_job(options).record["state"] == "nothing-to-do"


def test_objects_globs_and_prefixes(tmp_path: Path, bucket: str) -> None:
    root = f"s3://{bucket}/users"
    for name in ("dt=1/a.parquet", "dt=1/_b.parquet", "dt=2/c.csv", "dt=2/deep/d.parquet", "_x/e.parquet"):
        upload(f"{root}/{name}", b"x")

    def found(uri: str) -> list[str]:
        return [file.key.removeprefix(f"{bucket}/users/") for file in list_remote(uri)[1]]

    assert found(root) == found(root + "/") == ["dt=1/a.parquet", "dt=2/c.csv", "dt=2/deep/d.parquet"]
    assert found(f"{root}/*/*.parquet") == ["dt=1/a.parquet"]
    assert found(f"{root}/**/*.parquet") == ["dt=1/a.parquet", "dt=2/deep/d.parquet"]
    assert found(f"{root}/dt=[2-3]/?.csv") == ["dt=2/c.csv"]
    assert found(f"{root}/dt=2*/") == ["dt=2/c.csv", "dt=2/deep/d.parquet"]
    assert found(f"{root}/dt=1/a.parquet") == ["dt=1/a.parquet"] and found(f"{root}/nothing") == []
    partitions = [dict(partition) for _, partition in find_partitioned((root,))]
    assert partitions == [{"dt": "1"}, {"dt": "2"}, {"dt": "2"}]
    assert find_partitioned((f"{root}/dt=1/a.parquet",))[0][1] == ()
    assert dict(find_partitioned((f"{root}/dt=1",))[0][1]) == {"dt": "1"}
    assert dict(find_partitioned((f"{root}/*/a.parquet",))[0][1]) == {"dt": "1"}
    with pytest.raises(HistoryError, match="no input file"):
        find_partitioned((f"{root}/nothing",))
    with pytest.raises(HistoryError, match="named twice"):
        find_partitioned((root, f"{root}/dt=2/c.csv"))


def test_text_objects_and_a_changed_object(assets: tuple[Path, Path], tmp_path: Path, bucket: str, capsys: Any) -> None:
    import gzip

    lines = "\n".join(json.dumps({"user_id": f"u{i}", "history": [100 + i]}) for i in range(5))
    upload(f"s3://{bucket}/a.jsonl.gz", gzip.compress(lines.encode()))
    upload(f"s3://{bucket}/b.csv", b'user_id,history\nu5,"[101]"\n')
    assert open_inputs(HistoryOptions((f"s3://{bucket}/a.jsonl.gz",))).rows == 5
    command = ["recommend", "--in", f"s3://{bucket}/b.csv", "--list-text", "json", "--device", "cpu", "--beam", "8"]
    paths = ["--model", str(assets[1]), "--vocab", str(assets[0]), "--out", f"s3://{bucket}/recs", "--top-k", "3"]
    assert run([*command, *paths, "--cache-dir", str(tmp_path / "cache"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["published"]["to"] == f"s3://{bucket}/recs"
    inputs = open_inputs(HistoryOptions((f"s3://{bucket}/b.csv",)))
    from xgr_engine.job.inputs import RowReader

    upload(f"s3://{bucket}/b.csv", b'user_id,history\nu5,"[101]"\nu6,"[102]"\n')
    with pytest.raises(HistoryError, match="changed during the run"):
        RowReader(inputs).read(0, 0, 1)


def test_names_of_places() -> None:
    """Options of the store follow a question mark; any other question mark is a pattern."""
    given = "region=eu-central-1&endpoint_override=localhost:9000&scheme=http"
    assert open_remote(f"s3://bucket/a/b/?{given}").key == "bucket/a/b"
    assert open_remote(f"s3://bucket/a?b/dt=?/x?.csv?{given}").key == "bucket/a?b/dt=?/x?.csv"
    with pytest.raises(InputError, match="cannot be opened"):
        open_remote("s3://bucket/a?no_such_option=1")


def test_what_is_not_there_is_said(bucket: str) -> None:
    with pytest.raises(FileNotFoundError):
        open_remote(f"s3://{bucket}/nothing").file(f"{bucket}/nothing").stat()
    for uri in (f"s3://{bucket}/nothing", "s3://a-bucket-that-is-not-there/*.parquet"):
        with pytest.raises(HistoryError, match="no input file"):
            find_partitioned((uri,))

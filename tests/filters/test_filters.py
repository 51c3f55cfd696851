"""``--where``, item files and ``--match`` through the whole job: what is written, what is refused, what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from filter_support import ITEMS, lists_of, make_assets, make_filter_vocabulary, of_items, options_for, write_users

from xgr_cli.main import run
from xgr_engine.catalog.vocabulary import load_vocabulary
from xgr_engine.errors import HistoryError, InputError, OutputExistsError, UsageError, XgrError
from xgr_engine.job.filters import open_filters
from xgr_engine.job.options import RecommendOptions
from xgr_engine.job.run import plan_job, run_job
from xgr_engine.options import SearchOptions


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_assets(tmp_path_factory.mktemp("filter-assets"))


ALL = SearchOptions(beam=40, top_k=40)


def opened(assets: tuple[Path, Path], **given: Any) -> Any:
    options = options_for(Path("unused"), *assets, "users.parquet", **given)
    return open_filters(options.filters, options.histories.match, load_vocabulary(assets[0]))


WHERE = {
    "category = 'books' and in_stock": lambda c, s, p: c == "books" and s is True,
    "in_stock": lambda c, s, p: s is True,
    "not in_stock": lambda c, s, p: s is False,
    "in_stock is null": lambda c, s, p: s is None,
    "price < 5 or category in ('toys', 'garden')": lambda c, s, p: (p is not None and p < 5) or c in ("toys", "garden"),
    "category <> 'books'": lambda c, s, p: c is not None and c != "books",
    "price between 3 and 7.5 and category like 'b%'": lambda c, s, p: p is not None and 3 <= p <= 7.5 and c == "books",
}


@pytest.mark.parametrize("where", WHERE)
def test_only_items_that_the_expression_is_true_for(assets: tuple[Path, Path], tmp_path: Path, where: str) -> None:
    """cases.md: STATIC's freshness rule: only those. Null is false."""
    users = write_users(tmp_path / "users.parquet", 7)
    report = run_job(options_for(tmp_path, *assets, users, ALL, where=where))
    category, stock, price = (of_items(name) for name in ("category", "in_stock", "price"))
    wanted = {item for item in ITEMS if WHERE[where](category[item], stock[item], price[item])}
    assert 0 < len(wanted) < 40
    for got in lists_of(tmp_path / "recs"):
        assert {item for item, _ in got or []} == wanted
    assert report.failure is None and report.record["audit"]["filtered"] == 0
    assert "filtered=0" in report.record["audit"]["line"] and report.record["audit"]["short"] == 7
    assert report.record["filters"]["allowed"] == len(wanted)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("categroy = 'books'", "no attribute 'categroy'"),
        ("category = ", "not an SQL expression"),
        ("category", "gives String, not true or false"),
        ("price > 'a'", "cannot be computed: cannot compare"),
        ("sum(price) > 3", "1 values for 40 items"),
        ("true", "names no attribute"),
        ("price > 1e9", "leaves none of the catalog's 40 items"),
        ("  ", "is empty"),
        ("select 1", "not an SQL expression"),
    ],
)
def test_expressions_that_cannot_decide_are_usage_errors(assets: tuple[Path, Path], where: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        opened(assets, where=where)
    assert caught.value.exit_code == 2
    if "categroy" in where:
        assert "did you mean category" in caught.value.hint and "in_stock" in caught.value.why


def test_one_boolean_an_item_may_compare_with_an_aggregate_and_name_the_item(assets: tuple[Path, Path]) -> None:
    assert opened(assets, where="price < avg(price)").counts["allowed"] == 18
    assert opened(assets, where="item_id in (105, 7)").counts["allowed"] == 1


def write_list(path: Path, ids: list[Any], column: str = "item_id") -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({column: ids, "note": ["x"] * len(ids)}), path)
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(pa.table({column: ids, "note": ["x"] * len(ids)}), path)
    else:
        path.write_text("\n".join(map(str, ids)) + "\n\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["ids.txt", "ids", "ids.csv", "ids.parquet"])
@pytest.mark.parametrize("text", [False, True])
def test_item_files_match_by_canonical_text(assets: tuple[Path, Path], tmp_path: Path, name: str, text: bool) -> None:
    ids = [str(item) for item in (101, 103, 999)] if text else [101, 103, 999]
    path = str(write_list(tmp_path / name, ids))
    allowing, denying = opened(assets, allow_items=(path,)), opened(assets, deny_items=(path,))
    assert allowing.counts["allowed"] == 2 and denying.counts["allowed"] == 38
    assert allowing.counts["allow_items_unknown"] == 1 and "1 of 3 ids" in allowing.notes[0]
    assert "999" in denying.notes[0] and (allowing.allowed ^ denying.allowed).all()


def test_an_item_file_must_name_items(assets: tuple[Path, Path], tmp_path: Path) -> None:
    """cases.md: vllm#34782: an empty file is an error, not an ignored option."""
    for name in ("a.txt", "a.csv"):
        (tmp_path / name).write_text("\n")
        for option in ("allow_items", "deny_items"):
            with pytest.raises(InputError, match="names no item"):
                opened(assets, **{option: (str(tmp_path / name),)})
    with pytest.raises(InputError, match="names no item"):
        opened(assets, allow_items=(str(write_list(tmp_path / "b.parquet", [])),))
    with pytest.raises(InputError, match="cannot be read"):
        opened(assets, allow_items=(str(tmp_path / "missing.txt"),))
    with pytest.raises(InputError, match="names no item"):
        opened(assets, deny_items=(str(write_list(tmp_path / "n.parquet", [float("nan")])),))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(InputError, match="cannot be read"):
        opened(assets, allow_items=(str(tmp_path / "bad.parquet"),))
    with pytest.raises(UsageError, match="--allow-items leaves none"):
        opened(assets, allow_items=(str(write_list(tmp_path / "c.txt", [7])),))
    with pytest.raises(InputError, match="no column 'item_id'"):
        opened(assets, allow_items=(str(write_list(tmp_path / "d.csv", [101], "sku")),))
    assert opened(assets, allow_items=(str(tmp_path / "d.csv"),), items_col="sku").counts["allowed"] == 1


def test_item_files_that_would_lose_items_are_refused(assets: tuple[Path, Path], tmp_path: Path) -> None:
    """A list of items that must not be recommended, taken for something else, would be no list at all."""
    for name, text, said in (
        ("bare.csv", "101\n102\n", "the first line is the item 101, not the name of a column"),
        ("twice.csv", "item_id,item_id\n101,102\n", "two columns are named 'item_id'"),
        ("lines.jsonl", '{"item_id": 101}\n', "is JSON"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=f"^--deny-items .*{name}: {said}"):
            opened(assets, deny_items=(str(tmp_path / name),))
    pq.write_table(pa.table({"item_id": [True]}), tmp_path / "bool.parquet")
    with pytest.raises(InputError, match=r"^--deny-items .*bool\.parquet: item ids of type bool"):
        opened(assets, deny_items=(str(tmp_path / "bool.parquet"),))
    (tmp_path / "other.csv").write_text("product\n101\n")
    assert opened(assets, deny_items=(str(tmp_path / "other.csv"),)).counts["allowed"] == 39


def test_an_id_ends_with_its_line(assets: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("101\r\n102\r103\n1\x1c04\u2028105\n".encode())
    found = opened(assets, deny_items=(str(tmp_path / "a.txt"),)).counts
    assert (found["deny_items_ids"], found["deny_items_unknown"], found["allowed"]) == (4, 1, 37)


def test_filters_work_together_with_exclusions(assets: tuple[Path, Path], tmp_path: Path) -> None:
    """Several files of one option are one list; what is both allowed and denied is denied."""
    deny = pa.array([[101], [], None, [102, 999]], pa.list_(pa.int64()))
    users = write_users(tmp_path / "users.parquet", 4, deny=deny)
    first, second = write_list(tmp_path / "a.txt", range(100, 110)), write_list(tmp_path / "b.txt", range(105, 120))
    denied = write_list(tmp_path / "c.txt", [104, 999])
    options = options_for(
        tmp_path, *assets, users, ALL, where="category is not null", allow_items=(str(first), str(second)),
        deny_items=(str(denied),), exclude_seen=True, exclude_col="deny",
    )  # fmt: skip
    report = run_job(options)
    category = of_items("category")
    histories = pq.read_table(users)["history"].to_pylist()
    for user, got in enumerate(lists_of(tmp_path / "recs")):
        wanted = {item for item in range(100, 120) if category[item] is not None and item != 104}
        assert {item for item, _ in got or []} == wanted - {*histories[user], *(deny[user].as_py() or [])}
    assert report.failure is None and report.record["counts"]["unknown_exclusions"] == 1
    assert report.record["audit"]["line"].endswith("invalid=0, duplicate=0, seen=0, filtered=0, short=4")


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_each_user_gets_items_of_the_own_value(assets: tuple[Path, Path], tmp_path: Path, kind: str) -> None:
    """Equal by canonical text; null equals nothing, on either side; a value that no item has gives an empty list."""
    values = ["AT", "DE", None, "XX", "CH", "at"]
    path = write_users(tmp_path / "users.parquet", 6, home=values, size=pa.array([0, 1, 2, 3, 1, 2]))
    if kind != "parquet":
        rows = pq.read_table(path).to_pylist()
        path = tmp_path / f"users.{kind}"
        if kind == "jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        else:
            lines = [f'{r["user_id"]},"{r["history"]}",{r["home"] or ""},{r["size"]}' for r in rows]
            path.write_text("\n".join(["user_id,history,home,size", *lines]))
    given: dict[str, Any] = {"list_text": "json"} if kind == "csv" else {}
    report = run_job(options_for(tmp_path, *assets, path, ALL, match=("country=home",), **given))
    country = of_items("country")
    for value, got in zip(values, lists_of(tmp_path / "recs"), strict=True):
        assert {item for item, _ in got or []} == {item for item in ITEMS if value and country[item] == value}
    assert report.failure is None and report.record["counts"]["without_match"] == 3
    assert (
        report.record["audit"]["filtered"] == 0
        and "home" not in pq.read_schema(tmp_path / "recs" / "part-00000-of-00001.parquet").names
    )
    both = options_for(
        tmp_path,
        *assets,
        path,
        ALL,
        match=("country=home", "brand=size"),
        where="in_stock",
        out=str(tmp_path / "two"),
        **given,
    )
    run_job(both)
    brand, stock = of_items("brand"), of_items("in_stock")
    for value, size, got in zip(values, [0, 1, 2, 3, 1, 2], lists_of(tmp_path / "two"), strict=True):
        wanted = {i for i in ITEMS if value and country[i] == value and brand[i] == size and stock[i]}
        assert {item for item, _ in got or []} == wanted


def test_matching_that_cannot_be_done_is_said(assets: tuple[Path, Path], tmp_path: Path) -> None:
    users = write_users(tmp_path / "users.parquet", 2, country=["AT", "DE"], lists=[["AT"], ["DE"]])
    for match, message in (
        ("nation=country", "no attribute 'nation'"),
        ("tags=country", "values cannot be compared"),
        ("=country", "must be an attribute"),
    ):
        with pytest.raises(UsageError, match=message):
            plan_job(options_for(tmp_path, *assets, users, match=(match,)))
    with pytest.raises(UsageError, match="twice"):
        plan_job(options_for(tmp_path, *assets, users, match=("country", "country=lists")))
    with pytest.raises(HistoryError, match="no column 'home'") as lacking:
        plan_job(options_for(tmp_path, *assets, users, match=("country=home",)))
    assert "--match attribute=column" in str(lacking.value.hint)
    with pytest.raises(HistoryError, match="'lists': its values cannot be compared"):
        run_job(options_for(tmp_path, *assets, users, match=("country=lists",)))


def test_filters_belong_to_the_fingerprint(assets: tuple[Path, Path], tmp_path: Path) -> None:
    """The contents of item files do, their place does not."""
    users = write_users(tmp_path / "users.parquet", 2, country=["AT", "DE"])
    path = write_list(tmp_path / "a.txt", [101, 102, 103])

    def again(**given: Any) -> Any:
        settings = {"where": "price < 19", "allow_items": (str(path),), "match": ("country",), **given}
        return run_job(options_for(tmp_path, *assets, users, **settings)).record["state"]

    assert again() == "done" and again() == "nothing-to-do"
    moved = write_list(tmp_path / "moved.txt", [101, 102, 103])
    assert again(allow_items=(str(moved),)) == "nothing-to-do"
    for change, name in (
        ({"where": "price < 20"}, "--where was price < 19, is price < 20"),
        ({"match": ()}, "--match was country, is not given"),
        ({"diversify": "brand=1"}, "--diversify was not given, is brand=1"),
        ({"deny_items": (str(path),)}, "--deny-items leaves none"),
    ):
        with pytest.raises(XgrError, match=name):
            again(**change)
    write_list(path, [101, 102])
    with pytest.raises(OutputExistsError, match="contents of --allow-items"):
        again()


def test_filters_on_the_command_line(assets: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    users = write_users(tmp_path / "users.parquet", 3, country=["AT", "DE", "CH"])
    items = write_list(tmp_path / "allow.txt", [*range(100, 130), 7])
    paths = ["--model", str(assets[1]), "--vocab", str(assets[0]), "--out", str(tmp_path / "recs"), "--device", "cpu"]
    command = ["recommend", "--in", str(users), *paths, "--beam", "20", "--top-k", "4", "--json"]
    more = ["--where", "price < 12", "--allow-items", str(items), "--match", "country", "--diversify", "brand=1"]
    assert run([*command, *more]) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert "--allow-items: 1 of 31 ids are not in the catalog, such as 7" in shown.err
    assert record["audit"]["filtered"] == 0 and record["audit"]["over_cap"] == 0
    assert record["options"]["filters.where"] == {"value": "price < 12", "origin": "command line"}
    assert record["filters"]["items"] == 40 and record["diversify"]["searches"] >= 3
    assert run([*command, "--where", "prise < 12"]) == 2
    assert "did you mean price" in capsys.readouterr().err


def test_without_where_polars_is_not_imported(assets: tuple[Path, Path], tmp_path: Path) -> None:
    import subprocess
    import sys

    users = write_users(tmp_path / "users.parquet", 2, country=["AT", "DE"])
    items = write_list(tmp_path / "allow.txt", range(100, 130))
    code = f"""
import sys
sys.modules["polars"] = None
from xgr_cli.main import run
assert run(["recommend", "--in", {str(users)!r}, "--model", {str(assets[1])!r}, "--vocab", {str(assets[0])!r}, "-q",
    "--out", {str(tmp_path / "recs")!r}, "--beam", "8", "--top-k", "3", "--device", "cpu",
    "--allow-items", {str(items)!r}, "--match", "country", "--diversify", "brand=1"]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_booleans_and_dates_can_be_matched(tmp_path: Path, assets: tuple[Path, Path]) -> None:
    import datetime

    days = [datetime.date(2026, 11, 1 + i % 3) for i in range(40)]
    vocab = make_filter_vocabulary(tmp_path / "vocab", day=pa.array(days))
    users = write_users(tmp_path / "users.parquet", 2, wants=[True, False], day=["2026-11-01", "2026-11-03"])
    run_job(options_for(tmp_path, vocab, assets[1], users, ALL, match=("in_stock=wants", "day")))
    stock = of_items("in_stock")
    for wants, day, got in zip([True, False], [1, 3], lists_of(tmp_path / "recs"), strict=True):
        assert {i for i, _ in got or []} == {i for i in ITEMS if stock[i] is wants and days[i - 100].day == day}


def planted(part: Path, item: int, sid: list[int], row: int = 0, place: int = -1) -> None:
    with pq.ParquetFile(part) as file:
        table = file.read()
    rows = table.to_pylist()
    rows[row]["items"][place].update(item_id=item, sid=sid)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), part)


@pytest.mark.parametrize(
    ("given", "item", "count"),
    [
        ({"where": "category = 'books'"}, 101, "filtered"),
        ({"deny_items": True}, 101, "filtered"),
        ({"allow_items": True}, 102, "filtered"),
        ({"match": ("country",)}, 101, "filtered"),
        ({"match": ("country",)}, 104, "filtered"),
        ({"diversify": "brand=1"}, None, "over_cap"),
    ],
)
def test_planted_items_are_counted(
    assets: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    item: Any,
    count: str,
) -> None:
    """The audit reads the written file again: an item that a filter forbids is counted, whatever the search did."""
    from job_support import SIDS

    from xgr_engine.job import run as run_module
    from xgr_engine.job.shard_work import ShardWork

    ids = {"deny_items": [101], "allow_items": [i for i in ITEMS if i != 102]}
    for option in set(ids) & set(given):
        given = {**given, option: (str(write_list(tmp_path / "ids.txt", ids[option])),)}
    users = write_users(tmp_path / "users.parquet", 1, country=["AT"])
    brand = of_items("brand")

    class Planting(ShardWork):
        def write(self, *piece: Any) -> Any:
            result = super().write(*piece)
            (part,) = (tmp_path / "recs").glob("part-*.parquet")
            first = next(i for i, _ in (lists_of(tmp_path / "recs")[0] or []) if brand[i] is not None)
            wrong = item or next(i for i in ITEMS if brand[i] is not None and brand[i] == brand[first] and i != first)
            planted(part, wrong, SIDS[wrong - 100])
            return result

    monkeypatch.setattr(run_module, "ShardWork", Planting)
    report = run_job(options_for(tmp_path, *assets, users, SearchOptions(beam=40, top_k=3), **given))
    assert report.failure is not None and report.record["audit"][count] == 1
    assert f"{count}=1" in report.failure.what and not (tmp_path / "recs" / "_SUCCESS").exists()


def test_options_without_filters_say_nothing_of_them(assets: tuple[Path, Path], tmp_path: Path) -> None:
    users = write_users(tmp_path / "users.parquet", 2)
    options: RecommendOptions = options_for(tmp_path, *assets, users)
    audit = run_job(options).record["audit"]
    assert audit["filtered"] is None and audit["over_cap"] is None and "filtered" not in audit["line"]

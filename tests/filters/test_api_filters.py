"""Filters through the Python interface: the same lists as the job, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filter_support import ITEMS, lists_of, make_assets, of_items, options_for, write_users

import xgr_engine as xgr
from xgr_engine import api
from xgr_engine.errors import XgrError
from xgr_engine.job.run import run_job
from xgr_engine.options import SearchOptions

WIDE = {"beam": 40, "top_k": 40}


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_assets(tmp_path_factory.mktemp("api-filters"))


@pytest.fixture
def loaded(assets: tuple[Path, Path]) -> xgr.Recommender:
    return xgr.load(model=assets[1], vocab=assets[0], device="cpu")


def items_of(recs: xgr.Recommendations) -> list[set[Any]]:
    return [{one.item_id for one in found or []} for found in recs]


def test_filters_over_the_catalog(loaded: xgr.Recommender) -> None:
    category, stock = of_items("category"), of_items("in_stock")
    books = {item for item in ITEMS if category[item] == "books" and stock[item]}
    assert items_of(loaded.recommend([[101], [102]], where="category = 'books' and in_stock", **WIDE)) == [books] * 2
    for form in ([101, 102, 139], ["101", "102", "139"], np.array([101, 102, 139]), pa.array([101, 102, 139])):
        recs = loaded.recommend([[101]], allow_items=form, **WIDE)
        assert items_of(recs) == [{101, 102, 139}] and recs.short == [True]
    assert items_of(loaded.recommend([[101]], deny_items=range(100, 130), **WIDE)) == [set(range(130, 140))]
    assert items_of(loaded.recommend([[101]], deny_items=[], **WIDE)) == [set(ITEMS)]
    together = loaded.recommend(
        [[101], [101]],
        where="category is not null",
        allow_items=range(100, 120),
        deny_items=[104],
        exclude=[[105], None],
        exclude_seen=True,
        **WIDE,
    )
    wanted = {item for item in range(100, 120) if category[item] is not None} - {104, 101}
    assert items_of(together) == [wanted - {105}, wanted]


def test_each_user_gets_items_of_the_own_value(loaded: xgr.Recommender) -> None:
    values, sizes = ["AT", "DE", None, "XX"], [0, 1, 2, np.nan]
    country, brand = of_items("country"), of_items("brand")
    histories = [[101]] * 4
    recs = loaded.recommend(histories, match={"country": values}, **WIDE)
    assert items_of(recs) == [{i for i in ITEMS if value and country[i] == value} for value in values]
    assert recs.short == [True] * 4
    huge = loaded.recommend(histories[:2], match={"brand": [10**30, 1]}, **WIDE)
    assert items_of(huge) == [set(), {i for i in ITEMS if brand[i] == 1}]
    both = loaded.recommend(histories, match={"country": values, "brand": np.array(sizes)}, **WIDE)
    assert items_of(both) == [
        {i for i in ITEMS if value and country[i] == value and brand[i] == size}
        for value, size in zip(values, sizes, strict=True)
    ]


@pytest.mark.parametrize(
    "more", [{}, {"where": "price < 12", "match": ("country=home",)}], ids=["alone", "with others"]
)
def test_the_job_writes_the_same_lists(
    assets: tuple[Path, Path], tmp_path: Path, loaded: xgr.Recommender, more: dict[str, Any]
) -> None:
    homes = ["AT", "DE", "CH", "AT", "DE"]
    users = write_users(tmp_path / "users.parquet", 5, home=homes)
    search = SearchOptions(beam=20, top_k=6)
    run_job(options_for(tmp_path, *assets, users, search, diversify="brand=1", exclude_seen=True, **more))
    written = lists_of(tmp_path / "recs")
    given = {**more, "match": {"country": homes}} if "match" in more else more
    recs = loaded.recommend(
        pq.read_table(users)["history"].to_pylist(), beam=20, top_k=6, diversify="brand=1", exclude_seen=True, **given
    )
    brand = of_items("brand")
    for found, row in zip(recs, written, strict=True):
        assert found and [one.item_id for one in found] == [item for item, _ in row or []]
        np.testing.assert_allclose([one.score for one in found], [score for _, score in row or []], atol=1e-5)
        assert max(Counter(brand[one.item_id] for one in found if brand[one.item_id] is not None).values()) == 1


def test_equal_filters_keep_the_engine(loaded: xgr.Recommender, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    build = api.build_engine

    def counted(weights: Any, model: Any, vocabulary: Any, search: Any, plan: Any) -> Any:
        built.append(len(vocabulary.trie.items))
        return build(weights, model, vocabulary, search, plan)

    monkeypatch.setattr(api, "build_engine", counted)
    for deny, match in (([100], "AT"), (["100"], "AT"), ([100, 101], "DE")):
        loaded.recommend([[101]], deny_items=deny, match={"country": [match]}, **WIDE)
    assert len(built) == 2
    assert items_of(loaded.recommend([[101]], **WIDE)) == [set(ITEMS)]
    assert built[2:] == [40]


def test_ids_that_the_catalog_lacks_are_noted(assets: tuple[Path, Path]) -> None:
    said: list[str] = []
    loaded = xgr.load(model=assets[1], vocab=assets[0], device="cpu", note=said.append)
    assert items_of(loaded.recommend([[101]], allow_items=[103, 5, 103], **WIDE)) == [{103}]
    assert said == ["allow_items: 1 of 3 ids are not in the catalog, such as 5"]
    loaded.recommend([[101]], allow_items=[103, 5, 103], **WIDE)
    loaded.recommend([[101]], allow_items=[103, 7], **WIDE)  # the same items, another id that is not there
    assert said[1:] == ["allow_items: 1 of 2 ids are not in the catalog, such as 7"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"where": "colour = 'red'"}, "^where: the catalog has no attribute 'colour'"),
        ({"where": " "}, "^where is empty"),
        ({"where": 5}, "^where 5: must be text"),
        ({"where": "category = '\ud800'"}, "^where: character 13 is half of a surrogate pair"),
        ({"allow_items": ["\ud800"]}, "^allow_items: '.ud800' is not valid text"),
        ({"match": {"country": ["\ud800"]}}, r"^match\['country'\]: '.ud800' is not valid text"),
        ({"match": {1: ["AT"]}}, "^match: the catalog has no attribute '1'"),
        ({"match": {"country": [np.datetime64("2020-01-01", "ns")], "brand": [object()]}}, "cannot be compared"),
        ({"diversify": 2}, "^diversify 2: must be text"),
        ({"diversify": "brand=" + "9" * 5000}, "^diversify 'brand=9+': must be attribute=max"),
        ({"where": "price + 1"}, "^where 'price \\+ 1' gives"),
        ({"where": "price > 1000"}, "^where leaves none of the catalog's 40 items"),
        ({"allow_items": []}, "^allow_items leaves none"),
        ({"allow_items": [1, 2]}, "^allow_items leaves none"),
        ({"allow_items": "103"}, "^allow_items is a str, not a sequence"),
        ({"deny_items": [None]}, "^deny_items: the list holds a null"),
        ({"deny_items": [1.5]}, "^deny_items: 1.5 is neither"),
        ({"match": ["country"]}, "^match is a list, not a mapping"),
        ({"match": {"nation": ["AT"]}}, "^match: the catalog has no attribute 'nation'"),
        ({"match": {"country": ["AT", "DE"]}}, r"^match\['country'\] has 2 values for 1 histories"),
        ({"match": {"country": "AT"}}, r"^match\['country'\] is a str, not a sequence"),
        ({"match": {"country": [["AT"]]}}, "its values cannot be compared(.|\n)*match needs one number or text"),
        ({"match": {"tags": ["t1"]}}, "^match: the attribute 'tags' is list.*values cannot be compared"),
        ({"diversify": "brand"}, "^diversify 'brand': must be attribute=max"),
        ({"diversify": "maker=2"}, "^diversify: the catalog has no attribute 'maker'"),
    ],
)
def test_what_cannot_be_done_is_said(loaded: xgr.Recommender, given: dict[str, Any], said: str) -> None:
    with pytest.raises(XgrError, match=said) as raised:
        loaded.recommend([[101]], **given)
    assert "--" not in str(raised.value)

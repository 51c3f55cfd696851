"""Opening a vocabulary: what it answers, and what it says when a file is damaged."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xgr_engine.catalog.build import BuildOptions, build_vocabulary
from xgr_engine.catalog.readers import ReadOptions
from xgr_engine.catalog.vocabulary import Vocabulary, describe, load_vocabulary, verify_files
from xgr_engine.errors import CatalogError


def make(folder: Path, table: dict[str, Any] | None = None) -> Path:
    columns = table or {
        "item_id": ["x", "y", "z", "w"],
        "sid": [[1, 2], [0, 9], [1, 2], [1]],
        "price": [4.0, 3.0, None, 1.0],
        "tags": [["p"], [], None, ["q", "r"]],
    }
    pq.write_table(pa.table(columns), folder / "catalog.parquet")
    build_vocabulary([folder / "catalog.parquet"], folder / "vocab", ReadOptions(), BuildOptions())
    return folder / "vocab"


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    return load_vocabulary(make(tmp_path))


def test_facts(vocabulary: Vocabulary) -> None:
    assert (vocabulary.num_items, vocabulary.num_sids, vocabulary.levels, vocabulary.codebook) == (4, 3, 2, (2, 10))
    assert vocabulary.content_hash.startswith("sha256:") and len(vocabulary.content_hash) == 71
    assert vocabulary.attribute_names == ("price", "tags") and vocabulary.sid_templates is None


def test_rows_leaves_and_codes_belong_together(vocabulary: Vocabulary) -> None:
    assert vocabulary.item_ids.to_pylist() == ["y", "w", "x", "z"]
    assert vocabulary.leaf_of_row.tolist() == [0, 1, 2, 2]
    codes, lengths = vocabulary.sids()
    assert codes.tolist() == [[0, 9], [1, -1], [1, 2]] and lengths.tolist() == [2, 1, 2]
    assert codes.dtype == np.int32 and vocabulary.leaf_of_row.dtype == np.int32
    asked = np.array([[1, 2, -1], [1, -1, -1], [0, -1, -1], [0, 9, 0], [7, 7, -1]], np.int32)
    assert vocabulary.leaves_of_codes(asked).tolist() == [2, 1, -1, -1, -1]
    assert vocabulary.rows_of(pa.array(["z", "nobody", None, "y"])).tolist() == [3, -1, -1, 0]


def test_attribute_columns(vocabulary: Vocabulary) -> None:
    assert vocabulary.columns(["tags", "price"]).to_pydict() == {
        "tags": [[], ["q", "r"], ["p"], None],
        "price": [3.0, 1.0, 4.0, None],
    }
    with pytest.raises(CatalogError, match=r"'colour'[\s\S]*price, tags"):
        vocabulary.columns(["colour"])
    with pytest.raises(CatalogError):
        vocabulary.columns(["leaf"])


@given(
    st.dictionaries(st.integers(0, 50), st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=30)
)
@settings(max_examples=30, deadline=None)
def test_what_was_built_is_what_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, catalog: dict[int, list[int]]
) -> None:
    table = {"item_id": list(catalog), "sid": pa.array(list(catalog.values()), pa.list_(pa.int64()))}
    vocabulary = load_vocabulary(make(tmp_path_factory.mktemp("v"), table))
    codes, lengths = vocabulary.sids()
    rows = vocabulary.rows_of(pa.array(list(catalog)))
    leaves = vocabulary.leaf_of_row[rows]
    read = [codes[leaf, : lengths[leaf]].tolist() for leaf in leaves]
    assert read == list(catalog.values())
    width = max(map(len, catalog.values()))
    padded = np.array([sid + [-1] * (width - len(sid)) for sid in catalog.values()], np.int32)
    assert vocabulary.leaves_of_codes(padded).tolist() == leaves.tolist()
    assert sorted(set(map(tuple, catalog.values()))) == [
        tuple(row[:length].tolist()) for row, length in zip(codes, lengths, strict=True)
    ]


@pytest.mark.parametrize("kind", ["fixed-size binary", "UUID"])
def test_ids_of_sixteen_bytes(tmp_path: Path, kind: str) -> None:
    values = [uuid.uuid5(uuid.NAMESPACE_DNS, str(number)) for number in range(3)]  # no UTF-8
    ids = pa.array([value.bytes for value in values], pa.binary(16))
    texts = [value.hex for value in values]
    if kind == "UUID":
        if not hasattr(pa, "uuid"):
            pytest.skip("this pyarrow has no UUID type")
        ids, texts = pa.ExtensionArray.from_storage(pa.uuid(), ids), [str(value) for value in values]
    table = {"item_id": ids, "sid": [[1, 2], [0, 9], [1, 3]]}
    vocabulary = load_vocabulary(make(tmp_path, table))
    assert vocabulary.item_ids.type == ids.type
    assert vocabulary.rows_of(ids).tolist() == vocabulary.rows_of(pa.array(texts)).tolist() == [1, 0, 2]


def test_the_trie_is_mapped_and_torch_can_wrap_it_without_a_warning(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    import torch

    trie = load_vocabulary(make(tmp_path)).trie
    assert torch.from_numpy(trie.codes[0]).tolist() == [0, 1]
    assert not recwarn.list
    trie.codes[0][:] = 77  # private pages: the file stays as it is
    verify_files(tmp_path / "vocab")


def test_loading_needs_neither_polars_nor_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from xgr_engine.catalog.vocabulary import load_vocabulary; v = load_vocabulary(sys.argv[1]); "
        "v.item_ids, v.columns(['price']); print([m for m in ('polars', 'torch', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, make(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_describe_is_the_description_with_its_place(tmp_path: Path) -> None:
    path = make(tmp_path)
    description = describe(path)
    assert description["path"] == str(path) and description["num_items"] == 4
    assert description["bytes_on_disk"] == sum(file.stat().st_size for file in path.iterdir())
    assert json.loads(json.dumps(description)) == description


# ---- damage ------------------------------------------------------------------------------------------------------


def edit_json(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        document = json.loads((path / "vocab.json").read_bytes())
        change(document)
        (path / "vocab.json").write_text(json.dumps(document))

    return edit


def cut(name: str, size: int) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:size])  # type: ignore[return-value]


def flip(name: str, at: int) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[at] ^= 0x40
        (path / name).write_bytes(data)

    return edit


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (edit_json(lambda d: d.update(schema_version=99)), ["schema version 99", "reads version 1"]),
        (edit_json(lambda d: d.update(kind="model")), ["vocab.json", "kind"]),
        (edit_json(lambda d: d.pop("levels")), ["vocab.json is damaged", "levels"]),
        *(
            (edit_json(lambda d, key=key: d.pop(key)), ["vocab.json is damaged", f'"{key}" is missing'])
            for key in ("sid_lengths", "item_id_type", "sid_templates", "collisions", "level_reports", "warnings")
        ),
        (edit_json(lambda d: d.update(rank=5)), ["vocab.json is damaged", '"rank"']),
        (edit_json(lambda d: d.update(files={})), ["vocab.json is damaged", "trie.safetensors"]),
        (edit_json(lambda d: d.update(num_items=5)), ["trie.safetensors is damaged", "4 items"]),
        (edit_json(lambda d: d.update(levels=3)), ["trie.safetensors is damaged", "codes.2"]),
        (lambda path: (path / "vocab.json").write_text("{"), ["vocab.json is damaged"]),
        (lambda path: (path / "vocab.json").unlink(), ["is not a vocabulary", "no vocab.json"]),
        (lambda path: (path / "trie.safetensors").unlink(), ["trie.safetensors is damaged"]),
        (lambda path: (path / "items.parquet").unlink(), ["items.parquet is damaged", "missing"]),
        (cut("trie.safetensors", 0), ["trie.safetensors is damaged"]),
        (cut("trie.safetensors", 300), ["trie.safetensors is damaged"]),
        (cut("items.parquet", 300), ["items.parquet is damaged", "300 bytes"]),
        (flip("trie.safetensors", 2), ["trie.safetensors is damaged"]),
        (flip("trie.safetensors", -2), ["trie.safetensors is damaged", "checksum"]),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], names: list[str]) -> None:
    path = make(tmp_path)
    damage(path)
    with pytest.raises(CatalogError) as caught:
        load_vocabulary(path)
    assert all(name in str(caught.value) for name in names), str(caught.value)


@pytest.mark.parametrize(
    "damage", [cut("trie.safetensors", 4), cut("trie.safetensors", 300), flip("trie.safetensors", 9)]
)
def test_a_trie_that_contradicts_itself_is_caught_without_its_checksum(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    from xgr_engine.catalog.trie_file import load_trie

    path = make(tmp_path)
    damage(path)
    with pytest.raises(CatalogError, match=r"trie\.safetensors is damaged"):
        load_trie(path / "trie.safetensors", 2)


def test_a_changed_items_file_is_found_by_page_checksums_and_by_verify(tmp_path: Path) -> None:
    path = make(tmp_path)
    data = bytearray((path / "items.parquet").read_bytes())
    at = data.find(b"y")  # inside the page of item ids
    data[at] ^= 0x40
    (path / "items.parquet").write_bytes(data)
    vocabulary = load_vocabulary(path)
    with pytest.raises(CatalogError, match=r"items\.parquet is damaged"):
        _ = vocabulary.item_ids
    with pytest.raises(CatalogError, match=r"items\.parquet is damaged[\s\S]*checksum"):
        verify_files(path)


def test_no_directory_at_all(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="no such directory") as caught:
        load_vocabulary(tmp_path / "absent")
    assert "xgr build-vocab" in str(caught.value)

"""Build a vocabulary from a catalog: items, their semantic IDs, and the attributes that filters may use.

CATALOG is one or several files, a directory of table files, or a quoted pattern. The whole catalog is read each time,
with --update as well; the output directory is replaced in one step. Running it again on the same catalog does nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from xgr_cli.options import argument, option
from xgr_cli.output import Output
from xgr_cli.views import show_vocabulary

_DONE = {
    "built": "built the vocabulary",
    "updated": "replaced the vocabulary",
    "unchanged": "nothing to do: the vocabulary already matches this catalog",
}

EXAMPLES = (
    "xgr build-vocab catalog.parquet --out vocab",
    "xgr build-vocab Industrial.index.json Industrial.item.json --out vocab",
    "xgr build-vocab catalog/ --item-col pid --sid-col codes --rank-column views --rank-desc --update",
)


def build_vocab(
    output: Output,
    catalog: Annotated[
        list[str], argument(metavar="CATALOG", help="files, a directory of table files, or a quoted pattern")
    ],
    out: Annotated[Path, option("--out", help="vocabulary directory to write", panel="Output", env="XGR_VOCAB")] = Path(
        "vocab"
    ),
    update: Annotated[
        bool, option("--update", help="replace another vocabulary at --out, and say what changed", panel="Output")
    ] = False,
    catalog_format: Annotated[
        str | None,
        option(
            "--format",
            help="table, lcrec-index or minionerec-info",
            panel="Catalog",
            env="XGR_CATALOG_FORMAT",
            metavar="FORMAT",
            show_default="detected",
        ),
    ] = None,
    item_col: Annotated[
        str, option("--item-col", help="column of item ids (table)", panel="Catalog", metavar="COLUMN")
    ] = "item_id",
    sid_col: Annotated[
        str,
        option(
            "--sid-col",
            help="column of SIDs as lists or text, or the common prefix of sid_0, sid_1, ... (table)",
            panel="Catalog",
            metavar="COLUMN",
        ),
    ] = "sid",
    attributes: Annotated[
        str,
        option(
            "--attributes",
            help="columns to keep for filters and output: all that a filter can use, none, or names",
            panel="Catalog",
            metavar="all|none|A,B,...",
        ),
    ] = "all",
    rank_column: Annotated[
        str | None,
        option(
            "--rank-column",
            help="orders the items that share a SID, smallest first, nulls last",
            panel="Collisions",
            metavar="COLUMN",
            show_default="by item id",
        ),
    ] = None,
    rank_desc: Annotated[bool, option("--rank-desc", help="largest rank first", panel="Collisions")] = False,
    collisions: Annotated[
        Literal["keep", "error"],
        option(
            "--collisions",
            help="items that share a SID: keep them, or refuse the catalog",
            panel="Collisions",
            env="XGR_CATALOG_COLLISIONS",
        ),
    ] = "keep",
    codebook: Annotated[
        str | None,
        option(
            "--codebook",
            help="codes per level, such as 256,256,256 or 8192x3, for the report",
            panel="Catalog",
            metavar="SIZES",
            show_default="largest code + 1",
        ),
    ] = None,
) -> None:
    """The module's docstring is the help text."""
    from xgr_engine.catalog.build import BuildOptions, build_vocabulary, parse_attributes, parse_codebook
    from xgr_engine.catalog.readers import ReadOptions

    read = ReadOptions(
        format=catalog_format,
        item_col=item_col,
        sid_col=sid_col,
        attributes=parse_attributes(attributes),
        rank_column=rank_column,
    )
    options = BuildOptions(
        rank_desc=rank_desc,
        codebook=None if codebook is None else parse_codebook(codebook),
        collisions=collisions,
        update=update,
    )
    result = build_vocabulary(catalog, out, read, options)
    changes = None if result.changes is None else asdict(result.changes)
    if output.json_mode:  # the view shows them too
        for warning in result.description["warnings"]:
            output.warn(warning)
    output.note(_DONE[result.action])

    def view(sink: Output) -> None:
        show_vocabulary(sink, result.description)
        if result.action == "updated" and changes is not None:
            kinds = ("added", "removed", "moved", "kept")
            rows = [(kind, changes[kind], changes["examples"].get(kind, [])) for kind in kinds]
            sink.table(["change", "items", "such as"], rows)

    output.result({"action": result.action, "changes": changes, **result.description}, view)

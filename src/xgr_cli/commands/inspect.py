"""Show what a vocabulary, a model or an output directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from xgr_cli.options import argument
from xgr_cli.output import Output

EXAMPLES = ("xgr inspect vocab", "xgr inspect model --json", "xgr inspect recs")


def inspect(
    output: Output,
    path: Annotated[Path, argument(metavar="PATH", help="a directory that an xgr command wrote")],
) -> None:
    """See the module."""
    output.result({"path": path}, lambda out: out.fields({"path": path}))

"""Show what a vocabulary, a model or an output directory of xgr holds.

A file in the directory tells which it is: vocab.json, xgr.json or _xgr/manifest.json; naming that file works too.
--verify also reads every file of a vocabulary or model again and compares it with the recorded checksums.
"""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Annotated, Any

from xgr_cli.options import argument, option
from xgr_cli.output import Output
from xgr_cli.views import show_model, show_recommendations, show_vocabulary
from xgr_engine.errors import InputError

EXAMPLES = ("xgr inspect vocab", "xgr inspect model --json", "xgr inspect recs")

VOCABULARY_FILE = "vocab.json"
MODEL_FILE = "xgr.json"
MANIFEST_FILE = Path("_xgr") / "manifest.json"


def inspect(
    output: Output,
    path: Annotated[Path, argument(metavar="PATH", help="a directory that an xgr command wrote")],
    verify: Annotated[
        bool,
        option(
            "--verify",
            help="check all files of a vocabulary or model against their checksums",
            panel="Checks",
            env="XGR_INSPECT_VERIFY",
        ),
    ] = False,
) -> None:
    """The module's docstring is the help text."""
    directory = _directory(path)
    if (directory / VOCABULARY_FILE).is_file():
        record, view = _vocabulary(directory, verify), show_vocabulary
    elif (directory / MODEL_FILE).is_file():
        record, view = _model(directory, verify), show_model
    elif (directory / MANIFEST_FILE).is_file():
        record, view = _recommendations(directory, verify), show_recommendations
    else:
        raise _not_ours(path)
    output.result(record, lambda out: view(out, record))


def _directory(path: Path) -> Path:
    """The directory, whether it was named itself or by its marker file."""
    if path.name in (VOCABULARY_FILE, MODEL_FILE) and path.is_file():
        return path.parent
    if path.name == MANIFEST_FILE.name and path.parent.name == MANIFEST_FILE.parent.name and path.is_file():
        return path.parent.parent
    return path.parent if path.name == "_xgr" and path.is_dir() else path


def _vocabulary(directory: Path, verify: bool) -> dict[str, Any]:
    from xgr_engine.catalog.vocabulary import describe, verify_files

    record = describe(directory)
    if verify:
        verify_files(directory)
    return {**record, "kind": "vocabulary", "verified": verify}


def _model(directory: Path, verify: bool) -> dict[str, Any]:
    from xgr_engine.checkpoint.model_dir import load_model_dir

    model = load_model_dir(directory)
    if verify:
        model.verify_weights()
    levels = zip(model.table.codes, model.table.templates or [None] * model.table.levels, strict=True)
    return {
        "kind": "model",
        "path": str(directory),
        "xgr_version": model.xgr_version,
        "spec": asdict(model.spec),
        "parameters": sum(map(prod, model.spec.tensor_shapes().values())),
        "weight_bytes": model.weights_path.stat().st_size,
        "sid_tokens": [{"codes": len(codes), "template": template} for codes, template in levels],
        "prompt": model.prompt.to_json(),
        "contract": model.contract.to_json(),
        "vocab_checked": model.vocab_checked,
        "source": model.source,
        "fingerprint": model.fingerprint,
        "verified": verify,
    }


def _recommendations(directory: Path, verify: bool) -> dict[str, Any]:
    from xgr_engine.job.manifest import read_manifest

    if verify:
        raise InputError(
            f"{directory} holds recommendations, and --verify is for vocabularies and models",
            why="xgr recommend checks its whole output itself before it writes _SUCCESS",
            hint=f"xgr inspect {directory} shows what that audit found",
        )
    manifest = read_manifest(directory / MANIFEST_FILE)
    if manifest is None:
        raise InputError(
            f"{directory / MANIFEST_FILE} is not an xgr manifest",
            why="it is damaged, or another tool wrote it",
            hint="move the directory away, and let xgr recommend write the output again",
        )
    return {
        "kind": "recommendations",
        "path": str(directory),
        "complete": (directory / "_SUCCESS").is_file(),
        "parts_present": sum("_xgr" not in part.parts for part in directory.rglob("part-*.parquet")),
        "parts_expected": manifest.get("shards"),
        "manifest": manifest,
    }


def _not_ours(path: Path) -> InputError:
    """What the path seems to be, and the command that wants it."""
    if not path.exists():
        return InputError(f"{path}: there is no such file or directory")
    why = f"it holds neither {VOCABULARY_FILE} nor {MODEL_FILE} nor {MANIFEST_FILE}"
    hint = "name a directory that xgr build-vocab, xgr convert or xgr recommend wrote"
    if path.is_file():
        why = "it is a file; xgr writes directories"
        if path.suffix in (".parquet", ".csv", ".jsonl", ".ndjson"):
            hint = "a catalog becomes a vocabulary with xgr build-vocab; users are read by xgr recommend --in"
    elif (path / "config.json").is_file():
        why = "it looks like a Hugging Face checkpoint"
        hint = f"convert it first: xgr convert {path} --vocab VOCAB --out MODEL"
    elif any(path.glob("part-*.parquet")):
        why = f"it holds part files but no {MANIFEST_FILE}: xgr did not write it, or the manifest was removed"
    elif not path.is_dir():
        why = "it is neither a file nor a directory"
    elif not any(path.iterdir()):
        why = "it is empty"
    return InputError(f"{path} is not a vocabulary, model or output of xgr", why=why, hint=hint)

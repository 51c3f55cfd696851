"""Records of vocabularies, models and runs as text, for ``inspect`` and for the commands that make them."""

from __future__ import annotations

from typing import Any

from xgr_cli.output import Output, show


def show_vocabulary(out: Output, record: dict[str, Any]) -> None:
    """``record`` as ``xgr_engine.catalog.vocabulary.describe`` gives it."""
    collisions, rank = record["collisions"], record["rank"]
    shared = f"{show(collisions['items'])} items on {show(collisions['groups'])} SIDs, at most {collisions['largest']}"
    lengths = ", ".join(f"{show(count)} of {length} codes" for length, count in record["sid_lengths"].items())
    attributes = ", ".join(f"{name} ({kind})" for name, kind in record["attributes"].items())
    order = "item id" if rank is None else f"{rank['column']}, {'largest' if rank['descending'] else 'smallest'} first"
    out.fields(
        {
            "items": f"{show(record['num_items'])}, ids are {record['item_id_type']}",
            "SIDs": f"{show(record['num_sids'])} ({lengths})",
            "collisions": shared if collisions["groups"] else "none",
            "order on a shared SID": order,
            "SID tokens": "".join(record["sid_templates"] or ()) or "bare codes",
            "attributes": attributes or "none",
            "size on disk": f"{record['bytes_on_disk'] / 1e6:,.1f} MB",
            "content": record["content_hash"],
            **_verified(record),
        },
        title=f"Vocabulary {record['path']}",
    )
    columns = ["codes_used", "codebook_size", "largest_code", "nodes", "branching_mean", "branching_max"]
    out.table(
        ["level", "codes used", "codebook", "largest code", "prefixes", "branching mean", "branching max"],
        [(number, *(level[column] for column in columns)) for number, level in enumerate(record["level_reports"], 1)],
    )
    for warning in record["warnings"]:
        out.print(f"  warning: {warning}")


def show_model(out: Output, record: dict[str, Any]) -> None:
    """``record`` as ``xgr inspect`` makes it from a model directory."""
    spec, contract, checked = record["spec"], record["contract"], record["vocab_checked"]
    heads = f"{spec['num_heads']} query and {spec.get('num_kv_heads', spec['num_heads'])} key-value heads"
    levels = [f"{show(level['codes'])} {level['template'] or 'bare codes'}" for level in record["sid_tokens"]]
    out.fields(
        {
            "architecture": f"{spec['family']}, {layers(spec)} of {spec['hidden_size']}, {heads} of {spec['head_dim']}",
            "parameters": record["parameters"],
            "weights": f"{record['weight_bytes'] / 1e6:,.1f} MB, {spec['dtype']}",
            "output head": "the embedding (tied)" if spec["tied"] else "its own",
            "tokenizer rows": spec["vocab_size"],
            "context": f"{show(spec['max_context'])} tokens",
            "tokens per level": levels,
            "prompt": record["prompt"]["name"],
            **({"end token": record["prompt"]["eos_ids"][0]} if "eos_ids" in record["prompt"] else {}),
            "score suffix": repr(contract["score_suffix_text"]) if contract["score_suffix"] else "none",
            "checked against": checked and f"{checked['path']} ({checked['content_hash']})",
            "source": record["source"]["path"],
            "written by": f"xgr {record['xgr_version']}",
            "fingerprint": record["fingerprint"],
            **_verified(record),
        },
        title=f"Model {record['path']}",
    )


def layers(spec: dict[str, Any]) -> str:
    """``28 layers``, or ``4 encoder and 4 decoder layers``."""
    if "num_encoder_layers" in spec:
        return f"{spec['num_encoder_layers']} encoder and {spec['num_layers']} decoder layers"
    return f"{spec['num_layers']} layers"


def _verified(record: dict[str, Any]) -> dict[str, str]:
    """A line for ``xgr inspect --verify``, which ends with an error where a file does not match."""
    return {"verified": "all files match their checksums"} if record.get("verified") else {}


_RULES = {
    "where": "--where",
    "allow_items": "--allow-items",
    "deny_items": "--deny-items",
    "match": "--match",
    "exclude_col": "--exclude-col",
    "diversify": "--diversify",
}


def _filters(options: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """The filter options in force, and how many items are left by those that apply to every user."""
    rules = {flag: options.get(name) for name, flag in _RULES.items() if options.get(name)}
    lines = [f"{flag} {', '.join(map(str, rule)) if isinstance(rule, list) else rule}" for flag, rule in rules.items()]
    left = manifest.get("filters") or {}
    if "allowed" in left:
        lines.append(f"{show(left['allowed'])} of {show(left['items'])} items are left")
    return {"filters": "; ".join(lines)} if lines else {}


def show_recommendations(out: Output, record: dict[str, Any]) -> None:
    """``record`` as ``xgr inspect`` makes it from an output directory. An unfinished run has fewer fields."""
    manifest = record["manifest"]
    counts, engine, audit = (manifest.get(key) or {} for key in ("counts", "engine", "audit"))
    search = {name.split(".")[-1]: entry["value"] for name, entry in manifest["options"].items()}
    out.fields(
        {
            "state": manifest["state"] + ("" if record["complete"] else " (no _SUCCESS: not complete)"),
            "error": manifest.get("error"),
            "users": manifest["rows"],
            "rejected": counts.get("rejects"),
            "parts": f"{record['parts_present']} of {record['parts_expected']}",
            "audit": audit.get("line"),
            "search": f"beam {search['beam']}, top-k {search['top_k']}, score over {search['score_over']}, "
            f"collisions {search['collisions']}, seen items {'excluded' if search['exclude_seen'] else 'allowed'}",
            **_filters(search, manifest),
            "inputs": [file["path"] for file in manifest["inputs"]],
            "model": f"{manifest['model']['path']} ({manifest['model']['fingerprint']})",
            "vocabulary": f"{manifest['vocab']['path']} ({manifest['vocab']['content_hash']})",
            "device": engine and f"{engine['device_name']}, {engine['dtype']}, {engine['implementation']}",
            "started": manifest["started"],
            "finished": manifest.get("finished"),
            "seconds": manifest["durations"].get("total"),
            "written by": f"xgr {manifest['environment']['versions'].get('xgr')}",
            "fingerprint": manifest["fingerprint"],
        },
        title=f"Recommendations {record['path']}",
    )
    reasons = counts.get("rejects_by_reason") or {}
    if reasons:
        out.table(["rejected because", "rows"], list(reasons.items()))

"""From per-row figures to the record of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xgr_engine.catalog.distinct import distinct
from xgr_engine.catalog.vocabulary import Vocabulary
from xgr_engine.metrics.bootstrap import LEVEL, mean_intervals
from xgr_engine.metrics.ranking import FloatArray, metric_names


@dataclass
class Tally:
    """What is summed up while the output is read.

    Attributes:
        item, sid: [rows of the truth, metrics], filled as rows of the output come by; ``sid`` without columns where
            there is no vocabulary.
        reached: rows of the truth that the output has a row for.
        covered: [ks, items of the vocabulary] whether an item was in somebody's first k.
    """

    item: FloatArray
    sid: FloatArray
    reached: NDArray[np.bool_]
    covered: NDArray[np.bool_]
    output_rows: int = 0
    rejected: int = 0
    without_truth_row: int = 0
    recommended: int = 0
    repeated: int = 0
    null_ids: int = 0
    outside_vocabulary: int = 0
    longest: int = 0


def figures(
    tally: Tally,
    with_sids: bool,
    counted: NDArray[np.bool_],
    unseen: NDArray[np.bool_] | None,
    ks: tuple[int, ...],
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Means and intervals at both levels, over the rows in ``counted`` and over those in ``unseen``."""

    def intervals(values: FloatArray, rows: NDArray[np.bool_] | None) -> dict[str, dict[str, float]] | None:
        if rows is None or not rows.any():
            return None
        mean, low, high = mean_intervals(values[rows], resamples=resamples, seed=seed)
        return {
            name: {"mean": float(mean[at]), "low": float(low[at]), "high": float(high[at])}
            for at, name in enumerate(metric_names(ks))
        }

    def level(values: FloatArray) -> dict[str, Any]:
        return {"all": intervals(values, counted), "target_not_in_history": intervals(values, unseen)}

    return {
        "k": list(ks),
        "longest_list": tally.longest,
        "metrics": {"item": level(tally.item), "sid": level(tally.sid) if with_sids else None},
        "predictions": {
            "total": tally.recommended,
            "repeated": tally.repeated,
            "null": tally.null_ids,
            "not_in_vocabulary": tally.outside_vocabulary if with_sids else None,
        },
        "bootstrap": {
            "method": "percentile, rows drawn with replacement",
            "level": LEVEL,
            "resamples": resamples,
            "seed": seed,
        },
    }


def coverage(tally: Tally, vocabulary: Vocabulary, ks: tuple[int, ...]) -> dict[str, Any]:
    """How much of the catalog was recommended to anyone within the first k places."""
    leaf_of_row = np.asarray(vocabulary.leaf_of_row)
    by_k = {}
    for at, k in enumerate(ks):
        items = int(tally.covered[at].sum())
        sids = len(distinct(leaf_of_row[tally.covered[at]]))
        by_k[str(k)] = {
            "items": items,
            "item_share": items / max(vocabulary.num_items, 1),
            "sids": sids,
            "sid_share": sids / max(vocabulary.num_sids, 1),
        }
    return {"catalog_items": vocabulary.num_items, "catalog_sids": vocabulary.num_sids, "at": by_k}


_ROW_WARNINGS = {
    "rejected": "rows were rejected by the run; those that have a target count as misses",
    "unreadable_target": "targets could not be read; these rows are left out",
    "unreadable_history": "histories could not be read; their targets count as not in the history",
    "output_rows_without_truth": "rows of the output have users that are not in the truth; they are left out",
    "truth_rows_without_output": "rows of the truth have users that are not in the output; they are left out",
    "without_target": "rows of the truth have no target; they are left out",
}


def warnings(record: Mapping[str, Any]) -> list[str]:
    """What the user should look at before believing the figures."""
    predictions, targets = record["predictions"], record["targets"]
    texts = []
    if predictions["repeated"]:
        texts.append(f"{predictions['repeated']:,} recommendations repeat an item of their list; each counts once")
    if predictions["null"]:
        texts.append(f"{predictions['null']:,} recommended item ids are null; each takes its place and hits nothing")
    if predictions["not_in_vocabulary"]:
        texts.append(f"{predictions['not_in_vocabulary']:,} recommended items are not in the vocabulary")
    if targets["not_in_catalog"]:
        texts.append(f"{targets['not_in_catalog']:,} targets are not in the catalog: no list can hold them")
    texts += [f"{record['rows'][name]:,} {text}" for name, text in _ROW_WARNINGS.items() if record["rows"][name]]
    if record["longest_list"] < record["k"][-1]:
        texts.append(f"no list is longer than {record['longest_list']}: figures at larger k are those at this length")
    return texts

"""From the second batch of a shape on, the device allocates nothing: buffers and graphs are made once."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from tiny import CODES, TinyCatalog, TinyWorld, random_prompts

from xgr_engine.options import SearchOptions


@pytest.mark.cuda
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("lengths", [[30], [3, 17, 9, 5]])
def test_no_device_allocation_after_the_first_batch(tmp_path: Path, graphs: bool, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    catalog = TinyCatalog.of([tuple(rng.integers(0, CODES, 3).tolist()) for _ in range(150)])
    recommender = TinyWorld(tmp_path).recommender(catalog, SearchOptions(beam=33, top_k=20), graphs=graphs)

    def batch(number: int) -> None:
        excluded = [rng.integers(0, 150, 7).astype(np.int32) for _ in lengths]
        result = recommender.run(random_prompts(number, lengths), excluded)
        assert result.counts.tolist() == [20] * len(lengths)

    def allocations() -> tuple[int, int]:
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return stats["num_device_alloc"], stats["reserved_bytes.all.allocated"]

    batch(0)
    batch(1)
    after_second, held = allocations(), torch.cuda.memory_allocated()
    for number in range(2, 100):
        batch(number)
    assert allocations() == after_second
    assert torch.cuda.memory_allocated() <= held  # less where a garbage collection freed what other tests left

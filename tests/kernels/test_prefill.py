"""Attention of ragged prompts: kernels against the definition, the list of work they walk, the choice between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from xgr_engine.errors import UsageError
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.xattention import prefill, ragged, reference
from xgr_engine.xattention.prefill import flash3, triton
from xgr_engine.xattention.ragged import Cut, Ragged

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}
AWKWARD = [31, 1, 127, 33, 64]


def packed(own: list[int], shared: int) -> Ragged:
    """Sequences as a batch has them: what all share comes first, as one of its own."""
    head = [shared] if shared else []
    return Ragged.of([*head, *own], [*head, *(length + shared for length in own)])


class Case:
    """Unit variance; NaN behind the last key, and in every result nobody wrote."""

    def __init__(self, own, shared, group, dim, dtype, device, kv_heads=2):
        self.sequences = packed(own, shared)
        queries, keys = self.sequences.query_start[-1], self.sequences.key_start[-1]
        generator = torch.Generator(device).manual_seed(len(own) + dim)

        def normal(rows, heads):
            return torch.randn((rows, heads, dim), generator=generator, device=device).to(dtype)

        self.q = normal(queries, kv_heads * group)
        self.k, self.v = (normal(keys + 150, kv_heads) for _ in range(2))
        self.k[keys:] = torch.nan
        self.v[keys:] = torch.nan
        self.scale = dim**-0.5

    def run(self, kernel):
        return kernel(self.q, self.k, self.v, self.sequences, self.scale)

    def error(self, got):
        wide = (t.double() for t in (self.q, self.k, self.v))
        expected = reference.prompt_attention(*wide, self.sequences, self.scale)
        assert got.shape == expected.shape and got.dtype == self.q.dtype
        return float((got.double() - expected).norm() / expected.norm())


def by_triton(tiles):
    return lambda *args: triton.prompt_attention(*args, tiles=tiles)


@pytest.mark.parametrize("shared", [0, 7, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_triton_equals_reference(device, poisoned_memory, dim, group, shared):
    case = Case(AWKWARD, shared, group, dim, torch.float32, device)
    assert case.error(case.run(triton.prompt_attention)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("shared", [0, 200])
def test_long_and_short_tiles(device, poisoned_memory, shared):
    """A thousand tokens, with the tiles of 16-bit types too: more query rows than keys a step."""
    case = Case([1000, 5], shared, 2, 64, torch.float16, device, kv_heads=1)
    for tiles in (triton.PrefillTiles(), triton.PrefillTiles(64, 128)):
        assert case.error(case.run(by_triton(tiles))) < TOLERANCE[torch.float16]


def test_awkward_head_dimension(device, poisoned_memory):
    case = Case([33, 17], 5, 2, 24, torch.float32, device)
    assert case.error(case.run(triton.prompt_attention)) < TOLERANCE[torch.float32]


def test_sequences_without_queries(device, poisoned_memory):
    case = Case([0, 33, 0], 0, 2, 64, torch.float32, device)
    assert case.error(case.run(triton.prompt_attention)) < TOLERANCE[torch.float32]
    none = Case([0, 0], 0, 2, 64, torch.float32, device)
    assert none.run(triton.prompt_attention).shape == none.q.shape


@pytest.mark.parametrize("change", [1, -1])
def test_a_shifted_diagonal_would_be_seen(device, change):
    """The comparison finds a mask that is off by one key."""
    case = Case(AWKWARD, 7, 2, 64, torch.float32, device)
    good = ragged.list_work

    def shifted(*args):
        work = good(*args)
        work[:, 3] = np.maximum(work[:, 3] + change, 0)
        return work

    ragged.list_work = shifted
    try:
        got = case.run(triton.prompt_attention)
    finally:
        ragged.list_work = good
    assert not case.error(got) < 1e-3


def test_strides_of_views(device, poisoned_memory):
    """Queries cut out of a wider projection."""
    case = Case([40, 3], 0, 2, 64, torch.float32, device)
    wide = torch.full((len(case.q), 8, 64), torch.nan, device=device)
    wide[:, 2:6] = case.q
    case.q = wide[:, 2:6]
    assert case.error(case.run(triton.prompt_attention)) < TOLERANCE[torch.float32]


def test_refuses_what_it_does_not_cover(device):
    case = Case([4], 0, 2, 64, torch.float32, device)
    case.q = case.q.double()
    with pytest.raises(UsageError, match="float64"):
        case.run(triton.prompt_attention)


# ---- the list of work


@pytest.mark.parametrize("programs", [None, 1, 7, 132])
@pytest.mark.parametrize(("own", "shared"), [(AWKWARD, 0), ([1000, 3, 0, 513], 200), ([128] * 9, 0)])
def test_work_holds_every_row_of_every_head_once(own, shared, programs):
    sequences = packed(own, shared)
    query_start, key_start = sequences.query_start, sequences.key_start
    work = ragged.list_work(sequences, 4, 2, 256, Cut(64, 128, programs))
    seen = np.zeros((query_start[-1], 4), int)
    for row, rows, key_row, position, head in work:
        assert 1 <= rows <= 64
        seen[row : row + rows, head] += 1
        sequence = np.searchsorted(query_start, row, side="right") - 1
        while query_start[sequence + 1] == query_start[sequence]:
            sequence -= 1
        queries, keys = sequences.shapes[sequence]
        assert key_row == key_start[sequence]
        assert position == row - query_start[sequence] + keys - queries
        assert row + rows <= query_start[sequence + 1]
    assert (seen == 1).all()


@pytest.mark.parametrize("lengths", [[1000] * 8, [5000] * 8, [3210, 4999, 3001, 4444, 4100], [700, 1000, 512, 640] * 8])
def test_programs_that_take_turns_end_together(lengths):
    work = ragged.list_work(packed(lengths, 0), 16, 8, 512, Cut(128, 128, 132))
    steps = -(-(work[:, 3] + work[:, 1]) // 128)
    loads = np.array([(steps[program::132] + 1).sum() for program in range(132)])
    assert loads.max() <= loads.mean() * 1.02 + 2


def test_long_items_come_first_and_heads_of_a_group_together():
    work = ragged.list_work(packed([700, 300], 0), 4, 2, 512, Cut(128, 128))
    steps = -(-(work[:, 3] + work[:, 1]) // 128)
    assert (np.diff(steps) <= 0).all()
    assert work[0, 4] + 1 == work[1, 4] and (work[0, :4] == work[1, :4]).all()


# ---- the choice and its parts


def test_runs_of_equal_shape():
    sequences = Ragged((0, 5, 10, 10, 17), (0, 5, 10, 12, 22))
    assert [(run.first, run.stop, run.queries, run.keys) for run in sequences.runs] == [(0, 2, 5, 5), (3, 4, 7, 10)]
    assert not sequences.square
    assert sequences.longest == (7, 10)
    assert Ragged((0, 5, 9), (0, 5, 9)).square


def test_sequences_of_given_lengths():
    assert Ragged.of([5, 0, 7], [5, 2, 10]) == Ragged((0, 5, 5, 12), (0, 5, 7, 17))


def test_a_batch_has_its_own_sequences():
    prompts = [np.array([1, 2, *own], np.int32) for own in ([3], [4, 5, 6])]
    packs = [PackedPrompts.of(prompts, torch.device("cpu")) for _ in range(2)]
    assert packs[0].sequences.shapes == [(2, 2), (1, 3), (3, 5)]
    assert packs[0].sequences == packs[1].sequences and packs[0].sequences is not packs[1].sequences
    assert PackedPrompts.of(prompts[1:], torch.device("cpu")).sequences.shapes == [(5, 5)]


def test_layers_share_an_upload():
    device = torch.device("cpu")
    sequences, equal = (Ragged((0, 5, 9), (0, 5, 9)) for _ in range(2))
    first, again = (sequences.offsets(device) for _ in range(2))
    assert first[0] is again[0] and first[1] is again[1] and first[0] is not first[1]
    assert first[1].tolist() == [0, 5, 9]
    assert equal.offsets(device)[0] is not first[0]  # another batch may run in another stream
    lists = [sequences.work_list(4, 2, 256, Cut(64, 128), device) for _ in range(2)]
    assert lists[0] is lists[1] is not sequences.work_list(4, 2, 256, Cut(32, 128), device)


@pytest.mark.parametrize("kernel", ["auto", "runs", "triton"])
def test_interface(kernel):
    if torch.cuda.is_available():
        pytest.skip("on a GPU the kernels are compared one by one")
    case = Case([40, 3, 40, 40], 9, 2, 64, torch.float32, "cpu")
    args = (case.q, case.k, case.v, case.sequences, case.scale)
    assert case.error(prefill.prompt_attention(*args, kernel=kernel)) < TOLERANCE[torch.float32]
    with pytest.raises(UsageError, match="flash2"):
        prefill.prompt_attention(*args, kernel="fastest")


def test_cudnn_refuses_a_prefix():
    case = Case([4], 3, 2, 64, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match="prefix"):
        case.run(prefill.KERNELS["cudnn"])


class TestFlash3:
    """A package that is not there, one that cannot be loaded, one that is wrong."""

    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch):
        flash3._entry.cache_clear()
        flash3.works.cache_clear()
        monkeypatch.setattr(flash3, "is_hopper", lambda device: True)
        monkeypatch.setattr(flash3, "PACKAGES", ("made_up_flash",))
        yield
        flash3._entry.cache_clear()
        flash3.works.cache_clear()

    def install(self, monkeypatch, tmp_path, text):
        (tmp_path / "made_up_flash.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(__import__("sys").modules, "made_up_flash", raising=False)

    def test_not_installed(self, caplog):
        assert not flash3.works(torch.device("cpu"))
        assert not caplog.records
        case = Case([4], 0, 2, 64, torch.bfloat16, "cpu")
        with pytest.raises(Exception, match="made_up_flash"):
            case.run(prefill.KERNELS["flash3"])

    def test_cannot_be_loaded(self, monkeypatch, tmp_path, caplog):
        self.install(monkeypatch, tmp_path, "raise ImportError('undefined symbol')")
        assert not flash3.works(torch.device("cpu"))
        assert "undefined symbol" in caplog.text

    def test_wrong_numbers(self, monkeypatch, tmp_path, caplog):
        self.install(monkeypatch, tmp_path, "def flash_attn_varlen_func(q, *rest, **more):\n    return q")
        assert not flash3.works(torch.device("cpu"))
        assert "wrong by" in caplog.text

    def test_right_numbers(self, monkeypatch, tmp_path):
        text = """
from xgr_engine.xattention import reference
from xgr_engine.xattention.ragged import Ragged

def flash_attn_varlen_func(q, k, v, query_start, key_start, queries, keys, *, softmax_scale, causal):
    assert causal and (queries, keys) == (200, 300)
    sequences = Ragged(tuple(query_start.tolist()), tuple(key_start.tolist()))
    return reference.prompt_attention(q, k, v, sequences, softmax_scale), None
"""
        self.install(monkeypatch, tmp_path, text)
        assert flash3.works(torch.device("cpu"))


# ---- on a GPU

ON_GPU = ["cudnn", "flash2", "flash3", "hopper", "runs", "triton"]


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ON_GPU)
@pytest.mark.parametrize("shared", [0, 7, 200])
def test_kernels_on_a_gpu(poisoned_memory, kernel, shared):
    device = torch.device("cuda")
    if kernel == "flash3" and not flash3.works(device):
        pytest.skip("FlashAttention-3 is not installed")
    if kernel == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    if kernel == "cudnn" and shared:
        pytest.skip("covers no prefix")
    for own, group, dim in ((AWKWARD, 2, 128), ([1000, 4097, 3], 1, 64), ([300] * 5, 8, 128)):
        case = Case(own, shared, group, dim, torch.bfloat16, "cuda")
        with prefill.preferred_kernels():
            assert case.error(case.run(prefill.KERNELS[kernel])) < TOLERANCE[torch.bfloat16]


@pytest.mark.cuda
def test_float32_with_a_prefix_on_a_gpu(poisoned_memory):
    case = Case(AWKWARD, 7, 2, 64, torch.float32, "cuda")
    with prefill.preferred_kernels():
        got = prefill.prompt_attention(case.q, case.k, case.v, case.sequences, case.scale)
    assert case.error(got) < TOLERANCE[torch.float32]

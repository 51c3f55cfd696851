"""The vocabulary's log-sum-exp against float64."""

from __future__ import annotations

import pytest
import torch

from xgr_engine.kernels import reference, triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(("rows", "vocabulary", "width"), [(1, 65, 32), (33, 1000, 64), (70, 2500, 128)])
def test_equals_float64(device, rows, vocabulary, width):
    hidden = torch.randn(rows, width, device=device)
    weight = 3 * width**-0.5 * torch.randn(vocabulary, width, device=device)
    out = triton.vocabulary_logsumexp(hidden, weight)
    assert out.dtype == torch.float32
    expected = reference.vocabulary_logsumexp(hidden.double(), weight.double())
    assert float((out.double() - expected).abs().max()) < 1e-5


def test_logits_far_from_zero(device):
    """exp overflows float32 at 88: the running maximum has to come out first, tile after tile."""
    hidden = torch.ones(3, 32, device=device)
    weight = torch.randn(3000, 32, device=device)
    weight[2900:] += 10  # logits around 320 in the last chunk
    weight[:100] -= 10
    out = triton.vocabulary_logsumexp(hidden, weight)
    expected = reference.vocabulary_logsumexp(hidden.double(), weight.double())
    assert torch.allclose(out.double(), expected, rtol=1e-6, atol=1e-5)


def test_every_token_counts(device):
    """A token left out, the last one included, is seen."""
    hidden = torch.randn(5, 32, device=device)
    weight = torch.randn(1300, 32, device=device)
    whole = triton.vocabulary_logsumexp(hidden, weight)
    for token in (0, 511, 1024, 1299):
        louder = weight.clone()
        louder[token] = 3 * hidden[0]
        assert triton.vocabulary_logsumexp(hidden, louder)[0] > whole[0] + 0.1


def test_half_precision_inputs_keep_float32_logits(device):
    dtype = torch.float16 if device == "cpu" else torch.bfloat16
    hidden, weight = (torch.randn(n, 64, device=device).to(dtype) for n in (40, 1500))
    out = triton.vocabulary_logsumexp(hidden, weight)
    expected = reference.vocabulary_logsumexp(hidden.double(), weight.double())
    assert float((out.double() - expected).abs().max()) < 2e-5

"""From hidden states to log-probabilities of one level's codes, in float32. The vocabulary's logits are never kept."""

from __future__ import annotations

import torch
from torch import Tensor

from xgr_engine.kernels.linear import float32_product
from xgr_engine.models.ops import Ops
from xgr_engine.options import ScoreOver


class Head:
    """The output projection. The rows of each level's SID tokens are gathered once, here.

    Args:
        weight: [V, H].
        level_tokens: per level the ids of the SID tokens, int64 [C_d] on the weight's device.
        ops: the kernels; one of them is the log-sum-exp over the vocabulary.
    """

    def __init__(self, weight: Tensor, level_tokens: list[Tensor], ops: Ops) -> None:
        self.weight = weight
        self.level_tokens = level_tokens
        self.ops = ops
        self._slices = [weight[tokens].contiguous() for tokens in level_tokens]

    def level_scores(self, hidden: Tensor, level: int, over: ScoreOver) -> tuple[Tensor, Tensor | None]:
        """Logits of a level's codes, and the log-sum-exp that turns them into log-probabilities.

        Args:
            hidden: [N, H] after the final norm.
            level: 0..L-1.
            over: ``vocab`` normalises over the vocabulary, ``level`` over the level's codes. ``allowed`` depends on the
                trie, so the log-sum-exp is None and the caller normalises over the candidates.

        Returns:
            float32 [N, C_level], and float32 [N] or None.
        """
        logits = float32_product(hidden, self._slices[level])
        if over == "vocab":
            return logits, self.ops.vocabulary_logsumexp(hidden, self.weight)
        return logits, torch.logsumexp(logits, dim=-1) if over == "level" else None

    def token_log_probs(self, hidden: Tensor, token: int) -> Tensor:
        """log p(``token``) over the whole vocabulary, float32 [N], for ``hidden`` [N, H]."""
        logit = float32_product(hidden, self.weight[token : token + 1]).squeeze(1)
        return (logit - self.ops.vocabulary_logsumexp(hidden, self.weight)).clamp_max_(0.0)

"""From hidden states to log-probabilities of one level's codes, in float32, without keeping the vocabulary's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from xgr_engine.options import ScoreOver

# Rows of full-vocabulary logits alive at once: 256 MiB of float32. Larger chunks gained nothing on an H200.
CHUNK_BYTES = 256 << 20


def float32_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for x [N, H], weight [V, H] -> float32 [N, V], never rounded to the storage dtype."""
    if x.dtype == torch.float32:
        return x @ weight.T
    if x.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return x.float() @ weight.T.float()


class Head:
    """The output projection [V, H], with the rows of each level's SID tokens gathered once.

    Args:
        weight: [V, H].
        level_tokens: per level the token ids, int64 [C_d] on the weight's device.
    """

    def __init__(self, weight: Tensor, level_tokens: list[Tensor]) -> None:
        self.weight = weight
        self.level_tokens = level_tokens
        self._slices = [weight[tokens].contiguous() for tokens in level_tokens]

    def level_scores(self, hidden: Tensor, level: int, over: ScoreOver) -> tuple[Tensor, Tensor | None]:
        """Logits of a level's codes and the log-sum-exp they are measured against.

        Args:
            hidden: [N, H] after the final norm.
            level: 0..L-1.
            over: ``vocab`` normalises over V, ``level`` over the level's codes; ``allowed`` needs the trie, so the
                second result is None and the caller normalises over the candidates.

        Returns:
            float32 [N, C_level] and float32 [N] (or None).
        """
        if over == "vocab":
            return self._over_vocabulary(hidden, level)
        logits = float32_matmul(hidden, self._slices[level])
        return logits, torch.logsumexp(logits, dim=-1) if over == "level" else None

    def token_log_probs(self, hidden: Tensor, token: int) -> Tensor:
        """log p(token) over the whole vocabulary, float32 [N], for hidden [N, H]."""
        parts = []
        for chunk in torch.split(hidden, self._chunk_rows()):
            logits = float32_matmul(chunk, self.weight)
            parts.append(logits[:, token] - torch.logsumexp(logits, dim=-1))
        return torch.cat(parts).clamp_max_(0.0)

    def _over_vocabulary(self, hidden: Tensor, level: int) -> tuple[Tensor, Tensor]:
        tokens = self.level_tokens[level]
        logits, normaliser = [], []
        for chunk in torch.split(hidden, self._chunk_rows()):
            full = float32_matmul(chunk, self.weight)
            normaliser.append(torch.logsumexp(full, dim=-1))
            logits.append(full.index_select(1, tokens))
        return torch.cat(logits), torch.cat(normaliser)

    def _chunk_rows(self) -> int:
        return max(1, CHUNK_BYTES // (4 * self.weight.shape[0]))

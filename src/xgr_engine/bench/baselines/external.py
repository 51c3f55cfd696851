"""Engines of others as contenders: FlashRec and vLLM, each in a process of its own with a copy of the same weights.

They share nothing with this process: prompts and answers go through a pipe, latency is taken by their process's clock
around the engine's call alone, and memory is all that their allocator holds, weights and pools included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from xgr_engine.bench.baselines.base import NotAvailableError, OneAtATime, RankedSids, decoder_only, other_architecture
from xgr_engine.bench.baselines.hf import codes_of_tokens
from xgr_engine.bench.baselines.hf_weights import write_checkpoint
from xgr_engine.bench.foreign.packages import FLASHREC, VLLM, Package
from xgr_engine.bench.foreign.process import Answer, Process, new_folder, remove_folder
from xgr_engine.bench.memory import Peak
from xgr_engine.bench.workloads import Batch, Workload
from xgr_engine.models.packing import PackedPrompts
from xgr_engine.models.spec import DTYPE_BYTES

_GIB = 1 << 30
_WAVE = 16  # FlashRec's default for the most requests computed together; the memory of its graphs grows with it
_VLLM_ROWS = 1024  # rows that vLLM computes together on a GPU of 70 GiB or more; 256 on smaller ones


class Foreign(OneAtATime):
    """A contender whose engine runs in :class:`Process`.

    Attributes:
        devices, dtypes: what the engine runs on.
    """

    name = ""
    what = ""
    package: ClassVar[Package]
    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def __init__(self) -> None:
        self._workload: Workload | None = None
        self._process: Process | None = None
        self._folder: Path | None = None
        self._answer: Answer | None = None
        self.notes: list[str] = []

    def available(self, workload: Workload) -> str | None:
        """The package is there, in a version that is known, and the workload is one that it can be asked for."""
        if reason := other_architecture(workload):
            return reason
        model = workload.model
        if model.device.type not in self.devices:
            return f"{self.package.name} needs a CUDA GPU"
        if reason := self.package.missing():
            return reason
        if model.dtype not in self.dtypes:
            return f"{self.package.name} computes in {' or '.join(self.dtypes)}, but the weights are {model.dtype}"
        if not workload.catalog.uniform:
            return (
                f"the catalog has SIDs of several lengths, but {self.package.name} generates a fixed number of tokens"
            )
        if model.score_suffix:
            return f"the model scores a suffix after each SID, which {self.package.name} cannot do"
        return self.unfit(workload)

    def unfit(self, workload: Workload) -> str | None:
        """None, or why this engine cannot do the workload."""
        raise NotImplementedError

    def settings(self, workload: Workload, folder: Path) -> dict[str, Any]:
        """What the worker's engine is made with, beside the checkpoint in ``folder``; may write files there."""
        raise NotImplementedError

    def prepare(self, workload: Workload) -> None:
        """Write the checkpoint, and start the process over it."""
        self.release()
        self._workload = workload
        self._folder = new_folder()
        try:
            self._process = self._started(workload, self._folder)
        except BaseException:
            self.release()
            raise

    def _started(self, workload: Workload, folder: Path) -> Process:
        write_checkpoint(workload.model, folder)
        search = workload.search
        common = {
            "model": str(folder),
            "dtype": workload.model.dtype,
            "context": workload.context,
            "users": workload.users,
            "beam": search.beam,
            "top_k": search.top_k,
            "levels": workload.catalog.trie.levels,
        }
        device = workload.model.device
        gpu = device.index or 0 if device.type == "cuda" else None
        settings = common | self.settings(workload, folder)
        return Process(self.package.python, self.name, settings, gpu=gpu, deadline=self.deadline)

    def run(self, batch: Batch) -> RankedSids:
        """One batch through the pipe."""
        if self._process is None or self._workload is None:
            raise NotAvailableError(f"{self.name} was not prepared")
        self._answer = self._process.run([prompt.tolist() for prompt in batch.prompts])
        self.notes += [note for note in self._answer.notes if note not in self.notes]
        levels = self._workload.catalog.trie.levels
        codes, scores = [], []
        for user in self._answer.lists:
            # a sequence of another length is no SID either: -1 stands for no token
            tokens = np.array([(one + [-1] * levels)[:levels] for one, _ in user], np.int64).reshape(-1, levels)
            codes.append(codes_of_tokens(tokens, self._workload))
            scores.append(np.array([score for _, score in user], np.float32))
        return RankedSids(codes, scores)

    @property
    def own_seconds(self) -> float | None:
        """What the engine took for the last batch, by its own clock."""
        return self._answer.seconds if self._answer else None

    @property
    def own_peak(self) -> Peak | None:
        """Memory of the engine's process during the last batch; on the device all of it is its own, weights too."""
        if self._answer is None or self._process is None:
            return None
        on_device = self._answer.device_bytes
        return Peak(
            None if on_device is None else 0, on_device, self._process.host_before or 0, self._answer.host_bytes
        )

    def release(self) -> None:
        """End the process and remove the checkpoint."""
        if self._process is not None:
            self._process.stop()
        if self._folder is not None:
            remove_folder(self._folder)
        self._process = self._folder = self._workload = self._answer = None


class Vllm(Foreign):
    """vLLM's beam search."""

    name = "vllm"
    what = (
        "vLLM's LLM.beam_search over token ids, free vocabulary (it takes no catalog), prefix cache on within a batch, "
        "emptied between batches"
    )
    package = VLLM
    dtypes = ("bfloat16", "float16", "float32")

    def unfit(self, workload: Workload) -> str | None:
        """It knows one kind of score, and asks for the best 2 W tokens of each row, which there must be."""
        if workload.search.score_over != "vocab":
            return "vLLM's beam search scores over the whole vocabulary only: use --score-over vocab"
        tokens, beam = workload.model.spec.vocab_size, workload.search.beam
        if tokens < 2 * beam:
            return f"vLLM needs a vocabulary of at least 2 W tokens: it has {tokens}, and W is {beam}"
        return None

    def settings(self, workload: Workload, folder: Path) -> dict[str, Any]:
        """Memory for the weights, for keys and values of all beams at once, and for what else the engine needs."""
        beam, users = workload.search.beam, workload.users
        # blocks of 16 tokens: those of the prompt are shared, and each beam has two of its own at most
        kv = _kv_bytes(workload, users * (workload.context + 16 + 2 * 16 * beam) * 5 // 4)
        # it starts with a trial of as many rows as it ever computes at once, however many the workload has
        logits = 3 * 4 * workload.model.spec.vocab_size * _VLLM_ROWS
        device_bytes = workload.model.bytes * 21 // 20 + kv + logits + 6 * _GIB
        self.notes = [
            "it knows no catalog: what it ranks may not be an item (invalid), and then takes the place of one",
            f"its memory includes a pool of about {kv / 1e9:,.1f} GB for keys and values, which it may not use up",
        ]
        return {"device_bytes": device_bytes}


class FlashRec(Foreign):
    """FlashRec, a serving engine for generative recommenders."""

    name = "flashrec"
    what = (
        "FlashRec's BeamRecEngine in the model's dtype (not FP8); applies the catalog to the best 2 W tokens of each "
        "level; scores over a level's codes; each beam reads its own prompt; prefix cache off"
    )
    package = FLASHREC

    def unfit(self, workload: Workload) -> str | None:
        """It reads Qwen3 checkpoints, and needs a first level of at least W codes."""
        spec, table = decoder_only(workload.model).spec, workload.model.table
        if spec.family != "qwen3" or spec.qkv_bias or spec.o_bias or spec.mlp_bias or not spec.qk_norm:
            return "FlashRec runs dense Qwen3 models only"
        if spec.rope.kind != "default":
            return "FlashRec does not support scaled rotary embeddings"
        codes, beam = len(table.token_ids[0]), workload.search.beam
        if codes < beam:
            return f"FlashRec needs at least W codes at the first level: it has {codes}, and W is {beam}"
        return None

    def settings(self, workload: Workload, folder: Path) -> dict[str, Any]:
        """The catalog as token ids, the tokens level by level, and a pool that holds a batch."""
        table, trie = workload.model.table, workload.catalog.trie
        sids = workload.catalog.sids
        levels = range(trie.levels)
        columns = [table.token_ids[level][table.columns(level, sids[:, level])] for level in levels]
        catalog = folder / "sids.json"
        catalog.write_text(json.dumps(np.stack(columns, axis=1).tolist()), encoding="utf-8")
        ids = np.concatenate([table.token_ids[level] for level in levels])
        contiguous = bool((np.diff(ids) == 1).all())
        beam, users = workload.search.beam, workload.users
        wave = min(users, _WAVE)
        self.notes = [
            "it takes the best 2 W tokens of a level before it looks at the catalog: beams without a child among them "
            "are lost, so its lists may be short and may miss items that the definition finds"
        ]
        if wave < users:
            self.notes.append(f"{wave} prompts at a time, which is its default")
        if workload.search.score_over != "level":
            self.notes.append(
                "it scores over a level's codes whatever --score-over says: its scores and lists differ by what the "
                "model gives to other tokens, and its head does less work; compare with --score-over level"
            )
        return {
            "wave": wave,
            "catalog": str(catalog),
            "token_range": f"{ids[0]}:{ids[-1]}" if contiguous else ids.tolist(),
            "codebook_sizes": [len(table.token_ids[level]) for level in levels],
            "kv_bytes": _kv_bytes(workload, users * (workload.context + trie.levels * beam) * 9 // 8 + 1024),
        }

    def run_scored(self, batch: Batch) -> RankedSids:
        """:meth:`run`, with scores as ``--score-over level`` defines them. For comparing answers, not for timing.

        Its first level is normalised over the tokens of all levels (later ones over their own): a user's scores are off
        by one constant, which changes no order. That constant is added here.
        """
        found = self.run(batch)
        if self._workload is None or self._workload.search.score_over != "level":
            return found
        shifts = first_level_share(self._workload, batch)
        scores = [own - np.float32(shift) for own, shift in zip(found.scores, shifts, strict=True)]
        return RankedSids(found.codes, scores)


@torch.inference_mode()
def first_level_share(workload: Workload, batch: Batch) -> list[float]:
    """Per prompt: log of the probability that its next token is one of the first level, if it is one of any level."""
    model = workload.model
    pack = PackedPrompts.of(list(batch.prompts), model.device)
    cache = model.decoder.new_cache(pack.cache_tokens, len(batch.prompts), 1)
    hidden = model.decoder.prefill(pack, cache).float()
    of_levels = []
    for ids in model.table.token_ids[: workload.catalog.trie.levels]:
        rows = torch.from_numpy(ids.astype(np.int64)).to(model.device)
        of_levels.append(torch.logsumexp(hidden @ model.head[rows].float().T, 1))
    shares: list[float] = (of_levels[0] - torch.logsumexp(torch.stack(of_levels), 0)).tolist()
    return shares


def _kv_bytes(workload: Workload, tokens: int) -> int:
    """Bytes of keys and values of so many tokens, all layers."""
    spec = workload.model.spec
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * tokens * DTYPE_BYTES[workload.model.dtype]

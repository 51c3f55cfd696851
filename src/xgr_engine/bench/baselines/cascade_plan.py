"""FlashInfer's cascade wrappers: their buffers, when they are planned, and a trial call against the definition.

A wrapper is made for a shape (users, rows a user, own tokens a row) in the library's graph mode, in which its page
tables live in buffers of ours: plan() depends on lengths alone, which the host knows, and the pages of level 1 are
written by the device before each run. So nothing waits for the device, and a CUDA graph can hold the runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from xgr_engine.errors import XgrError
from xgr_engine.models.decoder_only import DecoderOnly
from xgr_engine.search.capture import capturing
from xgr_engine.xattention import reference

# The library recommends 128 MB; its plans for many rows in graph mode need more, and say so.
_WORKSPACES = tuple(size << 20 for size in (128, 512, 2048, 8192))
_ROOM = 400  # prompt rows of the trial's pool
_TOLERANCE = 1e-2  # of the trial call, relative; bfloat16 alone costs 4e-3


def load_flashinfer() -> ModuleType:
    """The library.

    Raises:
        ImportError: missing, or without the wrapper.
    """
    library = importlib.import_module("flashinfer")
    if not hasattr(library, "MultiLevelCascadeAttentionWrapper"):
        raise ImportError("flashinfer has no MultiLevelCascadeAttentionWrapper")
    return library


@dataclass(frozen=True)
class Planned:
    """A wrapper for one shape.

    Attributes:
        run: (q [U * R, Hq, D], (keys, values) each [pages, 1, Hkv, D]) -> [U * R, Hq, D].
        own_pages: int32 [U * R * A], to be filled before each run: pool rows of each row's own tokens.
    """

    wrapper: Any
    own_pages: Tensor

    @property
    def run(self) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]:
        """Of the wrapper."""
        call: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] = self.wrapper.run
        return call


class CascadePlans:
    """The wrappers over one pool, made when a shape comes up and planned once a batch.

    Args:
        library: the ``flashinfer`` module.
        heads: Hq, Hkv, D.
        scale: of the logits.
        prompt_rows: rows of the pool that hold prompts.
    """

    def __init__(
        self,
        library: ModuleType,
        heads: tuple[int, int, int],
        scale: float,
        dtype: torch.dtype,
        prompt_rows: int,
        device: torch.device,
    ) -> None:
        self._library = library
        self._heads = heads
        self._scale = scale
        self._dtype = dtype
        self._prompt_rows = prompt_rows
        self._device = device
        self._lengths: list[int] = []
        self._shared = 0
        self._planned: dict[tuple[int, int, int], Planned] = {}
        self._stale: set[tuple[int, int, int]] = set()
        self._workspace: Tensor | None = None

    def begin(self, lengths: list[int], shared: int) -> None:
        """A batch of prompts of these lengths, packed behind ``shared`` rows of the pool."""
        self._lengths, self._shared = list(lengths), shared
        self._stale = set(self._planned)

    def get(self, users: int, rows: int, tokens: int) -> Planned:
        """The wrapper of a shape, planned for the batch. Only where :meth:`refresh` came first may it be captured."""
        shape = (users, rows, tokens)
        if shape not in self._planned:
            self._planned[shape] = self._made(shape)
        elif shape in self._stale:
            self._plan(self._planned[shape], shape)
        self._stale.discard(shape)
        return self._planned[shape]

    def refresh(self, users: int) -> None:
        """Plan every shape of so many users that came up before."""
        for shape in sorted(self._stale):
            if shape[0] == users:
                self.get(*shape)

    def _made(self, shape: tuple[int, int, int]) -> Planned:
        """A new wrapper, planned, over a workspace that suffices."""
        sizes = [size for size in _WORKSPACES if self._workspace is None or size >= self._workspace.numel()]
        for size in sizes:
            if self._workspace is None or size > self._workspace.numel():
                # wrappers made before keep theirs; of one pool only one runs at a time, so they share
                self._workspace = torch.empty(size, dtype=torch.uint8, device=self._device)
            planned = self._wrap(shape, self._workspace)
            try:
                self._plan(planned, shape)
            except RuntimeError as error:
                if "workspace buffer" not in str(error) or size == sizes[-1]:
                    raise
            else:
                return planned
        raise AssertionError("the last size returns or raises")

    def _wrap(self, shape: tuple[int, int, int], workspace: Tensor) -> Planned:
        users, rows, tokens = shape

        def buffers(*sizes: int) -> list[Tensor]:
            return [torch.zeros(size, dtype=torch.int32, device=self._device) for size in sizes]

        own_pages = buffers(users * rows * tokens)[0]
        wrapper = self._library.MultiLevelCascadeAttentionWrapper(
            2,
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf_arr=buffers(users + 1, users * rows + 1),
            paged_kv_indptr_buf_arr=buffers(users + 1, users * rows + 1),
            # a place without a user reads one row, whatever it holds
            paged_kv_indices_buf_arr=[*buffers(self._prompt_rows + users), own_pages],
            paged_kv_last_page_len_buf_arr=buffers(users, users * rows),
        )
        return Planned(wrapper, own_pages)

    def _plan(self, planned: Planned, shape: tuple[int, int, int]) -> None:
        """Lengths to the library, from the host: level 0 has a user a request, level 1 a row."""
        users, rows, tokens = shape
        absent = users - len(self._lengths)
        prompt_ends = torch.tensor([0, *self._lengths, *[1] * absent], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        present = sum(self._lengths)
        prompt_pages = torch.arange(self._shared, self._shared + present, dtype=torch.int32, device=self._device)
        prompt_pages = torch.cat([prompt_pages, prompt_pages.new_zeros(absent)])
        each = torch.arange(users * rows + 1, dtype=torch.int32)
        query_heads, kv_heads, dim = self._heads
        planned.wrapper.plan(
            [torch.arange(users + 1, dtype=torch.int32) * rows, each],
            [prompt_ends, each * tokens],
            [prompt_pages, planned.own_pages],
            [torch.ones(users, dtype=torch.int32), torch.ones(users * rows, dtype=torch.int32)],
            query_heads,
            kv_heads,
            dim,
            1,
            causal=False,
            sm_scale=self._scale,
            q_data_type=self._dtype,
        )


@torch.inference_mode()
def trial(library: ModuleType, model: DecoderOnly, *, captured: bool) -> None:
    """Run two batches of other lengths through the library, and compare both with the definition.

    Args:
        captured: the second batch by replaying a CUDA graph of the first.

    Raises:
        XgrError: the numbers are wrong.
        Exception: whatever the library raises.
    """
    spec, device = model.spec, model.device
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    users, rows, tokens, slots = 3, 70, 2, 150  # more rows than 64: beyond, the library may take other kernels
    plans = CascadePlans(library, heads, model.scale, model.dtype, _ROOM, device)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(model.dtype)

    keys, values = (normal(_ROOM + users * slots, spec.num_kv_heads, spec.head_dim) for _ in range(2))
    q = normal(users, rows, spec.num_heads, spec.head_dim)
    ancestors = torch.empty((users, rows, tokens), dtype=torch.int32, device=device)
    own = torch.arange(users, device=device)[:, None, None] * slots + _ROOM

    def attend() -> Tensor:
        planned = plans.get(users, rows, tokens)
        planned.own_pages.copy_((own + ancestors).flatten())
        return planned.run(q.flatten(0, 1), (keys.unsqueeze(1), values.unsqueeze(1))).view(q.shape)

    graph, out = None, torch.empty_like(q)
    for number, (lengths, shared) in enumerate((([37, 5, 300], 9), ([180, 211], 0))):
        plans.begin(lengths, shared)
        plans.refresh(users)
        ancestors.copy_(torch.randint(0, slots, ancestors.shape, generator=generator, device=device))
        if graph is not None:
            graph.replay()
        else:
            out = attend()
        if captured and graph is None:
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                out = attend()
            graph.replay()
        _compare(out, q, (keys, values), lengths, shared, ancestors, model.scale, number)


def _compare(
    out: Tensor,
    q: Tensor,
    pool: tuple[Tensor, Tensor],
    lengths: list[int],
    shared: int,
    ancestors: Tensor,
    scale: float,
    number: int,
) -> None:
    """Raises XgrError where the users' rows are not those of the definition in float32."""
    users = len(lengths)
    keys, values = (part.float() for part in pool)
    start = torch.tensor([shared, *lengths], device=q.device).cumsum(0)
    gen_k, gen_v = (part[_ROOM:].view(len(q), -1, *part.shape[1:])[:users] for part in (keys, values))
    expected = reference.beam_attention(
        q[:users].float(), keys[:_ROOM], values[:_ROOM], start, gen_k, gen_v, ancestors[:users], scale
    )
    error = float((out[:users].float() - expected).norm() / expected.norm())
    if not error < _TOLERANCE:
        raise XgrError(f"batch {number + 1} was wrong by {error:.1e}, relative")

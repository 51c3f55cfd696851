"""FlashInfer's cascade wrapper as documented, in plain torch, graph mode alone. Faults can be switched on."""

from __future__ import annotations

import torch

plans = 0  # plan() calls so far
needed_workspace = 0  # bytes below which a plan overflows
fault = ""  # "merge": the levels are added instead of merged; "raise": run() fails; "copies": pages are those of plan()


class MultiLevelCascadeAttentionWrapper:
    """Attention of each level over its pages, merged by log-sum-exp."""

    def __init__(
        self,
        num_levels,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf_arr=None,
        paged_kv_indptr_buf_arr=None,
        paged_kv_indices_buf_arr=None,
        paged_kv_last_page_len_buf_arr=None,
    ):
        assert kv_layout == "NHD" and use_cuda_graph and float_workspace_buffer.dtype == torch.uint8
        self.levels = num_levels
        self.workspace = float_workspace_buffer
        self.buffers = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        for level in range(num_levels):
            queries, pages, _, last = (array[level] for array in self.buffers)
            assert len(queries) == len(pages) == len(last) + 1
        self.total_rows = None

    def plan(
        self,
        qo_indptr_arr,
        paged_kv_indptr_arr,
        paged_kv_indices_arr,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,  # others stand between these there
        causal=False,
        sm_scale=None,
        q_data_type="float16",
    ):
        global plans
        plans += 1
        if self.workspace.numel() < needed_workspace:
            raise RuntimeError("Buffer overflow when allocating memory. Increase the workspace buffer size.")
        assert not causal and num_qo_heads % num_kv_heads == 0
        given = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        for level in range(self.levels):
            queries, pages, indices, last = (array[level] for array in given)
            assert all(tensor.dtype == torch.int32 for tensor in (queries, pages, indices, last))
            # lengths are read on the host; from a GPU that would wait for it
            assert queries.device.type == pages.device.type == last.device.type == "cpu"
            own = [array[level] for array in self.buffers]
            assert len(queries) == len(own[0]), "the batch size is fixed in graph mode"
            assert len(indices) == int(pages[-1]) <= len(own[2]), "page indices exceed the buffer"
            assert bool((last == page_size).all())
            own[0].copy_(queries)
            own[1].copy_(pages)
            own[2][: len(indices)].copy_(indices)
            own[3].copy_(last)
        rows = int(qo_indptr_arr[-1][-1])
        assert self.total_rows in (None, rows), "the number of rows is fixed by the first plan"
        self.total_rows = rows
        self.heads = (num_qo_heads, num_kv_heads, head_dim)
        self.page_size, self.scale, self.dtype = page_size, sm_scale or head_dim**-0.5, q_data_type
        self.kept = [indices.clone() for indices in self.buffers[2]]

    def run(self, q, paged_kv_cache):
        if fault == "raise":
            raise RuntimeError("no kernel image is available")
        keys, values = paged_kv_cache
        assert q.shape == (self.total_rows, self.heads[0], self.heads[2]) and q.dtype == self.dtype
        assert keys.shape[1:] == (self.page_size, *self.heads[1:]) and keys.dtype == self.dtype
        out = q.new_zeros(q.shape, dtype=torch.float32)
        weight = torch.full(q.shape[:2], -torch.inf)
        for level in range(self.levels):
            mixed, lse = self._level(level, q, keys.flatten(0, 1), values.flatten(0, 1))
            if fault == "merge":
                out += mixed
                continue
            total = torch.logaddexp(weight, lse)
            out = out * (weight - total).exp()[..., None] + mixed * (lse - total).exp()[..., None]
            weight = total
        return out.to(q.dtype)

    def _level(self, level, q, keys, values):
        queries, pages, indices, _ = (array[level] for array in self.buffers)
        if fault == "copies":
            indices = self.kept[level]
        group = self.heads[0] // self.heads[1]
        out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
        for request in range(len(queries) - 1):
            rows = slice(int(queries[request]), int(queries[request + 1]))
            found = indices[int(pages[request]) : int(pages[request + 1])].long()
            if len(found) == 0:
                continue
            own_k, own_v = (part[found].float().repeat_interleave(group, 1) for part in (keys, values))
            logits = torch.einsum("rhd,thd->rht", q[rows].float(), own_k) * self.scale
            lse[rows] = torch.logsumexp(logits, -1)
            out[rows] = torch.einsum("rht,thd->rhd", torch.softmax(logits, -1), own_v)
        return out, lse

"""The order of events in the Hopper kernel for ragged prompts: its own source on a model of the machine."""

from __future__ import annotations

import ast
import threading
from pathlib import Path
from types import SimpleNamespace

import hopper_machine
import pytest
import torch
from hopper_machine import Descriptor, Machine, Stuck

from xgr_engine.xattention import reference
from xgr_engine.xattention.ragged import Cut, Ragged, list_work

HOPPER = Path(reference.__file__).parent / "hopper"


def source(*changes: tuple[str, str]) -> str:
    """The kernel with what it imports from beside it, one text; each change replaces a text that must be there."""
    parts = []
    for name in ("work", "consumer", "prefill_kernel"):
        tree = ast.parse((HOPPER / f"{name}.py").read_text("utf-8"))
        tree.body = [
            node
            for node in tree.body
            if not (isinstance(node, ast.ImportFrom) and not node.module.startswith("triton"))
        ]
        parts.append(ast.unparse(tree))
    text = "\n".join(parts)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


class Scalar(int):
    def to(self, dtype):
        return self


class Pointer:
    def __init__(self, tensor, offset=0):
        self.flat, self.offset, self.dtype = tensor.view(-1), offset, SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.offset + more)


class Turns:
    """A named barrier for two warpgroups."""

    def __init__(self):
        self.changed, self.here, self.round = threading.Condition(), 0, 0

    def arrive(self):
        with self.changed:
            self.here += 1
            if self.here == 2:
                self.here, self.round = 0, self.round + 1
                self.changed.notify_all()

    def sync(self):
        with self.changed:
            now = self.round
            self.arrive()
            if not self.changed.wait_for(lambda: self.round != now, hopper_machine.PATIENCE_S):
                raise Stuck


class Flying:
    """A product on its way; ``value`` is there once it was waited for."""

    def __init__(self, a, b, start):
        self.a, self.b, self.start, self.value = a, b, start, None

    def land(self):
        a = self.a if isinstance(self.a, torch.Tensor) else self.a.t
        self.value = a.double() @ self.b.t.double() + self.start


class AttentionMachine(Machine):
    """What attention needs beyond products in a ring: rows in registers, pointers, turns of two warpgroups."""

    def _names(self, program, programs):
        names = super()._names(program, programs)
        turns = {"14": Turns(), "15": Turns()}

        def assembly(text, *rest, **more):
            verb, number, count = text.replace(",", "").replace(";", "").split()[:3]
            assert count == "256"
            getattr(turns[number], verb.removeprefix("bar."))()

        def pick(tensors, scalars):
            return lambda a, b: tensors(a, b) if isinstance(a, torch.Tensor) else scalars(a, b)

        def where(condition, a, b):
            return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else (a if condition else b)

        def store(pointer, value, mask):
            mask = mask.expand(value.shape)
            pointer.flat[pointer.offset[mask]] = value[mask]

        def wait(barrier, phase, pred=True):
            if pred:
                self._wait(barrier, phase)

        vars(names["gl"]).update(
            minimum=pick(torch.minimum, min),
            maximum=pick(torch.maximum, max),
            where=where,
            inline_asm_elementwise=assembly,
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=torch.float64),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=torch.float64),
            arange=lambda start, stop, layout: torch.arange(start, stop),
            expand_dims=torch.unsqueeze,
            max=lambda x, axis: x.max(axis).values,
            sum=lambda x, axis: x.sum(axis),
            load=lambda pointer: Scalar(pointer.flat[pointer.offset]),
            store=store,
            convert_layout=lambda value, layout, assert_trivial=False: value,
            SliceLayout=lambda *_: None,
            BlockedLayout=lambda *_: None,
            DotOperandLayout=lambda *_: None,
            int32=None,
        )
        names["mbarrier"].wait = wait
        return names

    def _multiply(self, a, b, acc, use_acc=True, is_async=False):
        for operand in (a if isinstance(a, torch.Tensor) else a.t, b.t):
            assert not operand.isnan().any(), "a product of what has not come yet"
        product = Flying(a, b, acc if use_acc else 0.0)
        self._queue().append(product)
        return product

    def _multiply_wait(self, pending, deps):
        self._dawdle()
        queue = self._queue()
        while len(queue) > pending:
            queue.pop(0).land()
        values = [dep.value if isinstance(dep, Flying) else dep for dep in deps]
        assert all(value is not None for value in values), "a product is used before it was waited for"
        return values[0] if len(values) == 1 else values

    def _queue(self):
        if not hasattr(self.local, "products"):
            self.local.products = []
        return self.local.products


def attend(text, own, shared, *, group=2, keys=4, stages=2, q_stages=2, programs=1, seed=0):
    """Relative error of the kernel with tiles of 8 query rows, D 4, over NaN behind the last row of everything."""
    rows, kv_heads, dim = 8, 2, 4
    head = [shared] if shared else []
    sequences = Ragged.of([*head, *own], [*head, *(length + shared for length in own)])
    queries, keys_given = sequences.query_start[-1], sequences.key_start[-1]
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn((count, heads, dim), generator=generator, dtype=torch.float64)
        for count, heads in ((queries, kv_heads * group), (keys_given, kv_heads), (keys_given, kv_heads))
    )
    work = list_work(sequences, kv_heads * group, kv_heads, 8 * dim, Cut(rows, keys, programs))
    out = torch.full_like(q, torch.nan)
    descriptors = [Descriptor(t.flatten(1), (block, dim)) for t, block in ((q, rows // 2), (k, keys), (v, keys))]
    scale = 0.5
    args = (*descriptors, Pointer(torch.from_numpy(work)), Pointer(out), scale * 1.4426950408889634, len(work))
    sizes = {"HEADS": kv_heads * group, "G": group, "D": dim, "ROWS": rows, "KEYS": keys}
    machine = AttentionMachine(seed)
    machine.run(
        text, "hopper_prefill_kernel", min(programs, len(work)), args, **sizes, STAGES=stages, Q_STAGES=q_stages
    )
    expected = reference.prompt_attention(q, k, v, sequences, scale)
    return float((out - expected).norm() / expected.norm())


OWN = [9, 1, 16, 7, 23]


@pytest.mark.parametrize(("stages", "q_stages"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("keys", [4, 8])
@pytest.mark.parametrize("shared", [0, 3, 8])
def test_right_whoever_is_slow(keys, stages, q_stages, shared):
    for seed, programs in enumerate((1, 5)):
        error = attend(
            *(source(), OWN, shared), keys=keys, stages=stages, q_stages=q_stages, programs=programs, seed=seed
        )
        assert error < 1e-12


@pytest.mark.parametrize("group", [1, 4])
def test_groups(group):
    assert attend(source(), OWN, 5, group=group, programs=3) < 1e-12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("* KEYS + n <= position + line", "* KEYS + n < position + line"),
        ("masked = tiles - (position + 1) // KEYS", "masked = tiles - (position + 1 + KEYS) // KEYS"),
        ("mbarrier.init(k_empty.index(i), count=2)", "mbarrier.init(k_empty.index(i), count=1)"),
        ("mbarrier.wait(v_empty.index(stage), phase)", "pass"),
        ("mbarrier.wait(q_empty.index(q_stage), q_phase)", "pass"),
        ("mbarrier.wait(v_full.index(stage), phase)", "pass"),
        ("key_row + (tiles - 1 - t) * KEYS", "key_row + t * KEYS"),
    ],
)
def test_mistakes_are_seen(old, new, monkeypatch):
    """A mask off by one or left out, slots given back too early or not waited for, tiles in a wrong order."""
    monkeypatch.setattr(hopper_machine, "PATIENCE_S", 1.0)
    text = source((old, new))

    def fails(seed):
        try:
            return not attend(text, OWN, 3, seed=seed) < 1e-6
        except (AssertionError, Stuck):
            return True

    assert any(fails(seed) for seed in range(4))

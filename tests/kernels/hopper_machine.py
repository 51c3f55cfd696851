"""A small model of what a Hopper kernel in Gluon relies on: threads, barriers with phases, copies that land late.

The kernel's own source runs on it, partitions as threads. It knows nothing of layouts and registers (compiling does),
only of order, and takes the worst the rules allow: a copy's target is NaN from the moment the copy is started, data
lands at a random later time, a product reads its operands when it is waited for at the latest, a copy to global memory
reads its source at the wait. So a slot given back too early, a phase mistaken or a wait left out ends in wrong numbers
or in :class:`Stuck`.
"""

from __future__ import annotations

import ast
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 20.0


class Stuck(Exception):
    """A wait that nobody ends."""


class Accumulator:
    """A tile in registers, and the products on their way into it."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.flying = value, []

    def finish(self, leave: int) -> None:
        while len(self.flying) > leave:
            a, b, keep = self.flying.pop(0)
            self.value = a.t.double() @ b.t.double() + (self.value if keep else 0.0)

    def reshape(self, shape: list[int]) -> Accumulator:
        assert not self.flying, "an accumulator is read while products are on their way into it"
        return Accumulator(self.value.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Accumulator:
        return Accumulator(self.value.permute(order))

    def split(self) -> tuple[Tensor, Tensor]:
        return self.value[..., 0], self.value[..., 1]


class Memory:
    """A view of shared memory."""

    def __init__(self, t: Tensor) -> None:
        self.t, self.dtype = t, t.dtype

    def index(self, i: int) -> Memory:
        assert 0 <= i < len(self.t)
        return Memory(self.t[i])

    def permute(self, order: tuple[int, ...]) -> Memory:
        return Memory(self.t.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
        return Memory(self.t.view(shape))

    def store(self, value: Tensor) -> None:
        self.t.copy_(value)

    def load(self, layout: object) -> Tensor:
        return self.t.clone()


class Barrier:
    def __init__(self) -> None:
        self.changed, self.count, self.missing, self.bytes, self.parity = threading.Condition(), 0, 0, 0, 0

    def update(self, arrivals: int = 0, size: int = 0) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += size
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.parity = self.count, self.parity ^ 1
                self.changed.notify_all()

    def wait(self, phase: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.parity != phase, PATIENCE_S):
                raise Stuck


class Descriptor:
    """A matrix in global memory, read and written in blocks; what lies outside is zero, or not written."""

    def __init__(self, matrix: Tensor, block: tuple[int, int]) -> None:
        self.matrix, self.block, self.dtype, self.layout = matrix, block, matrix.dtype, None
        self.block_type = SimpleNamespace(nbytes=block[0] * block[1] * matrix.element_size())

    def _cut(self, at: list[int]) -> tuple[Tensor, tuple[slice, slice]]:
        part = self.matrix[at[0] : at[0] + self.block[0], at[1] : at[1] + self.block[1]]
        return part, (slice(0, part.shape[0]), slice(0, part.shape[1]))

    def load(self, at: list[int], target: Tensor) -> None:
        part, inside = self._cut(at)
        target.zero_()
        target[inside] = part

    def store(self, at: list[int], source: Tensor) -> None:
        part, inside = self._cut(at)
        part.copy_(source[inside])


class Machine:
    """Runs a kernel's programs one after another; ``seed`` decides who is slow."""

    def __init__(self, seed: int) -> None:
        self.random, self.copies, self.lock = random.Random(seed), [], threading.Lock()
        self.local, self.errors = threading.local(), []

    def run(self, text: str, kernel: str, programs: int, args: tuple[Any, ...], **constants: Any) -> None:
        """Run ``kernel`` of a module's source ``text``, whose imports from Triton this machine stands in for."""
        tree = ast.parse(text)
        tree.body = [n for n in tree.body if not (isinstance(n, ast.ImportFrom) and str(n.module).startswith("triton"))]
        code = compile(tree, "kernel", "exec")
        for program in range(programs):
            names = self._names(program, programs)
            exec(code, names)
            names[kernel](*args, **constants)
            if self.errors:
                raise self.errors[0]

    def _dawdle(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 5e-4)

    def _names(self, program: int, programs: int) -> dict[str, Any]:
        def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
            if layout == "barriers":
                barriers = [Barrier() for _ in range(shape[0])]
                return SimpleNamespace(index=barriers.__getitem__)
            return Memory(torch.full(shape, torch.nan, dtype=dtype))

        layout = SimpleNamespace(get_default_for=lambda *_: None)
        gl = SimpleNamespace(
            constexpr=lambda value: value,
            program_id=lambda axis: program,
            num_programs=lambda axis: programs,
            static_range=range,
            minimum=min,
            where=lambda condition, a, b: a if condition else b,
            exp2=torch.exp2,
            inline_asm_elementwise=lambda asm, *rest, **_: 1.0 / rest[1][0],  # rcp is the only one
            zeros=lambda shape, dtype, layout: Accumulator(torch.zeros(shape, dtype=torch.float64)),
            convert_layout=lambda value, layout, assert_trivial: value,
            allocate_shared_memory=allocate,
            warp_specialize=self._warp_specialize,
            NVMMASharedLayout=layout,
            NVMMADistributedLayout=lambda *_: None,
            float32=None,
            int64=None,
        )
        return {
            "gluon": SimpleNamespace(jit=_jit),
            "gl": gl,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: "barriers", init=_init, wait=self._wait, arrive=self._arrive, expect=_expect
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._load,
                async_copy_shared_to_global=self._store,
                store_wait=self._store_wait,
            ),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._multiply_wait,
            "fence_async_shared": lambda: None,
        }

    def _warp_specialize(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        def guarded(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            self.local.stores = []
            try:
                function(*args)
                assert not self.local.stores, "the program ends before its result left shared memory"
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=guarded, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            with self.lock:
                copy = self.copies.pop(self.random.randrange(len(self.copies))) if self.copies else None
            if copy:
                copy()
            else:
                time.sleep(1e-5)
        assert not self.copies, "copies are on their way when the program ends"

    def _wait(self, barrier: Barrier, phase: int) -> None:
        self._dawdle()
        barrier.wait(phase)

    def _arrive(self, barrier: Barrier) -> None:
        barrier.update(arrivals=1)
        self._dawdle()

    def _load(self, descriptor: Descriptor, at: list[int], barrier: Barrier, target: Memory) -> None:
        target.t.fill_(torch.nan)

        def land() -> None:
            descriptor.load(at, target.t)
            barrier.update(size=-descriptor.block_type.nbytes)

        with self.lock:
            self.copies.append(land)

    def _store(self, descriptor: Descriptor, at: list[int], source: Memory) -> None:
        self.local.stores.append((descriptor, at, source))

    def _store_wait(self, pending: int) -> None:
        self._dawdle()
        while len(self.local.stores) > pending:
            descriptor, at, source = self.local.stores.pop(0)
            descriptor.store(at, source.t)

    def _multiply(self, a: Memory, b: Memory, acc: Accumulator, use_acc: bool = True, is_async: bool = False) -> Any:
        assert not (a.t.isnan().any() or b.t.isnan().any()), "a product of what has not come yet"
        acc.flying.append((a, b, use_acc))
        if not is_async:
            acc.finish(0)
        return acc

    def _multiply_wait(self, pending: int, deps: list[Accumulator]) -> Accumulator:
        self._dawdle()
        deps[0].finish(pending)
        return deps[0]


def _jit(function: Any = None, **_: Any) -> Any:
    return function if function else _jit


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.missing = count


def _expect(barrier: Barrier, size: int) -> None:
    barrier.update(arrivals=1, size=size)

"""The beam rows that a model computes in one decode step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Beam rows to compute: which token each feeds in, and where its key and value go.

    Attributes:
        tokens: int64 [N] token that each feeds in.
        position: int64 [N] its position in the user's sequence.
        slots: int64 [N] where its key and value are written: ``user * S + slot``.
        ancestors: int32 [U, R, A] the slots that each cell of a grid of R rows per user reads, its own included; -1 =
            none.
        cells: int64 [N] the cell of each row, ``user * R + row``; None: the rows are all cells in order.
    """

    tokens: Tensor
    position: Tensor
    slots: Tensor
    ancestors: Tensor
    cells: Tensor | None

    def to_grid(self, values: Tensor) -> Tensor:
        """Values of the rows [N, ...] as a grid [U, R, ...]; cells without a row hold zeros."""
        users, width = self.ancestors.shape[:2]
        if self.cells is not None:
            grid = values.new_zeros(users * width, *values.shape[1:])
            grid[self.cells] = values
            values = grid
        return values.view(users, width, *values.shape[1:])

    def from_grid(self, grid: Tensor) -> Tensor:
        """The inverse of :meth:`to_grid`."""
        flat = grid.flatten(0, 1)
        return flat if self.cells is None else flat[self.cells]

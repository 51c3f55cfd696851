"""The engine's search on a GPU without its early termination: every candidate is sorted."""

from __future__ import annotations

import torch

from xgr_engine.recommender import Recommender
from xgr_engine.search.device import DeviceSearch
from xgr_engine.search.lanes import Lane
from xgr_engine.xbeam.triton import Step


class SortedStep(Step):
    """A level's step that sorts all candidates instead of bounding the k-th best by the maxima of blocks."""

    def shortlist(self, k: int) -> None:
        """The k best by a sort of everything, handed on in node order."""
        work = self.workspace
        capacity = work.scores.shape[1]
        total = work.begin[:, -1:]
        place = torch.arange(capacity, device=total.device)
        scores, place = work.scores.masked_fill(place >= total, -torch.inf).sort(dim=1, descending=True, stable=True)
        scores, place = scores[:, :k], place[:, :k]
        live = scores > -torch.inf
        place, order = torch.where(live, place, capacity).sort(1)
        work.short_score[:, : place.shape[1]] = scores.gather(1, order)
        work.short_place[:, : place.shape[1]] = place.to(torch.int32)
        work.short_count.copy_(live.sum(1))
        work.read.add_(total)


class SortedSearch(DeviceSearch):
    """Places as :class:`DeviceSearch`."""

    step = SortedStep


class SortedRecommender(Recommender):
    """The engine over a :class:`SortedSearch`."""

    def _new_lane(self, tokens: int, users: int, number: int) -> Lane:
        return Lane(self.setup, tokens, users, graphs=self._graphs, number=number, make_search=SortedSearch)

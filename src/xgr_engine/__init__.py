"""xgr: batch recommendations from generative recommenders. See docs/architecture.md and docs/python-api.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from xgr_engine.api import Recommendation, Recommendations, Recommender, load

__all__ = ["Recommendation", "Recommendations", "Recommender", "load"]


def __getattr__(name: str) -> Any:
    """The public names on first use: ``import xgr_engine`` alone must stay quick and import no torch."""
    if name in __all__:
        from xgr_engine import api

        return getattr(api, name)
    if name == "__version__":
        from xgr_engine.system import version

        return version("xgr") or "unknown"  # sources that are not installed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

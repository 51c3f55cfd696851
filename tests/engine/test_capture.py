"""Which captured graphs are kept."""

from __future__ import annotations

from xgr_engine.search.capture import RecentGraphs


def test_the_shapes_used_last_are_kept_and_room_is_made_before_another_is_recorded() -> None:
    graphs: RecentGraphs[int, str] = RecentGraphs(2)
    recorded: list[tuple[int, list[str]]] = []

    def get(shape: int) -> str:
        def record() -> str:
            recorded.append((shape, list(graphs.kept())))
            return str(shape)

        return graphs.get(shape, record)

    assert [get(shape) for shape in (1, 2, 1, 3, 1, 2)] == ["1", "2", "1", "3", "1", "2"]
    assert recorded == [(1, []), (2, ["1"]), (3, ["1"]), (2, ["1"])]

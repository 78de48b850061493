"""Plans for joining shards: shapes in, slabs out; nothing is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lazyzero.errors import InconsistentCheckpoint, UnsupportedLayout
from lazyzero.layout import tp_plan
from lazyzero.layout.tp_affine import plan_of_map
from lazyzero.layout.tp_plan import Cut, Plan


def _cuts(plan: Plan) -> list[tuple[int, int, int]]:
    return [(cut.rank, cut.start, cut.size) for cut in plan.cuts]


def test_split_joins_uneven_shards() -> None:
    """Shards may have any width along their dimension."""
    plan = tp_plan.split("w", [(4, 3), (4, 2), (4, 0)], 1)
    assert (plan.shape, plan.dim, _cuts(plan)) == ((4, 5), 1, [(0, 0, 3), (1, 0, 2), (2, 0, 0)])


def test_replicated_and_averaged() -> None:
    """The one takes the first rank's copy, the other all."""
    assert tp_plan.replicated("w", [(4, 3), (4, 3)]) == Plan((4, 3), 0, (Cut(0, 0, 4),))
    assert tp_plan.averaged("w", [(4,), (4,)]) == Plan((4,), 0, (Cut(0, 0, 4), Cut(1, 0, 4)), averaged=True)
    assert tp_plan.replicated("w", [(), ()]).shape == ()


def test_vocabulary_loses_its_padding() -> None:
    """Rows beyond the vocabulary are cut off, however the rows were split."""
    assert tp_plan.trimmed(tp_plan.split("w", [(8, 2), (8, 2)], 0), 13).shape == (13, 2)
    assert tp_plan.trimmed(tp_plan.split("w", [(16, 2), (16, 2)], 1), 13).shape == (13, 4)
    assert tp_plan.trimmed(tp_plan.split("w", [(8, 2), (8, 2)], 0), 99).shape == (16, 2)


def test_halves() -> None:
    """A gate and its value share a shard on each rank, and stand one after the other in the whole."""
    plan = tp_plan.halves("w", [(6, 2), (4, 2)])
    assert plan.shape == (10, 2)
    assert _cuts(plan) == [(0, 0, 3), (1, 0, 2), (0, 3, 3), (1, 2, 2)]


def test_sub_parameters_with_recorded_widths() -> None:
    """Query, key and value of uneven widths: each is gathered over the ranks before the next."""
    plan = tp_plan.sub_parameters("w", [(9, 4), (7, 4)], [(8, 5, 3), -1], 0, [[4, 4], [3, 2], [2, 1]])
    assert plan.shape == (16, 4)
    assert _cuts(plan) == [(0, 0, 4), (1, 0, 4), (0, 4, 3), (1, 4, 2), (0, 7, 2), (1, 6, 1)]


def test_sub_parameters_of_a_bias() -> None:
    """A bias has its weight's view of two dimensions, or one of its own."""
    for view in ([(4, 2), -1], [(4, 2)]):
        plan = tp_plan.sub_parameters("b", [(3,), (3,)], view, 0, [[2, 2], [1, 1]])
        assert (plan.shape, plan.blocks) == ((6,), 1)
        assert _cuts(plan) == [(0, 0, 2), (1, 0, 2), (0, 2, 1), (1, 2, 1)]


def test_a_rank_may_hold_none_of_a_sub_parameter() -> None:
    """A rank whose recorded widths are all 0 need not have the parameter at all."""
    plan = tp_plan.sub_parameters("w", [(2, 4), (1, 4), None], [(2, 1), -1], 0, [[1, 1, 0], [1, 0, 0]])
    assert _cuts(plan) == [(0, 0, 1), (1, 0, 1), (0, 1, 1)]


@pytest.mark.parametrize("spec", [3, (4, 4, 4)])
def test_sub_parameters_before_widths_were_recorded(spec: object) -> None:
    """Up to 0.19.5 their number or sizes are recorded, and each was split evenly."""
    plan = tp_plan.sub_parameters("w", [(6, 4), (6, 4)], [spec, -1], 0)
    assert _cuts(plan) == [(0, 0, 2), (1, 0, 2), (0, 2, 2), (1, 2, 2), (0, 4, 2), (1, 4, 2)]


def test_a_number_that_is_the_whole_size_is_one_sub_parameter() -> None:
    """Before 0.19.6 a plain size stood where later the number of sub-parameters does."""
    assert _cuts(tp_plan.sub_parameters("w", [(6, 4), (6, 4)], [12, 4], 0)) == [(0, 0, 6), (1, 0, 6)]


def test_blocks_of_a_dimension() -> None:
    """Experts' rows in one matrix, viewed as [experts, out, in] and split along `out`, are split block by block."""
    plan = tp_plan.sub_parameters("w", [(6, 5), (3, 5)], [3, (3,), 5], 1, [[2, 1]])
    assert (plan.shape, plan.dim, plan.blocks, _cuts(plan)) == ((9, 5), 0, 3, [(0, 0, 2), (1, 0, 1)])


_REFUSED: list[tuple[Callable[[], Plan], str]] = [
    (lambda: tp_plan.split("w", [(4, 3), (5, 3)], 1), "dimension 1 only"),
    (lambda: tp_plan.split("w", [(4,), (4,)], 1), "no dimension 1"),
    (lambda: tp_plan.split("w", [(4, 3), None], 0), "none"),
    (lambda: tp_plan.replicated("w", [(4,), (5,)]), "same shape"),
    (lambda: tp_plan.averaged("w", [(4,), None]), "each rank"),
    (lambda: tp_plan.sub_parameters("w", [(5, 4), (5, 4)], [(6, 6), -1], 0), "add up"),
    (lambda: tp_plan.sub_parameters("w", [(5, 4), (5, 4)], [(6, 4), -1], 0, [[3, 3], [2, 1]]), "add up"),
    (lambda: tp_plan.sub_parameters("w", [(5, 4), (5, 4)], [(6, 4), -1], 0, [[3], [2]]), "widths"),
    (lambda: tp_plan.sub_parameters("w", [(5, 4), (5, 4)], [3, -1], 0), "add up"),
    (lambda: tp_plan.sub_parameters("w", [(5, 4), (5, 4)], [3, -1], 2), "dimension 2"),
    (lambda: tp_plan.sub_parameters("w", [(1 << 40, 1), (1 << 40, 1)], [1 << 40, -1], 0), "add up"),
]


@pytest.mark.parametrize(("plan", "said"), _REFUSED)
def test_shards_that_do_not_fit_are_refused(plan: Callable[[], Plan], said: str) -> None:
    """What contradicts the shards is never joined: the error names the parameter and the shapes."""
    with pytest.raises(InconsistentCheckpoint, match=r"^w: ") as caught:
        plan()
    assert said in str(caught.value)


def test_uneven_sub_parameters_without_widths_are_refused() -> None:
    """Where only sizes are recorded and they do not divide evenly, no split can be assumed."""
    with pytest.raises(UnsupportedLayout, match="not recorded"):
        tp_plan.sub_parameters("w", [(9, 4), (7, 4)], [(8, 5, 3), -1], 0)


def _map(
    whole: list[int], *ranks: tuple[list[int], list[tuple[list[int], int, int]]], **more: object
) -> dict[str, object]:
    """An affine map: for each rank its shard's shape and boxes (shape, offset in the whole, offset in the shard)."""

    def strides(shape: list[int]) -> list[int]:
        return [1] if len(shape) == 1 else [shape[1], 1]

    return {
        "logical_shape": whole,
        "ranks": {
            rank: {
                "shard_shape": shard,
                "pieces": [
                    {
                        "shape": box,
                        "source": [a, strides(whole)],
                        "dest": [b, strides(shard)],
                        "locations": [rank],
                        **more,
                    }
                    for box, a, b in boxes
                ],
            }
            for rank, (shard, boxes) in enumerate(ranks)
        },
    }


def test_maps_of_rows_columns_and_copies() -> None:
    """The boxes of an affine map say the dimension, the order, and what is there twice."""
    rows = _map([4, 2], ([1, 2], [([1, 2], 0, 0)]), ([3, 2], [([3, 2], 2, 0)]))
    assert plan_of_map("w", [(1, 2), (3, 2)], rows) == Plan((4, 2), 0, (Cut(0, 0, 1), Cut(1, 0, 3)))
    columns = _map([2, 3], ([2, 1], [([2, 1], 2, 0)]), ([2, 2], [([2, 2], 0, 0)]))
    assert plan_of_map("w", [(2, 1), (2, 2)], columns) == Plan((2, 3), 1, (Cut(1, 0, 2), Cut(0, 0, 1)))
    both = _map([2, 3], ([2, 3], [([2, 3], 0, 0)]), ([2, 3], [([2, 3], 0, 0)]))
    assert plan_of_map("w", [(2, 3), (2, 3)], both) == Plan((2, 3), 0, (Cut(0, 0, 2),))


def test_a_map_with_blocks_that_are_shared() -> None:
    """Query rows are split and the key's are on every rank: the key is taken once."""
    shared = _map([6, 2], ([4, 2], [([2, 2], 0, 0), ([2, 2], 8, 4)]), ([4, 2], [([2, 2], 4, 0), ([2, 2], 8, 4)]))
    assert plan_of_map("w", [(4, 2), (4, 2)], shared) == Plan((6, 2), 0, (Cut(0, 0, 2), Cut(1, 0, 2), Cut(0, 2, 2)))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (_map([4, 2], ([1, 2], [([1, 2], 0, 0)]), ([3, 2], [([3, 2], 2, 0)]), scale=0.5), "scaled"),
        (_map([4, 2], ([1, 2], [([1, 2], 0, 0)]), ([2, 2], [([2, 2], 2, 0)])), "recorded is"),
        (_map([4, 2], ([1, 2], []), ([3, 2], [([3, 2], 2, 0)])), "boxes"),
        (_map([4, 2], ([1, 2], [([1, 2], 9, 0)]), ([3, 2], [([3, 2], 2, 0)])), "box"),
        ({"logical_shape": [4, 2]}, "ranks"),
        ({"logical_shape": [4, 1 << 60], "ranks": {}}, "shape"),
    ],
)
def test_maps_of_another_kind_are_refused(entry: dict[str, object], said: str) -> None:
    """A map that is not boxes of the shards there are, unscaled, is never guessed at."""
    with pytest.raises(UnsupportedLayout, match="affine map") as caught:
        plan_of_map("w", [(1, 2), (3, 2)], entry)
    assert said in str(caught.value)


def test_a_map_with_a_gap_is_refused() -> None:
    """Every index of the whole must be on some rank."""
    gap = _map([5, 2], ([1, 2], [([1, 2], 0, 0)]), ([3, 2], [([3, 2], 4, 0)]))
    with pytest.raises(InconsistentCheckpoint, match="indices 1 and on"):
        plan_of_map("w", [(1, 2), (3, 2)], gap)

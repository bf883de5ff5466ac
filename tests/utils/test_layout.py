import pytest

from phantom_parallel.nn import PhantomLinear
from phantom_parallel.utils.layout import BlockLayout


@pytest.mark.parametrize(("blocks", "block_in", "block_out", "ghosts"), [(2, 3, 3, 1), (5, 4, 2, 2), (3, 4, 6, 4)])
def test_weights_are_those_of_a_layer_and_break_even_is_where_they_equal_the_dense_ones(
    blocks, block_in, block_out, ghosts
):
    layout = BlockLayout(blocks * block_in, blocks * block_out, blocks, ghosts)
    layer = PhantomLinear(layout.in_features, layout.out_features, bias=False, blocks=blocks, ghosts=ghosts)
    assert layout.weights == sum(parameter.numel() for parameter in layer.parameters())
    dense = layout.in_features * layout.out_features
    assert (layout.weights < dense) == (ghosts < layout.break_even)


def test_each_rank_holds_whole_blocks_or_an_equal_part_of_one():
    few, equal, many = (BlockLayout(64, 32, 4, 4, ranks) for ranks in (2, 4, 8))
    assert [list(few.blocks_of(rank)) for rank in range(2)] == [[0, 1], [2, 3]]
    assert [list(equal.blocks_of(rank)) for rank in range(4)] == [[0], [1], [2], [3]]
    assert [(many.blocks_of(rank)[0], many.place_of(rank)) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (few.inside, equal.inside, many.inside) == (1, 1, 2)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ((64, 64, 4, 4, 3), "3 ranks do not divide blocks=4: run on 2 or 4 ranks"),
        ((64, 64, 4, 4, 6), "6 ranks are not a multiple of blocks=4: run on 4 or 8 ranks"),
        ((64, 64, 4, 6, 16), "4 ranks a block do not divide its 6 ghosts: run on 12 or 24 ranks"),
        ((24, 64, 4, 4, 16), "do not divide its 6 input features: run on 12 or 24 ranks"),
        ((64, 24, 4, 4, 16), "do not divide its 6 output features: run on 12 or 24 ranks"),
    ],
)
def test_ranks_that_cannot_share_the_blocks_are_told_which_can(layout, message):
    with pytest.raises(ValueError, match=message):
        BlockLayout(*layout)

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.eviction import Usage
from vllm_teach.kvcache.radix_tree import RadixCursor, RadixNode
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.radix_tree_drawing import TreeNode, TreeView, draw_tree, view_tree


def node(parent: RadixNode, tokens: list[int], blocks: list[int]) -> RadixNode:
    child = RadixNode(parent.end, tokens, blocks, Usage(0, 0, 0), parent)
    parent.children[tokens[0]] = child
    return child


def small_tree() -> RadixNode:
    """Six tokens, behind which two and four go on; a text of its own of three. Blocks of 4 tokens."""
    root = RadixNode(0, [], [], Usage(0, 0, 0))
    head = node(root, [1, 2, 3, 4, 5, 6], [7, 8])
    node(head, [10, 11], [8])
    tail = node(head, [20, 21, 22, 23], [9, 3])
    tail.cursors.add(RadixCursor(tail, 0))
    node(root, [30, 31, 32], [1])
    return root


VIEW = TreeView(
    (
        TreeNode(0, 0, 6, (1, 2, 3, 4, 5, 6), (7, 8), 0, None),
        TreeNode(0, 6, 8, (10, 11), (8,), 0, 0),
        TreeNode(1, 6, 10, (20, 21, 22, 23), (9, 3), 1, 0),
        TreeNode(2, 0, 3, (30, 31, 32), (1,), 0, None),
    )
)


def test_each_leaf_has_a_row_and_a_node_spans_its_positions() -> None:
    view = view_tree(small_tree())
    assert view == VIEW
    assert (view.num_rows, view.num_tokens, view.length) == (3, 15, 10)


def test_it_is_drawn_to_scale() -> None:
    figure = draw_tree(VIEW, decode=lambda tokens: "".join(chr(96 + token) for token in tokens))
    [ax] = figure.axes
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    unit = boxes[0].get_width() / 6
    for each, box in zip(VIEW.nodes, boxes, strict=True):
        assert box.get_width() == pytest.approx(unit * (each.end - each.start))
        assert box.get_x() == pytest.approx(boxes[0].get_x() + unit * each.start)
    assert len({round(box.get_y(), 6) for box in boxes}) == 3
    texts = [text.get_text() for text in ax.texts]
    assert {"abcdef", "jk", "blocks 7, 8", "block 8", "blocks 9, 3 · 1 running"} <= set(texts)
    locked = [box for box in boxes if box.get_facecolor()[:3] != boxes[0].get_facecolor()[:3]]
    assert locked == [boxes[2]]
    plt.close(figure)


def test_a_text_longer_than_its_box_is_cut() -> None:
    view = TreeView((TreeNode(0, 0, 100, (0,) * 100, (0,), 0, None), TreeNode(0, 100, 101, (0,), (1,), 0, 0)))
    figure = draw_tree(view, decode=lambda tokens: "x" * 200)
    texts = [text.get_text() for text in figure.axes[0].texts if set(text.get_text()) <= {"x", "…"}]
    assert all(text.endswith("…") for text in texts)
    assert [len(text) < 120 for text in texts] == [True, True]
    plt.close(figure)


def test_a_tree_without_a_node() -> None:
    assert view_tree(RadixNode(0, [], [], Usage(0, 0, 0))) == TreeView(())
    with pytest.raises(InvalidArgumentError, match="view has no node"):
        draw_tree(TreeView(()))


def test_its_colours_are_the_palettes() -> None:
    figure = draw_tree(VIEW)
    fills = [to_hex(patch.get_facecolor()).upper() for patch in figure.axes[0].patches]
    assert fills == [style.colour(concept) for concept in ("done", "done", "current", "done")]
    plt.close(figure)

"""The radix tree of computed prefixes: token by token, with long runs of tokens in one node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_teach.kvcache.eviction import Usage


@dataclass(eq=False)
class RadixCursor:
    """A sequence's indexed tokens end where `node` ends. A cursor at a node is the sequence's lock on it."""

    node: RadixNode
    generation: int


@dataclass(eq=False)
class RadixNode:
    """The tokens at positions `start` to `end` - 1 of every text that passes through here.

    `blocks` has one physical block for each logical block that the span touches, the first one being logical block
    start // block_size. Each holds its logical block's content from the block's beginning (which may lie in an
    ancestor) up to the node's end or the block's. So where a match ends in a node, that node's blocks are the ones to
    read. The root of a salt has neither tokens nor parent; it alone has its `salt`.
    """

    start: int
    tokens: list[int]
    blocks: list[int]
    usage: Usage
    parent: RadixNode | None = field(default=None, repr=False)
    children: dict[int, RadixNode] = field(default_factory=dict, repr=False)
    cursors: set[RadixCursor] = field(default_factory=set, repr=False)
    salt: str = ""

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.tokens)

    def path(self) -> Iterator[RadixNode]:
        """Yield the node and its ancestors but for the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> list[RadixNode]:
        """Return all descendants, parents before children."""
        found = list(self.children.values())
        for node in found:
            found.extend(node.children.values())
        return found


def count_equal(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return how many tokens the two begin with alike."""
    if tokens == others:
        return len(tokens)
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def walk(node: RadixNode, tokens: Sequence[int]) -> list[tuple[RadixNode, int]]:
    """Follow `tokens` down from the end of `node`: return each child on the way and how many of its tokens match.

    All but the last match to their end. Takes time in proportion to the tokens that match, not to the tree.
    """
    steps: list[tuple[RadixNode, int]] = []
    start = 0
    while start < len(tokens):
        child = node.children.get(tokens[start])
        if child is None:
            break
        matched = count_equal(child.tokens, list(tokens[start : start + len(child.tokens)]))
        steps.append((child, matched))
        if matched < len(child.tokens):
            break
        node, start = child, start + matched
    return steps


def split(node: RadixNode, matched: int, block_size: int) -> RadixNode:
    """Split `node` behind its first `matched` tokens; return the new upper part.

    `node` itself becomes the lower part, so what refers to its end stays right. Where the split falls into a block,
    both parts record it: it holds the content of either.
    """
    assert node.parent is not None
    middle = node.start + matched
    first = node.start // block_size
    upper = RadixNode(
        node.start,
        node.tokens[:matched],
        node.blocks[: (middle - 1) // block_size - first + 1],
        Usage(node.usage.inserted, node.usage.released, node.usage.uses),
        node.parent,
        {node.tokens[matched]: node},
    )
    node.parent.children[node.tokens[0]] = upper
    node.start, node.tokens, node.parent = middle, node.tokens[matched:], upper
    node.blocks = node.blocks[middle // block_size - first :]
    return upper

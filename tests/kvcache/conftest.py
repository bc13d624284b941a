"""The pool that the tests of both prefix caches begin with."""

import pytest

from vllm_teach.kvcache.block_pool import BlockPool


@pytest.fixture
def pool() -> BlockPool:
    """Sixteen blocks, all free."""
    return BlockPool(16)

"""Which keys a query may see: patterns, their masks, tile maps and densities, combined with `&`, `|` and `~`."""

from vllm_teach.attention.patterns.base import Pattern, TileKind
from vllm_teach.attention.patterns.simple import Causal, LocalWindow

__all__ = ["Causal", "LocalWindow", "Pattern", "TileKind"]

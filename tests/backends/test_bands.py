"""Bands against brute force: which rows see something, and which limits hide nothing."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.attention.patterns import Causal, GlobalTokens, LocalWindow
from vllm_teach.backends.bands import band_of, blind_rows

lengths = st.integers(0, 9)
limits = st.integers(-1, 10)


@given(lengths, lengths, limits, limits)
def test_a_band_hides_what_its_pattern_hides(q_len: int, kv_len: int, left: int, right: int) -> None:
    pattern = LocalWindow(left, right)
    band = band_of(pattern, q_len, kv_len)
    assert band is not None
    mask = pattern.mask(q_len, kv_len)
    assert (LocalWindow(*band).mask(q_len, kv_len) == mask).all()
    assert blind_rows(band, q_len, kv_len) == int((~mask.any(dim=1)).sum())


@given(lengths, lengths, limits, limits)
def test_a_limit_is_kept_only_where_it_hides_something(q_len: int, kv_len: int, left: int, right: int) -> None:
    band = band_of(LocalWindow(left, right), q_len, kv_len)
    assert band is not None
    for side, unlimited in (("left", LocalWindow(-1, band[1])), ("right", LocalWindow(band[0], -1))):
        limit = band[0] if side == "left" else band[1]
        same = bool((unlimited.mask(q_len, kv_len) == LocalWindow(*band).mask(q_len, kv_len)).all())
        if side == "left" and 0 < kv_len <= q_len:  # the last query looks back over all keys before its own
            assert same == (limit == -1)
        assert same or limit != -1


def test_what_is_no_band() -> None:
    assert band_of(None, 5, 5) == (-1, -1)
    assert band_of(Causal(), 5, 5) == (-1, 0)
    assert band_of(Causal(), 1, 5) == (-1, -1)
    assert band_of(Causal() & LocalWindow(3, 2), 5, 9) == (3, 0)
    assert band_of(Causal() & GlobalTokens(2), 5, 5) is None
    assert band_of(~Causal(), 5, 5) is None

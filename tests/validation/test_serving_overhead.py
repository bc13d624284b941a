"""What HTTP costs, on a small scale: both ways generate the planned tokens, and each round has both figures."""

from vllm_teach.validation.serving_overhead import Round, measure_overhead


def test_each_round_measures_both_ways_on_the_tiny_model() -> None:
    rounds = list(measure_overhead("tiny", requests=8, clients=4, rounds=2))
    assert len(rounds) == 2
    assert all(each.offline > 0 and each.http > 0 for each in rounds)


def test_the_ratio_is_http_s_share_of_offline() -> None:
    assert Round(offline=200.0, http=150.0).ratio == 0.75

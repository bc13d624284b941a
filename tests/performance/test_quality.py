import math

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.load import load_model
from vllm_teach.models.resolve import resolve_model
from vllm_teach.models.scoring import decoder_parts
from vllm_teach.performance.quality import Quality, measure_quality
from vllm_teach.quantization import perplexity


def quality(nlls, chosen, right):
    return Quality(torch.tensor(nlls, dtype=torch.float64), torch.tensor(chosen), torch.tensor(right))


def test_losses_by_hand():
    before = quality([1.0, 1.0, 2.0, 4.0], [5, 6, 7, 8], [True, True, True, True])
    after = quality([1.0, 1.0, 2.0, 4.4], [5, 6, 9, 9], [True, True, False, True])
    assert after.losses(before) == {
        "perplexity": pytest.approx(100 * (math.exp(0.1) - 1)),
        "nats a token": pytest.approx(5.0),
        "right tokens": pytest.approx(25.0),
        "other choices": pytest.approx(50.0),
    }
    assert before.losses(before) == dict.fromkeys(after.losses(before), 0.0)
    with pytest.raises(InvalidArgumentError, match="1 tokens for 4"):
        after.losses(quality([1.0], [1], [True]))


def test_the_same_perplexity_as_the_package_measures():
    tiny = load_model(resolve_model("tiny"))
    ids = torch.randint(2048, (700,), generator=torch.Generator().manual_seed(0))
    found = measure_quality(tiny, ids, window=256)
    hidden, head = decoder_parts(tiny)
    expected = perplexity(hidden, ids, window=256, stride=192, head=head)
    torch.testing.assert_close(found.nlls, expected.nlls, rtol=1e-4, atol=1e-4)
    assert found.right.tolist() == (found.chosen == ids[1:]).tolist()
    assert 0 <= found.accuracy <= 1

"""Who has the key comes in."""

import hmac

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.serving.http import api_key
from vllm_teach.serving.http.settings import AppSettings

KEY = "sk-0123456789"


@pytest.mark.parametrize(
    "sent",
    [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xff\xfe"],
)
def test_without_the_key_there_is_nothing_but_health_metrics_and_version(scripted, sent):
    ask, engine = scripted(api_key=KEY)
    headers = {} if sent is None else {"authorization": sent}
    for method, path in (
        ("POST", "/generate"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/nothing"),
    ):
        answer = ask(method, path, {"prompt": "A"} if method == "POST" else None, headers=headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert KEY not in answer.body.decode()
    assert engine.submitted == []
    for path in ("/health", "/version", "/openapi.json"):
        assert ask("GET", path, headers=headers).status == 200
    assert ask("GET", "/metrics", headers=headers).status == 404, "this app has none, and says so"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_with_the_key_all_is_as_without_one(scripted, says, scheme):
    ask, _ = scripted([says("x", finish="stop")], api_key=KEY)
    headers = {"authorization": f"{scheme} {KEY}"}
    assert ask("POST", "/generate", {"prompt": "A"}, headers=headers).status == 200
    assert ask("GET", "/nothing", headers=headers).status == 404


def test_a_body_is_not_read_before_the_key_was_seen(scripted):
    ask, _ = scripted(api_key=KEY, max_body_bytes=10)
    assert ask("POST", "/generate", b"A" * 100).status == 401


def test_keys_are_compared_in_constant_time_and_at_equal_length(scripted, monkeypatch):
    compared, real = [], hmac.compare_digest

    def compare(one, other):
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(api_key.hmac, "compare_digest", compare)
    ask, _ = scripted(api_key=KEY)
    for key in ("x", KEY[:-1] + "0", "y" * 500):
        ask("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
    assert len(compared) == 3
    assert {len(part) for pair in compared for part in pair} == {32}


@pytest.mark.parametrize("key", ["", "two words", "ключ", "a\n", 5])
def test_a_key_that_fits_into_no_header_is_refused_and_not_shown(key):
    with pytest.raises(InvalidArgumentError, match=r"api_key='\*\*\*' is not valid"):
        AppSettings(api_key=key)


def test_the_key_is_in_no_repr():
    assert KEY not in repr(AppSettings(api_key=KEY))

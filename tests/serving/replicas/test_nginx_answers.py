"""What the real nginx says itself."""

import asyncio
import json

import aiohttp
import pytest

from vllm_teach.serving.replicas.nginx import HOW_TO_INSTALL, find_nginx

pytestmark = pytest.mark.skipif(find_nginx() is None, reason=HOW_TO_INSTALL)


def test_what_nginx_says_itself_is_openais_error_object(try_it):
    async def test(group) -> None:
        status, answer = await group.post("/short", data=b"x" * 200_000)
        assert (status, answer["bytes"]) == (200, 200_000), "more than nginx keeps in memory"
        status, answer = await group.post("/short", data=b"x" * 300_000)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        assert "250000" in answer["error"]["message"]
        async with group.client.post(f"{group.group.url}/whole") as response:
            assert response.status == 504
            assert response.headers["X-Should-Retry"] == "false"
            assert (await response.json())["error"]["type"] == "timeout_error"
        async with group.client.get(f"{group.group.url}/metrics") as response:
            assert response.status == 404
            message = (await response.json())["error"]["message"]
            assert all(f"http://{address}/metrics" in message for address in group.group.addresses)

    try_it(test, max_body_bytes=250_000, read_timeout=0.3)


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET /short HTTP/1.1\r\n\r\n", 400, None),
        (b"GET /short HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", 431, "headers_too_large"),
    ],
)
def test_what_nginx_cannot_read_is_answered_in_openais_words_too(sent, status, code, try_it):
    async def test(group) -> None:
        port = int(group.group.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
        writer.close()
        assert int(head.split()[1]) == status
        assert json.loads(body)["error"]["code"] == code

    try_it(test, replicas=1)


@pytest.mark.parametrize("connections", [16, 17])  # nginx lacks one to the client first, or one to the replica
def test_who_finds_no_connection_left_is_told_when_to_come_back(connections, try_it):
    async def test(group) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(group.group.url.rpartition(":")[2]))
        # It has its own connection already, and asks for one to the replica when its body is there.
        writer.write(b"POST /short HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 1\r\n\r\n")
        try:
            while (response := await group.client.post(f"{group.group.url}/stream")).status == 200:
                pass
            status, retry_after, body = response.status, response.headers["Retry-After"], await response.read()
        except aiohttp.ClientError:  # the last one was not even accepted
            writer.write(b"x")
            head, _, body = (await asyncio.wait_for(reader.read(), 20)).partition(b"\r\n\r\n")
            status = int(head.split()[1])
            retry_after = "1" if b"\r\nRetry-After: 1" in head else ""
        writer.close()
        assert (status, retry_after) == (503, "1")
        assert json.loads(body)["error"]["code"] == "balancer_failed"

    try_it(test, replicas=1, workers=1, connections=connections)

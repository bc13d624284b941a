"""What a server's answer to GET /health, or its lack, is taken for."""

import asyncio

import pytest

from vllm_teach.serving.replicas.reserved_port import ReservedPort
from vllm_teach.serving.replicas.server_health import Health, ask_health


@pytest.mark.parametrize(
    ("answer", "health"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", Health.WELL),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", Health.ILL),
        (b"220 a mail server\r\n", Health.SILENT),
        (b"HTTP/1.1", Health.SILENT),
        (b"x" * 100_000, Health.SILENT),  # no line ends in what is read at most
        (b"", Health.SILENT),
        (None, Health.SILENT),  # nothing at all
    ],
)
def test_an_answer_in_words(answer, health):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    async def test() -> Health:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await ask_health(server.sockets[0].getsockname()[1], 10.0 if answer is not None else 0.2)

    asked: list[bytes] = []
    assert asyncio.run(test()) is health
    assert [request.split(b"\r\n")[0] for request in asked] == [b"GET /health HTTP/1.1"]


def test_where_nobody_listens_there_is_silence():
    reserved = ReservedPort("127.0.0.1")
    assert asyncio.run(ask_health(reserved.port)) is Health.SILENT
    reserved.close()

"""A CSV trace of requests, as Azure publishes them: what is read, and what is refused with its line."""

from pathlib import Path

import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.simulator.request_trace import read_request_trace
from vllm_teach.performance.virtual_time import Arrival

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0319600,110,27
"""


@pytest.fixture
def write(tmp_path: Path):
    def make(text: str | bytes) -> Path:
        path = tmp_path / "trace.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


def test_azures_columns(write) -> None:
    traffic = read_request_trace(write(AZURE))
    assert [(each.prompt_len, each.output_len) for each in traffic.arrivals] == [(4808, 10), (3180, 8), (110, 27)]
    assert [each.time for each in traffic.arrivals] == pytest.approx([0, 0.052, 0.052], abs=1e-6)
    assert "trace.csv" in str(traffic)
    assert len(read_request_trace(write(AZURE), 2).arrivals) == 2


@pytest.mark.parametrize(
    "text",
    [
        "timestamp, contexttokens ,GENERATEDTOKENS\n5.5,3,2\n7,4,1\n",
        "GeneratedTokens;x\n".replace(";x", ",user,Timestamp,ContextTokens") + "2,bob,5.5,3\n1,eve,7,4\n",
        "\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\r\n5.5,3,2\r\n\r\n7,4,1\r\n",
        'TIMESTAMP,ContextTokens,GeneratedTokens\n"5.5","3","2"\n"7","4","1"',
    ],
)
def test_case_order_and_other_columns_do_not_matter(write, text: str) -> None:
    assert read_request_trace(write(text)).arrivals == (Arrival(3, 2), Arrival(4, 1, 1.5))


def test_times_with_a_zone(write) -> None:
    rows = "2024-05-10 00:59:59.5+01:00,3,2\n2024-05-10 00:00:01+00:00,4,1\n"
    traffic = read_request_trace(write("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))
    assert [each.time for each in traffic.arrivals] == [0, 1.5]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "trace.csv is empty.*TIMESTAMP, ContextTokens, GeneratedTokens"),
        (HEAD, "has no requests"),
        (HEAD + "\n\n", "has no requests"),
        ("time,ContextTokens\n1,2\n", "has the columns time, ContextTokens.*add TIMESTAMP, GeneratedTokens"),
        (HEAD + "1,2,3\n2,-5,3\n", "line 3: ContextTokens='-5' is no length"),
        (HEAD + "1,2,0\n", "line 2: GeneratedTokens='0' is no length"),
        (HEAD + "1,2.5,3\n", "ContextTokens='2.5'"),
        (HEAD + "1,,3\n", "ContextTokens=''"),
        (HEAD + "1,2\n", "line 2 has 2 cells"),
        (HEAD + "2,2,3\n1,2,3\n", "line 3: TIMESTAMP='1' is before the row above"),
        (HEAD + "nan,2,3\n", "TIMESTAMP='nan' is no time"),
        (HEAD + "soon,2,3\n", "TIMESTAMP='soon' is no time: give a date"),
        (HEAD + "1,2,3\n2023-11-16 18:17:04,2,3\n", "line 3: TIMESTAMP='2023.*give a number of seconds"),
        (HEAD.encode() + b"1,2,\xff\n", "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused(write, text, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        read_request_trace(write(text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"none\.csv' cannot be read"):
        read_request_trace(tmp_path / "none.csv")

"""What `bench quantization` cannot do is said before a text is tokenised, and before minutes are spent."""

import json
from pathlib import Path

import pytest
import torch

from vllm_teach import cli
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import resolve_model
from vllm_teach.models.quantize import quantize_model
from vllm_teach.performance.quantization_plan import BASELINE, Variant, check_plan
from vllm_teach.quantization.quantization_config import QuantizationConfig
from vllm_teach.training import calibration_text, evaluation_text

TINY = resolve_model("tiny")  # its context is 512


@pytest.fixture(scope="module")
def already(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is quantised."""
    folder = tmp_path_factory.mktemp("models") / "rtn"
    quantize_model(TINY, folder, QuantizationConfig.choose("rtn"), progress=False)
    return folder


def test_a_window_is_as_asked_for_or_1024_or_the_context(tmp_path: Path) -> None:
    assert check_plan(TINY, tmp_path / "deep" / "new") == 512
    assert check_plan(TINY, tokens=258, window=2) == 2
    assert check_plan(TINY, tokens=258, window=512) == 512
    values = json.loads((TINY / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "max_position_embeddings": 2048}))
    assert check_plan(tmp_path, tokens=258) == 1024


@pytest.mark.parametrize("window", [0, 1, -5, True, 64.0, "64", 513, 10**30])
def test_odd_windows_are_refused(window: object) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^window={window!r} is "):
        check_plan(TINY, tokens=1000, window=window)  # type: ignore[arg-type]


def test_too_few_tokens_for_an_interval_are_refused() -> None:
    """All variants were once made, scored and timed before it turned out."""
    with pytest.raises(InvalidArgumentError, match=r"tokens=257 are too few for an interval .*: score 258 or more"):
        check_plan(TINY, tokens=257)


def test_a_model_that_is_quantised_already_is_refused(already: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is quantised already \(rtn, 4 bits\)"):
        check_plan(already, tokens=1000)


def test_a_variant_that_the_model_does_not_suit_is_refused() -> None:
    """The ones before it were once made first."""
    odd = Variant("odd", torch.bfloat16, QuantizationConfig.choose("gptq", group_size=96))
    with pytest.raises(InvalidArgumentError, match="group_size=96 does not cut"):
        check_plan(TINY, tokens=1000, variants=(Variant(BASELINE), odd))


def test_without_bfloat16_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(InvalidArgumentError, match="variants has no 'bf16'"):
        check_plan(TINY, tokens=1000, variants=(Variant("fp32", torch.float32),))


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_folder_that_is_a_file_or_below_one_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        InvalidArgumentError, match=r"^folder='.*file.*' cannot hold the quantised models \(.* is a file"
    ):
        check_plan(TINY, tmp_path / "file" / below)
    with pytest.raises(InvalidArgumentError, match=r"^folder='y+' cannot hold"):
        check_plan(TINY, Path("y" * 300))


def test_the_command_says_so_before_it_reads_a_text(
    already: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    for module in (calibration_text, evaluation_text):
        monkeypatch.setattr(module, "collect_documents", lambda: pytest.fail("a text was read"))
    (tmp_path / "file").write_text("x")
    for arguments, words in (
        (["--model", "tiny", "--folder", str(tmp_path / "file")], "is a file"),
        (["--model", "tiny", "--window", "1"], "window=1 is not valid"),
        (["--model", "tiny", "--window", "513"], "use at most 512"),
        (["--model", "tiny", "--tokens", "99"], "tokens=99 are too few"),
        (["--model", str(already)], "is quantised already"),
    ):
        assert cli.main(["bench", "quantization", "--quiet", *arguments]) == 1
        [line] = capsys.readouterr().err.strip().splitlines()
        assert words in line

"""Shapes against the parameter counts that their papers state, and against what lies in the package."""

from pathlib import Path

import pytest

from vllm_teach import data
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.load import load_config
from vllm_teach.performance.model_shapes import SHAPES, get_model_shape, shape_names

# As published; Mistral's and OPT's are rounded.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "smollm2-135m": 134_515_008,
}
APPROXIMATE = {"opt-13b-like": 12.85e9, "gpt-3-175b-like": 175e9, "dialogue-200b-like": 200e9}


def test_every_shape_has_the_published_number_of_parameters() -> None:
    assert set(shape_names()) == set(PARAMETERS) | set(APPROXIMATE)
    for name, count in PARAMETERS.items():
        assert Decoder(get_model_shape(name)).num_parameters() == count, name
    for name, about in APPROXIMATE.items():
        assert Decoder(get_model_shape(name)).num_parameters() == pytest.approx(about, rel=0.003), name


def test_every_shape_names_its_source_and_says_when_it_is_approximated() -> None:
    for name, shape in SHAPES.items():
        assert shape.source
        assert name.endswith("-like") == ("approximated" in shape.source or "no published" in shape.source)


def test_kv_bytes_that_papers_state() -> None:
    assert get_model_shape("opt-13b-like").kv_bytes_per_token(2) == 800 * 1024  # Kwon et al. 2023, section 3
    assert get_model_shape("llama-2-7b").kv_bytes_per_token(2) == 512 * 1024


def test_mistral_slides_in_every_layer() -> None:
    shape = get_model_shape("mistral-7b")
    assert {shape.window(layer) for layer in range(shape.num_layers)} == {4096}
    assert get_model_shape("llama-2-7b").window(0) is None


def test_smollm2_is_what_the_fetched_model_says(smollm2_path: Path) -> None:
    assert load_config(smollm2_path) == get_model_shape("smollm2-135m")


def test_an_alias_and_a_folder_work_as_well() -> None:
    assert get_model_shape("tiny") == load_config(data.path("tiny-llama"))
    assert get_model_shape(data.path("tiny-llama")) == get_model_shape("tiny")


def test_an_unknown_name_lists_all(tmp_path: Path) -> None:
    for name in ("llama-9", tmp_path):
        with pytest.raises(InvalidArgumentError) as caught:
            get_model_shape(name)
        for known in (*SHAPES, "smollm2", "tiny"):
            assert known in str(caught.value)

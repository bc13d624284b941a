import json

import pytest

from vllm_teach.errors import InvalidArgumentError, ModelLoadError
from vllm_teach.quantization.quantization_config import QuantizationConfig, read_config

PUBLISHED = {
    # What the Hub's AWQ and GPTQ models say of themselves, from either writer.
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        QuantizationConfig("awq", 4, 128, "awq"),
    ),
    "AWQ, upper case": (
        {"quant_method": "AWQ", "bits": 4, "group_size": 64, "version": "GEMM", "modules_to_not_convert": None},
        QuantizationConfig("awq", 4, 64, "awq"),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": True, "sym": True, "damp_percent": 0.1},
        QuantizationConfig("gptq", 3, 32, "gptq", symmetric=True, act_order=True),
    ),
    "gptq, whole rows": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False, "checkpoint_format": "gptq"},
        QuantizationConfig("gptq", 8, None, "gptq"),
    ),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq_v2", "dynamic": None},
        QuantizationConfig("gptq", 4, 128, "gptq_v2"),
    ),
    "awq, by GPTQModel": (
        {"quant_method": "awq", "checkpoint_format": "gemm", "bits": 4, "group_size": 128, "sym": False},
        QuantizationConfig("awq", 4, 128, "awq"),
    ),
    "gptq v2, by the other name": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "format": "gptq_v2"},
        QuantizationConfig("gptq", 4, 128, "gptq_v2"),
    ),
    "quantize_config.json of old": (
        {"bits": 4, "group_size": 128, "desc_act": False},
        QuantizationConfig("gptq", 4, 128, "gptq"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name):
    entry, expected = PUBLISHED[name]
    assert QuantizationConfig.from_hf(entry) == expected


@pytest.mark.parametrize(
    "config",
    [
        QuantizationConfig.choose("awq"),
        QuantizationConfig.choose("awq", bits=3, group_size=32),
        QuantizationConfig.choose("gptq", bits=2, act_order=True, symmetric=True),
        QuantizationConfig.choose("gptq", group_size=-1),
        QuantizationConfig.choose("gptq", head_bits=8, act_order=True),
        QuantizationConfig("gptq", layout="gptq_v2"),
        QuantizationConfig.choose("rtn", bits=8, symmetric=True),
        QuantizationConfig.choose("int8", head_bits=8),
    ],
    ids=str,
)
def test_what_is_written_is_read_again(config):
    assert QuantizationConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_the_layout_is_the_published_one_where_it_holds_the_result():
    assert QuantizationConfig.choose("awq").layout == "awq"
    assert QuantizationConfig.choose("gptq", bits=3).layout == "gptq"
    for config in (
        QuantizationConfig.choose("awq", bits=3),
        QuantizationConfig.choose("awq", head_bits=8),
        QuantizationConfig.choose("gptq", head_bits=8),
        QuantizationConfig.choose("rtn"),
        QuantizationConfig.choose("int8"),
    ):
        assert config.layout == "vllm_teach"
        assert not config.readable_elsewhere
        # So that other loaders refuse it aloud, instead of making up weights that they miss.
        assert config.to_hf()["quant_method"] == "vllm_teach"


def test_int8_is_eight_bits_symmetric_and_by_rows():
    config = QuantizationConfig.choose("int8")
    assert (config.bits, config.group_size, config.symmetric) == (8, None, True)


def test_the_head_has_bits_and_groups_of_its_own():
    config = QuantizationConfig.choose("gptq", bits=3, head_bits=8)
    assert [config.bits_of(name) for name in ("model.embed_tokens", "lm_head", "model.layers.0.mlp.up_proj")] == [
        8,
        8,
        3,
    ]
    assert [config.group_size_of(name) for name in ("lm_head", "model.layers.0.mlp.up_proj")] == [None, 64]
    assert QuantizationConfig.choose("gptq", bits=3).bits_of("lm_head") == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"method": "nf4"}, "method='nf4'"),
        ({"method": "gptq", "bits": 5}, "bits=5 is not valid for the layout 'gptq': use 2 or 3 or 4 or 8"),
        ({"method": "gptq", "bits": 4.0}, "bits=4.0 is not valid"),
        ({"method": "int8", "bits": 4}, "bits=4 is not valid for the method 'int8'"),
        ({"method": "rtn", "group_size": 0}, "group_size=0"),
        ({"method": "rtn", "group_size": 64.0}, "group_size=64.0"),
        ({"method": "awq", "head_bits": 4}, "head_bits=4 is not valid for the layout 'vllm_teach': use 8 or 16"),
        ({"method": "awq", "act_order": True}, "act_order=True"),
    ],
)
def test_values_that_do_not_go_together_are_refused(arguments, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        QuantizationConfig.choose(**arguments)


def test_a_layout_that_cannot_hold_it_is_refused():
    with pytest.raises(InvalidArgumentError, match="bits=3 is not valid for the layout 'awq': use 4"):
        QuantizationConfig("awq", bits=3, layout="awq")
    with pytest.raises(InvalidArgumentError, match="head_bits=8 is not valid for the layout 'gptq': use 16"):
        QuantizationConfig("gptq", layout="gptq", head_bits=8)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"quant_method": "fp8"}, "quant_method = 'fp8'"),
        ({"quant_method": 4, "bits": 4}, "quant_method = 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "version = 'gemv'.*'gemm'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "marlin"}, "'marlin'"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "checkpoint_format": "gemv"},
            "checkpoint_format = 'gemv'",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "is_marlin_format": True}, "is_marlin_format"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"-:down": {}}}, "dynamic"),
        ({"quant_method": "gptq", "group_size": 64}, "bits = None"),
        ({"quant_method": "gptq", "bits": "4", "group_size": 64}, "bits = '4'"),
        ({"quant_method": "gptq", "bits": True, "group_size": 64}, "bits = True"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": 1}, "desc_act = 1"),
        ({"quant_method": "gptq", "bits": 5, "group_size": 64}, "5 is not valid"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -2}, "group_size=-2"),
        ({"quant_method": "vllm_teach", "method": "x", "bits": 4, "group_size": 64}, "method='x'"),
    ],
)
def test_what_cannot_be_read_names_the_file_and_the_entry(entry, complaint, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": entry}))
    with pytest.raises(ModelLoadError, match=complaint) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_folder_says_it_in_config_json_or_in_autogptqs_own_file(tmp_path):
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_config(tmp_path) is None
    (tmp_path / "quantize_config.json").write_text('{"bits": 3, "group_size": 64}')
    assert read_config(tmp_path) == QuantizationConfig("gptq", 3, 64, "gptq")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": QuantizationConfig("awq").to_hf()}))
    assert read_config(tmp_path) == QuantizationConfig("awq", 4, 64, "vllm_teach")


@pytest.mark.parametrize("text", ["{", "[]", '{"quantization_config": 4}'])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)

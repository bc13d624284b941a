"""Our AWQ and GPTQ folders in `transformers`, which reads them through gptqmodel, where that is installed."""

from pathlib import Path

import pytest
import torch

from vllm_teach.models.quantize import quantize_model
from vllm_teach.quantization.checkpoint import QuantizedCheckpoint
from vllm_teach.quantization.quantization_config import QuantizationConfig

gptqmodel = pytest.importorskip("gptqmodel", reason="gptqmodel reads AWQ and GPTQ models for transformers")

CONFIGS = {
    "awq": QuantizationConfig.choose("awq", group_size=32),
    "gptq": QuantizationConfig.choose("gptq", group_size=32, symmetric=True),
    "gptq 3 bits": QuantizationConfig.choose("gptq", bits=3, group_size=32, act_order=True),
}


def matrix_of(module: torch.nn.Module) -> torch.Tensor:
    """`[out, in]` as the library dequantises it, in its float16."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight().T
    return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size).T


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_dequantises_the_same_matrices(name: str, tmp_path: Path, tiny_hf, monkeypatch) -> None:
    from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # it would compile each layer
    config = CONFIGS[name]
    tiny_hf("llama", hidden_size=128, intermediate_size=128).to(torch.float16).save_pretrained(tmp_path / "source")
    ids = torch.randint(320, (4, 48), generator=torch.Generator().manual_seed(0))
    quantize_model(tmp_path / "source", tmp_path / "out", config, ids, progress=False)
    # Its plain path: the others build kernels for minutes.
    plain = AwqConfig(backend="torch_awq") if name == "awq" else GPTQConfig(bits=config.bits, backend="torch")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=plain, device_map="cpu", dtype=torch.float16
    )
    checkpoint = QuantizedCheckpoint(tmp_path / "out")
    assert len(checkpoint.modules) == 14
    for module in checkpoint.modules:
        ours = checkpoint.read(module).dequantize(torch.float16)
        assert torch.equal(matrix_of(theirs.get_submodule(module)).half(), ours), module

"""A whole model against a plain replay: hooks on the decoder itself see what each linear layer was calibrated on."""

import copy

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import Decoder, full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.layered import LayeredDecoder
from vllm_teach.quantization import calibration
from vllm_teach.quantization.calibration import METHODS, quantize_layers
from vllm_teach.quantization.gptq import quantize_gptq
from vllm_teach.quantization.hessian import Hessian
from vllm_teach.quantization.layer_at_work import LayerAtWork, Settings
from vllm_teach.quantization.layered_model import Stage
from vllm_teach.quantization.rounding import quantize_rtn

CONFIG = ModelConfig("LlamaForCausalLM", 40, 32, 64, 3, 4, 2, 8, 64)
BIASED = ModelConfig("Qwen2ForCausalLM", 40, 32, 64, 2, 4, 2, 8, 64, attention_bias=True)
IDS = torch.randint(0, 40, (12, 24), generator=torch.Generator().manual_seed(0))
STAGES = (("self_attn", "qkv"), ("self_attn", "o"), ("mlp", ("gate", "up")), ("mlp", ("down",)))
GRID = {"bits": 3, "group_size": 16}


def decoder(config=CONFIG, dtype=torch.float32):
    model = Decoder(config).init_random(seed=1, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.add_((0.4 * torch.randn(parameter.shape, generator=generator)).to(dtype))
        elif "layers" in name:
            parameter.data.mul_(5)
    return model


def quantized(method, model=None, ids=IDS, **options):
    model = decoder() if model is None else model
    return model, list(quantize_layers(LayeredDecoder(model), ids, method, **GRID, **options))


def inputs_of(model, name):
    """What the linear layer `name` is given for all of IDS, [tokens, in], by a hook on the decoder's forward pass."""
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    for sample in IDS:
        model(sample, torch.arange(len(sample)), full_causal())
    hook.remove()
    return torch.cat(seen)


def replay(results, config=CONFIG):
    """Yield (name, original weight, inputs in the model quantised so far) for each linear layer in order."""
    original, model = decoder(config), decoder(config)
    for result in results:
        for part, kinds in STAGES:
            names = [f"model.layers.{result.layer}.{part}.{kind}_proj" for kind in kinds]
            for name in names:
                yield name, original.get_submodule(name).weight.data, inputs_of(model, name)
            for name in names:
                model.get_submodule(name).weight.data.copy_(result.weights[name].dequantize())


def output_error(weight, original, x):
    there, wanted = (x.double() @ each.double().T for each in (weight, original))
    return ((there - wanted).square().sum() / wanted.square().sum()).item()


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_errors_are_those_of_the_outputs_on_what_the_quantised_part_gives(method):
    """True sequential, layer after layer and stage after stage: another input would give another error."""
    _, results = quantized(method)
    reports = {name: report for result in results for name, report in result.reports.items()}
    for name, weight, x in replay(results):
        kept = results[int(name.split(".")[2])].weights[name].dequantize()
        rounded = quantize_rtn(weight, 3, group_size=16).dequantize()
        assert reports[name].error == pytest.approx(output_error(kept, weight, x), rel=1e-3)
        assert reports[name].rtn_error == pytest.approx(output_error(rounded, weight, x), rel=1e-3)
        assert reports[name].error <= reports[name].rtn_error


def test_gptq_gets_the_hessian_of_those_inputs_and_the_first_ones_on_top():
    _, results = quantized("gptq", act_order=True)
    kept = {name: weight for result in results for name, weight in result.weights.items()}
    same = []
    for name, weight, x in replay(results):
        every, first = Hessian(x.shape[1]), Hessian(x.shape[1])
        every.add(x)
        first.add(x.unflatten(0, IDS.shape)[:, 0])
        expected = quantize_gptq(weight, every.matrix + first.matrix / 16, 3, group_size=16, act_order=True)
        same.append((kept[name].codes == expected.codes).float().mean().item())
        assert torch.equal(kept[name].group_of, expected.group_of)
    assert min(same) > 0.98, "but for ties that the order of sums decides"
    assert len(same) == 21


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("config", [CONFIG, BIASED])
def test_the_model_ends_as_its_results_say(method, config):
    model, results = quantized(method, decoder(config))
    again = decoder(config)
    assert [result.layer for result in results] == list(range(config.num_layers))
    for result in results:
        for name, weight in result.weights.items():
            again.get_parameter(f"{name}.weight").data.copy_(weight.dequantize())
            assert weight.bits == 3
            assert weight.num_groups == weight.in_features // 16
        for name, tensor in result.tensors.items():
            again.get_parameter(name).data.copy_(tensor)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    changed = [name for result in results for name in result.tensors]
    assert bool(changed) == (method == "awq")


def last_states(model):
    return torch.stack([model(sample, torch.arange(len(sample)), full_causal()) for sample in IDS])


def with_outliers(config=CONFIG):
    """A model whose norms make some inputs large, as trained ones do."""
    model = decoder(config)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data[::7] *= 15
    return model


@pytest.mark.parametrize("config", [CONFIG, BIASED])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_whole_model_errs_less_than_after_rounding_to_nearest(method, config):
    wanted = last_states(with_outliers(config))
    errors = []
    for each in (method, "rtn"):
        model, _ = quantized(each, with_outliers(config))
        errors.append((last_states(model) - wanted).square().mean().item())
    assert errors[0] < 0.8 * errors[1]


def test_awq_reports_what_it_chose():
    _, results = quantized("awq", with_outliers())
    reports = [report for result in results for report in result.reports.values()]
    assert any(report.alpha > 0 for report in reports)
    assert all(report.method == "awq" and report.damping is None for report in reports)
    assert sum(report.error for report in reports) < 0.8 * sum(report.rtn_error for report in reports)
    assert "model.layers.0.input_layernorm.weight" in results[0].tensors


def test_the_first_token_is_not_given_up_for_the_others(monkeypatch):
    """One token in 512 that is like no other, as the attention sink is, errs less than after rounding to nearest."""
    from vllm_teach.quantization import layer_at_work

    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    others = 2 * draw(4, 512, 4) @ draw(4, 32) + 0.3 * draw(4, 512, 32)
    sink, weight = draw(32), draw(48, 32)
    inputs = others.clone()
    inputs[:, 0] = sink + 0.01 * draw(4, 32)

    def error(method, share):
        monkeypatch.setattr(layer_at_work, "_FIRST_TOKENS", share)
        settings = Settings(method, 3, 16, symmetric=False, act_order=False, damping=0.01, min_zero=0)
        result = LayerAtWork(OneLinear(weight), [iter([inputs])], settings).quantize(0)
        off = result.weights["linear"].dequantize() - weight
        return (off @ sink).norm().item(), (others[:, 1:] @ off.T).norm().item()

    rounded, plain, ours = error("rtn", 0), error("gptq", 0), error("gptq", 1 / 16)
    assert plain[0] > 1.2 * rounded[0], "GPTQ alone gives it up"
    assert ours[0] < rounded[0]
    assert ours[1] < 1.1 * plain[1], "and the others hardly lose by it"


class OneLinear:
    """A layer of one linear layer."""

    def __init__(self, weight):
        self.weight, self.stages = weight, (Stage(("linear",), "norm", torch.arange(weight.shape[1])),)

    def tensor(self, name):
        return self.weight if name == "linear.weight" else None

    def replace(self, name, tensor):
        pass

    def walk(self, states):
        raise NotImplementedError("the test gives the walk itself")


def test_gptq_keeps_rounding_to_nearest_where_it_does_no_better(monkeypatch):
    from vllm_teach.quantization import layer_at_work

    def worse(weight, factor, bits, **grid):
        return quantize_rtn(weight * 1.3, bits, **grid)

    monkeypatch.setattr(layer_at_work, "quantize_gptq", worse)
    _, results = quantized("gptq")
    for result in results:
        for name, report in result.reports.items():
            assert report.method == "rtn"
            assert report.error == report.rtn_error
            original = decoder().get_parameter(f"{name}.weight")
            assert torch.equal(result.weights[name].codes, quantize_rtn(original, 3, group_size=16).codes)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_bit_for_bit_where_another_broke_off(method):
    model, results = quantized(method, decoder(dtype=torch.bfloat16))
    resumed = decoder(dtype=torch.bfloat16)
    layered = LayeredDecoder(resumed)
    layered.apply(results[0])
    rest = list(quantize_layers(layered, IDS, method, **GRID, start=1))
    assert [each.layer for each in rest] == [1, 2]
    for there, here in zip(results[1:], rest, strict=True):
        assert there.reports == here.reports
        for name, weight in there.weights.items():
            assert torch.equal(weight.codes, here.weights[name].codes)
            assert torch.equal(weight.scales, here.weights[name].scales)
            assert torch.equal(weight.zeros, here.weights[name].zeros)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_one_layer_at_a_time():
    model = decoder()
    before = copy.deepcopy(model)
    results = quantize_layers(LayeredDecoder(model), IDS, "rtn", **GRID)
    next(results)
    for name, parameter in model.named_parameters():
        same = torch.equal(parameter, before.get_parameter(name))
        assert same == (not ("layers.0." in name and "_proj" in name)), name


def test_rounding_to_nearest_needs_no_text():
    _, results = quantized("rtn", ids=None)
    _, seen = quantized("rtn")
    for result, other in zip(results, seen, strict=True):
        for name, report in result.reports.items():
            assert report.error is None
            assert torch.equal(result.weights[name].codes, other.weights[name].codes)


def test_how_many_tokens_go_at_once_changes_nothing_but_the_order_of_sums(monkeypatch):
    _, expected = quantized("gptq")
    monkeypatch.setattr(calibration, "_TOKENS_AT_ONCE", 30)
    _, results = quantized("gptq")
    for there, here in zip(expected, results, strict=True):
        for name, report in there.reports.items():
            assert report.error == pytest.approx(here.reports[name].error, rel=0.05)


def test_a_whole_row_may_share_a_scale():
    results = list(quantize_layers(LayeredDecoder(decoder()), None, "rtn", bits=8, group_size=None, symmetric=True))
    weights = [weight for result in results for weight in result.weights.values()]
    assert all(weight.num_groups == 1 and (weight.zeros == 128).all() for weight in weights)


@pytest.mark.parametrize(
    ("ids", "arguments", "words"),
    [
        (IDS, {"method": "int4"}, "method='int4' is not valid: use one of 'rtn', 'gptq', 'awq'"),
        (IDS, {"bits": 6}, "bits=6 is not valid"),
        (IDS, {"group_size": 24}, r"24 does not divide the 32 inputs of model\.layers\.0\.self_attn\.q_proj"),
        (IDS, {"group_size": 32, "method": "awq", "act_order": True}, "act_order=True has no meaning for method='awq'"),
        (IDS, {"method": "awq", "min_zero": 1}, "min_zero=1 is not for method='awq'"),
        (IDS, {"min_zero": -1}, "min_zero=-1 is not valid"),
        (IDS, {"start": 4}, "start=4 is not valid: give a layer from 0 to 3"),
        (IDS, {"start": 1.5}, "start=1.5 is not valid"),
        (IDS, {"damping": -1}, "damping=-1 is not valid"),
        (None, {}, "calibration_ids is None, and method='gptq' needs text"),
        (IDS[0], {}, r"calibration_ids has dtype torch.int64 and shape \[24\]"),
        (IDS.float(), {}, "dtype torch.float32"),
        (IDS + 40, {}, "this model's ids are 0 to 39"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_changed(ids, arguments, words):
    with pytest.raises(InvalidArgumentError, match=words):
        quantize_layers(LayeredDecoder(decoder()), ids, **{"method": "gptq", "group_size": 16, **arguments})

"""What a model directory says about its quantised weights: the `quantization_config` of its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_teach.errors import InvalidArgumentError, ModelLoadError

METHODS = ("gptq", "awq", "rtn", "int8")
# "awq" is AutoAWQ's "gemm", "gptq" AutoGPTQ's version 1.
LAYOUTS = ("awq", "gptq", "gptq_v2", "vllm_teach")
_BITS = {"awq": (4,), "gptq": (2, 3, 4, 8), "gptq_v2": (2, 3, 4, 8), "vllm_teach": (2, 3, 4, 8)}
# Modules that `head_bits` speaks of; every other quantised module has `bits`.
HEAD_MODULES = ("model.embed_tokens", "lm_head")
LEGACY_FILE = "quantize_config.json"


@dataclass(frozen=True)
class QuantizationConfig:
    """How the weights of a model were quantised and how they lie in its files.

    `method` is what `LLM(quantization=…)` names: "gptq", "awq", "rtn" or "int8". `group_size` counts inputs, None for
    one group a row. `layout` is "awq", "gptq", "gptq_v2" or "vllm_teach", the package's own. `symmetric` says that
    zeros are 2^(bits - 1) throughout, `act_order` that GPTQ quantised the inputs by their importance. With
    `head_bits` = 8 embedding and output matrix are int8, a scale a row; 16 leaves them as they were.

    Raises InvalidArgumentError for values that do not go together.
    """

    method: str
    bits: int = 4
    group_size: int | None = 64
    layout: str = "vllm_teach"
    symmetric: bool = False
    act_order: bool = False
    head_bits: int = 16

    def __post_init__(self) -> None:
        _one_of("method", self.method, METHODS)
        _one_of("layout", self.layout, LAYOUTS)
        _one_of("bits", self.bits, _BITS[self.layout], f" for the layout {self.layout!r}")
        head_bits = (8, 16) if self.layout == "vllm_teach" else (16,)
        _one_of("head_bits", self.head_bits, head_bits, f" for the layout {self.layout!r}")
        size = self.group_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise InvalidArgumentError(f"group_size={size!r} is not valid: give 1 or more, or None for whole rows.")
        if self.method == "int8" and self.bits != 8:
            raise InvalidArgumentError(f"bits={self.bits} is not valid for the method 'int8': it has 8.")
        if self.act_order and self.method != "gptq":
            raise InvalidArgumentError(f"act_order=True is not valid for the method {self.method!r}: it is GPTQ's.")

    @classmethod
    def choose(
        cls,
        method: str,
        *,
        bits: int | None = None,
        group_size: int | None = None,
        symmetric: bool = False,
        act_order: bool = False,
        head_bits: int = 16,
    ) -> QuantizationConfig:
        """Return the config for quantising by `method`: in the layout that others read, where it holds the result.

        `bits` are 4 by default, 8 for "int8". `group_size` is 64 by default, whole rows for "int8"; -1 stands for whole
        rows. "int8" is symmetric. Raises InvalidArgumentError for values that do not go together.
        """
        _one_of("method", method, METHODS)
        int8 = method == "int8"
        bits = (8 if int8 else 4) if bits is None else bits
        group_size = (-1 if int8 else 64) if group_size is None else group_size
        if group_size != -1 and group_size < 1:
            raise InvalidArgumentError(f"group_size={group_size!r} is not valid: give 1 or more, or -1 for whole rows.")
        published = head_bits == 16 and (method == "gptq" or (method == "awq" and bits == 4))
        return cls(
            method=method,
            bits=bits,
            group_size=None if group_size == -1 else group_size,
            layout=method if published else "vllm_teach",
            symmetric=symmetric or int8,
            act_order=act_order,
            head_bits=head_bits,
        )

    @property
    def readable_elsewhere(self) -> bool:
        """Whether other loaders (transformers, vLLM, AutoAWQ, GPTQModel) know this layout."""
        return self.layout != "vllm_teach"

    def bits_of(self, module: str) -> int:
        """Return in how many bits `module`, as "model.layers.0.mlp.up_proj", is quantised where it is."""
        return 8 if self._is_head(module) else self.bits

    def group_size_of(self, module: str) -> int | None:
        """Return how many inputs share a scale in `module` where it is quantised; None for the whole row."""
        return None if self._is_head(module) else self.group_size

    def _is_head(self, module: str) -> bool:
        return self.head_bits == 8 and module in HEAD_MODULES

    def to_hf(self) -> dict[str, Any]:
        """Return the `quantization_config` entry of config.json, as the layout's loaders want it."""
        size = -1 if self.group_size is None else self.group_size
        if self.layout == "awq":
            return {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": size,
                "zero_point": True,  # qzeros are always there, of a symmetric weight too
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        if self.layout == "vllm_teach":
            return {
                "quant_method": "vllm_teach",
                "method": self.method,
                "bits": self.bits,
                "group_size": size,
                "sym": self.symmetric,
                "desc_act": self.act_order,
                "head_bits": self.head_bits,
            }
        return {
            "quant_method": "gptq",
            "checkpoint_format": self.layout,
            "bits": self.bits,
            "group_size": size,
            "sym": self.symmetric,
            "desc_act": self.act_order,
            "true_sequential": True,
            "static_groups": False,
            "lm_head": False,
        }

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], source: str = "quantization_config") -> QuantizationConfig:
        """Read a `quantization_config` entry; `source` is how errors name where it stands.

        Raises ModelLoadError for a kind of quantisation or a layout that is not read here, and for a damaged entry.
        """
        entry = _Entry(values, source)
        # A quantize_config.json from before the name existed is AutoGPTQ's.
        kind = entry.get("quant_method", str, "gptq").lower()
        if kind == "awq":
            for key in ("version", "checkpoint_format", "format"):  # AutoAWQ's name for it, and GPTQModel's
                entry.demand(key, "gemm")
            special: dict[str, Any] = {"method": "awq", "layout": "awq"}
        elif kind == "gptq":
            if values.get("dynamic"):
                raise entry.refusal("dynamic", "no setting of single modules")
            if values.get("is_marlin_format"):
                raise entry.refusal("is_marlin_format", "false")
            layout = entry.demand("format", "gptq", "gptq_v2")
            layout = entry.demand("checkpoint_format", layout, "gptq", "gptq_v2")
            special = {"method": "gptq", "layout": layout, **entry.order()}
        elif kind == "vllm_teach":
            special = {"method": entry.get("method", str), "head_bits": entry.get("head_bits", int, 16)}
            special |= entry.order()
        else:
            raise entry.refusal("quant_method", "'awq', 'gptq' or 'vllm_teach'")
        size = entry.get("group_size", int)
        try:
            return cls(bits=entry.get("bits", int), group_size=None if size == -1 else size, **special)
        except InvalidArgumentError as error:
            reason = str(error).rstrip(".")
            raise ModelLoadError(
                f"{source} has a quantization_config that cannot be ({reason}): correct it, or use another model."
            ) from error


def read_config(folder: Path) -> QuantizationConfig | None:
    """Return what the config.json of a model directory says of quantisation, or else its quantize_config.json.

    None where neither speaks of it. Raises ModelLoadError as `from_hf` does, and for a file that is no JSON object.
    """
    for file, key in ((folder / "config.json", "quantization_config"), (folder / LEGACY_FILE, None)):
        if not file.is_file():
            continue
        values = _read_json(file)
        section = values if key is None else values.get(key)
        if section is not None:
            if not isinstance(section, Mapping):
                raise ModelLoadError(
                    f"{file} has {key} = {section!r:.80} where an object is needed: download it again."
                )
            return QuantizationConfig.from_hf(section, str(file))
    return None


class _Entry:
    """Values of one quantization_config, each checked where it is read."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.refusal(key, f"a value of type {kind.__name__}")
        return value

    def demand(self, key: str, *allowed: str) -> str:
        """Return a text, the first of `allowed` where it is absent, whatever its case."""
        value = self.get(key, str, allowed[0]).lower()
        if value not in allowed:
            raise self.refusal(key, " or ".join(map(repr, allowed)))
        return value

    def order(self) -> dict[str, bool]:
        return {"symmetric": self.get("sym", bool, False), "act_order": self.get("desc_act", bool, False)}

    def refusal(self, key: str, needed: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.source} has a quantization_config with {key} = {self.values.get(key)!r:.80}, and only {needed} is "
            "read: use another quantised model, or the unquantised one."
        )


def _one_of(name: str, value: object, allowed: tuple[object, ...], place: str = "") -> None:
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise InvalidArgumentError(f"{name}={value!r} is not valid{place}: use {' or '.join(map(repr, allowed))}.")


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON ({error}): download it again.") from error
    if not isinstance(values, Mapping):
        raise ModelLoadError(f"{file} holds no JSON object: download it again.")
    return values

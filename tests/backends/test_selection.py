"""The articles' rule on hypothetical machines, and what a selection tells about the backends it did not choose."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_teach import backends
from vllm_teach.attention.patterns import BlockSparsePattern, Causal, GlobalTokens, LocalWindow
from vllm_teach.backends.hardware import Hardware, detect_hardware
from vllm_teach.backends.selection import select_backend
from vllm_teach.backends.spec import AttentionSpec
from vllm_teach.errors import InvalidArgumentError

AVX2 = frozenset({"avx2"})
AVX512 = AVX2 | {"avx512"}
NO_GPU = tuple((name, f"{name} is not installed.") for name in ("flash_attn", "xformers", "triton"))
NO_COMPILER = tuple((name, f"{name} has no compiler.") for name in ("cpu", "flex"))
MACHINES = {
    "H100": Hardware((9, 0), AVX512),
    "A100": Hardware((8, 0), AVX512),
    "A100 with PyTorch alone": Hardware((8, 0), AVX512, NO_GPU),
    "T4": Hardware((7, 5), AVX512),
    "P100": Hardware((6, 0), AVX2),
    "CPU with AVX-512": Hardware(None, AVX512, NO_GPU),
    "CPU with AMX": Hardware(None, AVX512 | {"amx"}, NO_GPU),
    "CPU with AVX2": Hardware(None, AVX2, NO_GPU),
    "CPU without AVX2": Hardware(None, frozenset(), NO_GPU),
    "CPU without compiler": Hardware(None, AVX512, NO_GPU + NO_COMPILER),
}
GPUS = ("H100", "A100", "A100 with PyTorch alone", "T4", "P100")
half, brain = torch.float16, torch.bfloat16
sparse = BlockSparsePattern([[a == b for b in range(16)] for a in range(16)], 256)
sinks = Causal() & (GlobalTokens(4) | LocalWindow(512))


def spec_of(machine: str, **changes: Any) -> AttentionSpec:
    """A short causal prefill in 16 bits, with `changes`; `n` sets both lengths."""
    if (n := changes.pop("n", None)) is not None:
        changes |= {"q_len": n, "kv_len": n}
    plain = AttentionSpec(1, 200, 200, 8, 2, 64, brain, "cuda" if machine in GPUS else "cpu", Causal())
    return replace(plain, **changes)


# machine, what is asked for, the choice, words of the reason
TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    # sequence length against the threshold
    ("A100", {}, "sdpa", "200 tokens stay below the threshold of 1,024"),
    ("A100", {"n": 1023}, "sdpa", "stay below"),
    ("A100", {"n": 1024}, "flash_attn", "1,024 tokens reach the threshold of 1,024, 16-bit numbers"),
    ("CPU with AVX-512", {"n": 1023}, "sdpa", "stay below"),
    ("CPU with AVX-512", {"n": 1024}, "cpu", "reach the threshold of 1,024, our kernel uses AVX-512."),
    ("H100", {"q_len": 1, "kv_len": 1024}, "flash_attn", "reach"),
    ("CPU with AVX-512", {"q_len": 1, "kv_len": 4000}, "cpu", "4,000 tokens reach"),
    ("CPU with AVX-512", {"q_len": 1, "kv_len": 400}, "sdpa", "400 tokens stay below"),
    # batch size: many short sequences have as many scores as a long one
    ("A100", {"batch": 26}, "sdpa", "stay below"),
    ("A100", {"batch": 27}, "flash_attn", "a batch of 27 has as many scores as one sequence of 1,039 tokens"),
    ("CPU with AVX-512", {"batch": 64}, "cpu", "a batch of 64 has as many scores"),
    # hardware
    ("H100", {"n": 2048}, "flash_attn", "tensor cores"),
    ("A100 with PyTorch alone", {"n": 2048}, "sdpa", "what comes before sdpa cannot serve the call"),
    ("T4", {"n": 2048, "dtype": half}, "sdpa", "what comes before sdpa cannot serve the call"),
    ("P100", {"n": 2048, "dtype": half}, "sdpa", "float16 does not go to tensor cores"),
    ("CPU with AMX", {"n": 2048}, "sdpa", "PyTorch multiplies bfloat16 with AMX"),
    ("CPU with AMX", {"n": 2048, "dtype": torch.float32}, "cpu", "our kernel uses AVX-512"),
    ("CPU with AVX2", {"n": 2048}, "cpu", "our kernel uses AVX2"),
    ("CPU without AVX2", {"n": 2048}, "sdpa", "without AVX2"),
    ("CPU without compiler", {"n": 2048}, "sdpa", "what comes before sdpa cannot serve the call"),
    # dtype
    ("A100", {"n": 2048, "dtype": torch.float32}, "xformers", "float32 does not go to tensor cores"),
    ("A100", {"n": 2048, "dtype": torch.float64}, "sdpa", "float64 does not go to tensor cores"),
    ("CPU with AVX-512", {"n": 2048, "dtype": torch.float64}, "sdpa", "what comes before sdpa cannot serve"),
    # head size
    ("A100", {"n": 2048, "head_dim": 320}, "sdpa", "cannot serve"),
    ("A100", {"n": 2048, "head_dim": 60, "dtype": torch.float32}, "xformers", "reach"),
    ("A100", {"n": 2048, "head_dim": 66, "dtype": torch.float32}, "sdpa", "cannot serve"),
    # pattern
    ("A100", {"n": 4096, "pattern": LocalWindow(511)}, "flash_attn", "reach"),
    ("A100", {"n": 4096, "pattern": sparse}, "triton", "cannot serve"),
    ("A100 with PyTorch alone", {"n": 4096, "pattern": sparse}, "flex", "cannot serve"),
    ("CPU with AVX2", {"n": 4096, "pattern": sinks}, "cpu", "our kernel uses AVX2"),
    ("CPU without AVX2", {"n": 4096, "pattern": sinks}, "cpu", "but sdpa computes the pairs that the pattern hides"),
    ("CPU without compiler", {"n": 4096, "pattern": sinks}, "memory_efficient", "cannot serve"),
    ("CPU with AVX2", {"n": 512, "pattern": sinks}, "sdpa", "stay below"),
    # gradients and dropout
    ("CPU with AVX-512", {"n": 2048, "requires_grad": True}, "sdpa", "cannot serve"),
    ("CPU with AVX-512", {"n": 2048, "requires_grad": True, "pattern": sinks}, "memory_efficient", "cannot serve"),
    ("A100", {"n": 2048, "requires_grad": True}, "flash_attn", "reach"),
    ("A100", {"n": 2048, "dropout": True, "requires_grad": True}, "triton", "cannot serve"),
    ("CPU with AVX-512", {"n": 2048, "dropout": True}, "memory_efficient", "cannot serve"),
    # softcap and ALiBi
    ("A100", {"n": 2048, "softcap": 30.0, "alibi": True}, "flash_attn", "reach"),
    ("CPU with AVX-512", {"softcap": 30.0}, "cpu", "cannot serve"),
    ("CPU without compiler", {"softcap": 30.0}, "memory_efficient", "cannot serve"),
    # paging and varlen
    ("A100", {"q_len": 1, "layout": "paged", "block_size": 256}, "flash_attn", "stay below"),
    ("A100", {"q_len": 1, "layout": "paged", "block_size": 16}, "triton", "stay below"),
    ("CPU with AVX2", {"q_len": 1, "layout": "paged", "block_size": 16}, "cpu", "stay below"),
    ("CPU without compiler", {"q_len": 1, "layout": "paged", "block_size": 16}, "sdpa", "no better one can serve"),
    ("T4", {"layout": "varlen", "batch": 4, "dtype": half}, "xformers", "stay below"),
]  # fmt: skip


@pytest.mark.parametrize(("machine", "changes", "choice", "words"), TABLE, ids=str)
def test_the_rule(machine: str, changes: dict[str, Any], choice: str, words: str, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spec = spec_of(machine, **dict(changes))
    selection = select_backend(spec, hardware=MACHINES[machine])
    assert selection.choice == choice, selection.explain()
    assert any(word in selection.reason for word in words.split("|")), selection.reason
    assert set(selection.others) == set(backends.names()) - {choice}
    assert all(reason.endswith(".") for reason in [selection.reason, *selection.others.values()])
    assert MACHINES[machine].why_not(choice, spec.device) is None
    assert backends.get(choice).supports(spec) is None


def test_the_table_is_large_and_covers_the_machines() -> None:
    assert len(TABLE) >= 30
    assert {machine for machine, *_ in TABLE} == set(MACHINES)


def test_the_same_call_gives_the_same_choice() -> None:
    for machine, changes, choice, _ in TABLE:
        again = [select_backend(spec_of(machine, **dict(changes)), hardware=MACHINES[machine]) for _ in range(2)]
        assert again[0] == again[1]
        assert again[0].choice == choice


@pytest.mark.parametrize(
    ("name", "machine", "changes", "words"),
    [
        ("flash_attn", "T4", {}, "compute capability 7.5; flash_attn needs 8.0 (Ampere or Ada) or newer."),
        ("xformers", "P100", {}, "compute capability 6.0; xformers needs 7.0"),
        ("flash_attn", "A100", {"head_dim": 320}, "head_dim up to 256, not 320"),
        ("flash_attn", "CPU with AVX2", {}, "runs on cuda, not on cpu"),
        ("cpu", "CPU without compiler", {"n": 2048}, "cpu has no compiler."),
        ("sdpa", "CPU with AVX2", {"n": 4096, "pattern": sinks}, "computes the pairs that the pattern hides, too."),
        ("sdpa", "A100", {"layout": "paged", "block_size": 256}, "gathers the blocks of each sequence."),
        ("sdpa", "A100", {"layout": "varlen"}, "loops over the sequences."),
        ("naive", "A100", {}, "sdpa comes before it."),
    ],
)
def test_why_not_is_said_of_each(name: str, machine: str, changes: dict[str, Any], words: str) -> None:
    assert words in select_backend(spec_of(machine, **changes), hardware=MACHINES[machine]).others[name]


def test_the_threshold_can_be_moved() -> None:
    machine = MACHINES["CPU with AVX-512"]
    spec = spec_of("CPU with AVX-512")
    assert select_backend(spec, hardware=machine).choice == "sdpa"
    assert select_backend(spec, threshold=200, hardware=machine).choice == "cpu"
    assert select_backend(spec, threshold=201, hardware=machine).choice == "sdpa"


def test_the_usable_ones_can_be_given() -> None:
    selection = select_backend(spec_of("A100"), usable=["tiled", "naive"], hardware=MACHINES["A100"])
    assert selection.choice == "tiled"
    assert selection.others["sdpa"] == "It is not among the usable ones that were given."
    with pytest.raises(InvalidArgumentError, match=r"^No backend can serve this call \(.*flash_attn: .*float32.*\)\.$"):
        select_backend(spec_of("A100", dtype=torch.float32), usable=["flash_attn"], hardware=MACHINES["A100"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "fastest"}, "policy is 'fastest'; choose one of threshold, measured."),
        ({"threshold": 0}, "threshold is 0"),
        ({"threshold": 2.5}, "threshold is 2.5"),
        ({"usable": ["flash"]}, "no attention backend 'flash'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        select_backend(spec_of("A100"), hardware=MACHINES["A100"], **options)


def test_this_machine_is_looked_at() -> None:
    hardware = detect_hardware()
    assert dict(hardware.unusable) == {name: why for name, why in backends.availability().items() if why is not None}
    assert (hardware.cuda_capability is not None) == torch.cuda.is_available()
    level = torch.backends.cpu.get_cpu_capability()
    assert ("avx512" in hardware.cpu_isa) == (level == "AVX512")
    assert ("avx2" in hardware.cpu_isa) == (level in ("AVX2", "AVX512"))
    q = torch.randn(1, 1500, 2, 32)
    chosen = select_backend(AttentionSpec.of(q, q, q, causal=True)).choice
    usable_kernel = "avx2" in hardware.cpu_isa and backends.get("cpu").unavailable() is None
    assert chosen == ("cpu" if usable_kernel else "sdpa")


def test_without_a_gpu_nothing_serves_cuda_tensors() -> None:
    with pytest.raises(InvalidArgumentError, match=r"sdpa: This machine has no CUDA GPU[;)]"):
        select_backend(spec_of("A100"), hardware=MACHINES["CPU with AVX2"])


def test_an_explanation_is_a_table_as_text_and_as_html() -> None:
    explanation = backends.explain(spec_of("T4", n=2048, dtype=half, softcap=3.0), hardware=MACHINES["T4"])
    lines = str(explanation).splitlines()
    assert " ".join(lines).startswith(
        "batch 1, 2,048 queries, 2,048 keys, 8 heads over 2 of 64, float16 on cuda, Causal(), softcap; "
        "GPU of compute capability 7.5; policy 'threshold' "
    )
    assert next(line for line in lines if line.startswith("->")).split()[1] == explanation.selection.choice
    assert all(len(line) <= 110 for line in lines)
    page = explanation._repr_html_()
    assert page.count("<tr>") == len(backends.names())
    for name in backends.names():
        assert f"\n   {name:<18}" in str(explanation) or name == explanation.selection.choice
        assert f">{name}</th>" in page
    assert "GPU&#x27;s" in page
    assert "GPU's" not in page


def test_a_decoding_step_over_a_paged_cache_is_described() -> None:
    spec = spec_of("A100", q_len=1, layout="paged", block_size=16, pattern=None, q_heads=8, kv_heads=8)
    assert str(backends.explain(spec, hardware=MACHINES["A100"])).startswith(
        "batch 1, 1 query, 200 keys, 8 heads of 64, bfloat16 on cuda, paged in blocks of 16;"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"threshold": "1024"}, "threshold is '1024'; give a whole number from 1"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"threshold": True}, "threshold is True"),
        ({"policy": None}, "policy is None; choose one of threshold, measured"),
        ({"usable": "sdpa"}, "usable is 'sdpa'; give a list of backends"),
        ({"usable": 5}, "usable is 5"),
        ({"usable": [["sdpa"]]}, r"no attention backend \['sdpa'\]"),
        ({"usable": []}, "No backend can serve this call"),
        ({"hardware": "A100"}, "hardware is of type str; it must be of type Hardware"),
        ({"policy": "measured", "measurements": "x"}, "measurements is of type str; it must be of type Measurements"),
        ({"spec": torch.zeros(2)}, "spec is of type Tensor; it must be of type AttentionSpec"),
        ({"spec": None}, "spec is of type NoneType"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(arguments: dict[str, Any], words: str) -> None:
    given = {"spec": spec_of("A100"), "hardware": MACHINES["A100"]} | arguments
    for call in (select_backend, backends.explain):
        with pytest.raises(InvalidArgumentError, match=words):
            call(**given)


def test_any_collection_of_names_is_usable() -> None:
    for usable in (["sdpa", "naive"], {"sdpa", "naive"}, (name for name in ("sdpa", "naive"))):
        assert select_backend(spec_of("A100"), usable=usable, hardware=MACHINES["A100"]).choice == "sdpa"


def test_hardware_takes_any_collection_and_refuses_what_is_none() -> None:
    same = Hardware([8, 0], ["avx512", "avx2"], {"triton": "No."})
    assert same == Hardware((8, 0), AVX512, (("triton", "No."),))
    assert hash(same) == hash(Hardware((8, 0), AVX512, (("triton", "No."),)))
    for arguments, words in (
        ({"cuda_capability": 8.0}, "cuda_capability is 8.0; give a pair"),
        ({"cuda_capability": "80"}, "cuda_capability is '80'"),
        ({"cuda_capability": (8,)}, r"cuda_capability is \(8,\)"),
        ({"cpu_isa": "avx2"}, "cpu_isa is 'avx2'; give names"),
        ({"cpu_isa": None}, "cpu_isa is None"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            Hardware(**arguments)


def test_a_device_that_is_neither_is_not_called_a_cpu() -> None:
    explanation = backends.explain(replace(spec_of("T4"), device="mps"), hardware=MACHINES["T4"])
    assert "; device mps; policy" in " ".join(str(explanation).split())
    assert explanation.selection.others["cpu"] == "cpu runs on CPUs, and the tensors are on mps."

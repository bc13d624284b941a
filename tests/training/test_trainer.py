import math

import pytest
import torch

from vllm_teach.errors import CacheError, InvalidArgumentError, ModelLoadError
from vllm_teach.models import full_causal
from vllm_teach.training import document_nlls, stream_loss, train
from vllm_teach.training.model import initial_model, llama_config
from vllm_teach.training.optimizer import learning_rate, make_optimizer
from vllm_teach.training.residual_dropout import residual_dropout


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_seed_gives_the_same_bits(toy_config, toy_tokens, toy_options, dtype):
    torch.manual_seed(1)
    first = train(toy_config, toy_tokens, toy_options(dtype=dtype), progress=False)
    torch.manual_seed(2)  # what came before must not matter
    second = train(toy_config, toy_tokens, toy_options(dtype=dtype), progress=False)
    assert first.history.losses == second.history.losses
    assert first.history.gradient_norms == second.history.gradient_norms
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    other = train(toy_config, toy_tokens, toy_options(dtype=dtype, seed=1), progress=False)
    assert other.history.losses != first.history.losses


def test_training_leaves_the_default_generator_alone(toy_config, toy_tokens, toy_options):
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    train(toy_config, toy_tokens, toy_options(steps=2), progress=False)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_toy_is_learnt(toy_config, toy_tokens, toy_options, dtype):
    """Where the next token is certain in 7 of 8 places and one of 24 in the other, the best loss is ln(24) / 8."""
    options = toy_options(
        steps=60, batch_size=8, learning_rate=1e-2, dtype=dtype, residual_dropout=0.0, warmup_steps=10
    )
    run = train(toy_config, toy_tokens, options, dev_tokens=toy_tokens[:400], progress=False)
    assert run.history.losses[0] == pytest.approx(math.log(24), abs=0.1)
    assert run.history.dev_losses[-1][1] < 0.75
    assert run.history.dev_losses[-1][1] > math.log(24) / 8
    assert not any(weight.requires_grad for weight in run.model.parameters())
    assert run.model.dtype == torch.float32


def test_bf16_computes_in_bf16_and_keeps_its_weights_in_float32(toy_config, toy_tokens, toy_options, monkeypatch):
    seen = set()
    from vllm_teach.training import attend

    original = attend._memory_efficient

    def spy(q, k, v, window, dropout_p):
        seen.update((q.dtype, k.dtype, v.dtype))
        return original(q, k, v, window, dropout_p)

    monkeypatch.setattr(attend, "_memory_efficient", spy)
    run = train(toy_config, toy_tokens, toy_options(steps=2, dtype="bf16"), progress=False)
    assert seen == {torch.bfloat16}
    assert run.model.dtype == torch.float32
    seen.clear()
    plain = train(toy_config, toy_tokens, toy_options(steps=2, dtype="fp32"), progress=False)
    assert seen == {torch.float32}
    assert run.history.losses != plain.history.losses
    assert run.history.losses == pytest.approx(plain.history.losses, abs=0.01)


def test_the_weights_of_the_best_evaluation_are_kept(toy_config, toy_tokens, toy_options):
    """A stream of random tokens: what is learnt of it by heart only spoils the loss elsewhere."""
    noise = torch.randint(24, (120,), generator=torch.Generator().manual_seed(0))
    dev = torch.randint(24, (200,), generator=torch.Generator().manual_seed(1))
    options = toy_options(steps=60, residual_dropout=0.0, attention_dropout=0.0, evaluate_every=10, dtype="fp32")
    run = train(toy_config, noise, options, dev_tokens=dev, progress=False)
    losses = dict(run.history.dev_losses)
    assert list(losses) == [10, 20, 30, 40, 50, 60]
    assert run.history.best_step == min(losses, key=losses.__getitem__) < 60
    assert stream_loss(run.model, dev, window=16) == pytest.approx(losses[run.history.best_step], rel=1e-6)


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(toy_config, toy_tokens, toy_options, tmp_path, monkeypatch):
    from vllm_teach.training import trainer

    options = toy_options(steps=7, evaluate_every=2, long_steps=2, long_window=32)
    arguments = (toy_config, toy_tokens, options)
    whole = train(*arguments, dev_tokens=toy_tokens[:200], progress=False)

    checkpoint, calls, original = tmp_path / "run.checkpoint", 0, trainer.batch_loss

    def fail_once(*loss_arguments):
        nonlocal calls
        calls += 1
        if calls == 5:  # in step 5, when 3 steps are saved
            raise KeyboardInterrupt
        return original(*loss_arguments)

    monkeypatch.setattr(trainer, "batch_loss", fail_once)
    again = {"dev_tokens": toy_tokens[:200], "checkpoint": checkpoint, "checkpoint_every": 3, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        train(*arguments, **again)
    resumed = train(*arguments, **again)
    assert calls == 5 + 4
    assert resumed.history.losses == whole.history.losses
    assert resumed.history.dev_losses == whole.history.dev_losses
    for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    # A finished run is not run again.
    assert train(*arguments, **again).history.losses == whole.history.losses
    assert calls == 5 + 4


def test_a_checkpoint_of_another_run_and_a_damaged_one(toy_config, toy_tokens, toy_options, tmp_path):
    file = tmp_path / "run.checkpoint"
    train(toy_config, toy_tokens, toy_options(), checkpoint=file, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run.checkpoint"]
    with pytest.raises(InvalidArgumentError, match=r"run\.checkpoint is of a run with seed=0, this one has 1"):
        train(toy_config, toy_tokens, toy_options(seed=1), checkpoint=file, progress=False)
    with pytest.raises(InvalidArgumentError, match="of a run with tokens="):
        train(toy_config, toy_tokens.flip(0), toy_options(), checkpoint=file, progress=False)
    for content in (file.read_bytes()[:500], b"", b"nothing of the kind"):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"run\.checkpoint is damaged .*delete it"):
            train(toy_config, toy_tokens, toy_options(), checkpoint=file, progress=False)


def test_long_steps_take_fewer_and_longer_windows(toy_options):
    options = toy_options(steps=10, long_steps=3, long_window=64)
    assert [options.batch_shape(step) for step in (0, 6, 7, 9)] == [(4, 16), (4, 16), (1, 64), (1, 64)]


def test_residual_dropout_lasts_as_long_as_its_context(toy_config):
    model = initial_model(toy_config, seed=0)
    ids, positions = torch.arange(10), torch.arange(10)

    def run():
        return model(ids, positions, full_causal())

    plain = run()
    with residual_dropout(model.train(), 0.5):
        assert not torch.equal(run(), plain)
        torch.manual_seed(1)
        first = run()
        torch.manual_seed(1)
        assert torch.equal(run(), first)
        assert torch.equal((model.eval(), run())[1], plain)
    assert torch.equal((model.train(), run())[1], plain)
    # The embeddings alone: half are zero and the others twice as large.
    with residual_dropout(model.train(), 0.5):
        embedded, weight = model.model.embed_tokens(ids), model.model.embed_tokens.weight[ids]
        zero = embedded == 0
        assert 0.4 < zero.float().mean() < 0.6
        assert torch.equal(embedded[~zero], 2 * weight[~zero])


def test_the_learning_rate_rises_and_falls(toy_options):
    options = toy_options(steps=20, warmup_steps=4, learning_rate=1.0, final_fraction=0.1)
    rates = [learning_rate(step, options) for step in range(21)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[12] == pytest.approx(0.55)  # half way down
    assert rates[20] == pytest.approx(0.1)


def test_only_matrices_decay(toy_config, toy_options):
    model = initial_model(toy_config, seed=0)
    decaying, other = make_optimizer(model, toy_options()).param_groups
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert all(names[id(weight)].endswith("norm.weight") for weight in other["params"])
    assert len(decaying["params"]) + len(other["params"]) == len(names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0 is not valid: give a whole number, 1 or more"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"seed": True}, "seed=True"),
        ({"learning_rate": 0}, "learning_rate=0 is not valid: give a positive number"),
        ({"learning_rate": math.nan}, "learning_rate=nan"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"final_fraction": 2}, "final_fraction=2"),
        ({"attention_dropout": 1}, "attention_dropout=1 .* a probability"),
        ({"residual_dropout": -0.1}, "residual_dropout=-0.1"),
        ({"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\) is not valid: give two numbers"),
        ({"betas": (0.9,)}, "betas="),
        ({"betas": "ab"}, "betas='ab'"),
        ({"seed": 2**63}, r"seed=\d+ is not valid: give a whole number below 2\*\*63"),
        ({"dtype": "fp16"}, "dtype='fp16' is not valid: use 'bf16' or 'fp32'"),
        ({"long_window": 128, "long_steps": 1}, "long_window=128 is not valid: a step has 64 tokens"),
    ],
)
def test_settings_that_cannot_work(toy_options, settings, message):
    with pytest.raises(InvalidArgumentError, match=message):
        toy_options(**settings)


def test_arguments_that_do_not_fit_together(toy_config, toy_tokens, toy_options):
    cases = [
        (toy_tokens, toy_options(window=128, batch_size=1), "window of 128 tokens is longer than .*: give at most 64"),
        (toy_tokens, toy_options(batch_size=8, long_steps=1, long_window=128), "window of 128 tokens"),
        (toy_tokens[:50], toy_options(), "tokens has 50 ids, too few"),
        (toy_tokens + 1, toy_options(), r"tokens holds the ids 1 to 24: config\.vocab_size=24 allows 0 to 23"),
        (toy_tokens.float(), toy_options(), "tokens is no flat int64 tensor"),
    ]
    for tokens, options, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            train(toy_config, tokens, options, progress=False)
    with pytest.raises(InvalidArgumentError, match="dev_tokens is no flat int64 tensor"):
        train(toy_config, toy_tokens, toy_options(), dev_tokens=toy_tokens[:1], progress=False)
    with pytest.raises(InvalidArgumentError, match=r"learning_rate=1e\+30 made the loss .*: lower it"):
        train(toy_config, toy_tokens, toy_options(learning_rate=1e30), progress=False)


def test_llama_config():
    config = llama_config(300, hidden_size=192, num_layers=3, kv_heads=3, context=77)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (3, 3, 64, 512)
    for arguments, message in (
        ({"hidden_size": 100}, "hidden_size=100"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"context": 1.5}, "context is 1.5"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            llama_config(300, **arguments)


def test_stream_loss_scores_every_token_but_the_first(toy_config, toy_tokens):
    model = initial_model(toy_config, seed=0)
    for length in (2, 17, 33, 16 * 16 + 1, 16 * 16 + 30):
        tokens, window, nlls = toy_tokens[:length], 16, []
        for start in range(0, length - 1, window):
            ids = tokens[start : start + window + 1]
            logits = model.logits(model(ids[:-1], torch.arange(len(ids) - 1), full_causal()))
            nlls.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").detach())
        assert sum(map(len, nlls)) == length - 1
        assert stream_loss(model, tokens, window=window) == pytest.approx(torch.cat(nlls).mean().item(), rel=1e-5)


def test_arguments_of_the_wrong_type_are_named(toy_config, toy_tokens, toy_options):
    for arguments, words in (
        (("config", toy_tokens, toy_options()), "config is of type str; it must be of type ModelConfig"),
        ((toy_config, toy_tokens, {"steps": 2}), "options is of type dict"),
        ((toy_config, toy_tokens.tolist(), toy_options()), "tokens is no flat int64"),
        ((toy_config, toy_tokens.to("meta"), toy_options()), "tokens is no flat int64 tensor .* on the CPU"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            train(*arguments, progress=False)
    with pytest.raises(InvalidArgumentError, match="checkpoint_every is 0"):
        train(toy_config, toy_tokens, toy_options(), checkpoint_every=0, progress=False)


def damage_file(content):
    return lambda file: file.write_bytes(content(file.read_bytes()))


def damage_state(change):
    def damage(file):
        saved = torch.load(file, weights_only=True)
        change(saved)
        torch.save(saved, file)

    return damage


DAMAGES = {
    "cut": damage_file(lambda content: content[: len(content) // 2]),
    "empty": damage_file(lambda content: b""),
    "text": damage_file(lambda content: b"hello"),
    "another pickle": lambda file: torch.save([1, 2], file),
    "identity of a list": damage_state(lambda saved: saved.update(identity=[1])),
    "no state": damage_state(lambda saved: saved.pop("state")),
    "state of nothing": damage_state(lambda saved: saved.update(state=None)),
    "no weights": damage_state(lambda saved: saved["state"].pop("model")),
    "weights of another shape": damage_state(
        lambda saved: saved["state"]["model"].update({"model.norm.weight": torch.zeros(3)})
    ),
    "no optimiser": damage_state(lambda saved: saved["state"].update(optimizer={})),
    "another history": damage_state(lambda saved: saved["state"].update(history={"x": 1})),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_named(toy_config, toy_tokens, toy_options, tmp_path, what):
    file = tmp_path / "run.checkpoint"
    train(toy_config, toy_tokens, toy_options(steps=1), checkpoint=file, progress=False)
    DAMAGES[what](file)
    with pytest.raises(ModelLoadError, match=r"checkpoint .* is damaged \(\w+\): delete it to start again\.$"):
        train(toy_config, toy_tokens, toy_options(steps=1), checkpoint=file, progress=False)


def test_a_checkpoint_that_cannot_be_written_is_named_before_the_training(
    toy_config, toy_tokens, toy_options, tmp_path
):
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match=r"checkpoint .* cannot be written \(.*\): give a file that can be"):
            train(toy_config, toy_tokens, toy_options(steps=10**9), checkpoint=place, progress=False)
    train(toy_config, toy_tokens, toy_options(steps=1), checkpoint=str(tmp_path / "new" / "run"), progress=False)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["run"]


def test_an_interrupt_while_it_is_saved_leaves_the_old_checkpoint(
    toy_config, toy_tokens, toy_options, tmp_path, monkeypatch
):
    file = tmp_path / "run.checkpoint"
    save = torch.save

    def interrupt(content, partial):
        partial.write_bytes(b"half")
        raise KeyboardInterrupt

    def second_is_interrupted(content, partial):
        save(content, partial)
        monkeypatch.setattr(torch, "save", interrupt)

    monkeypatch.setattr(torch, "save", second_is_interrupted)
    options = toy_options(steps=4)
    with pytest.raises(KeyboardInterrupt):
        train(toy_config, toy_tokens, options, checkpoint=file, checkpoint_every=2, progress=False)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [file]
    resumed = train(toy_config, toy_tokens, options, checkpoint=file, progress=False)
    assert resumed.history.losses == train(toy_config, toy_tokens, options, progress=False).history.losses


def test_losses_of_nothing_are_refused(toy_config, toy_tokens):
    model = initial_model(toy_config, seed=0)
    for tokens, arguments, words in (
        (toy_tokens[:1], {"window": 8}, "tokens has 1 ids"),
        (toy_tokens, {"window": 0}, "window is 0"),
        (toy_tokens, {"window": 8, "dtype": "fp16"}, "dtype='fp16' is not valid"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            stream_loss(model, tokens, **arguments)
    with pytest.raises(InvalidArgumentError, match="documents is empty"):
        document_nlls(model, [], window=8)
    assert len(document_nlls(model, [[]], window=8)) == 1  # the end of text alone

"""Training end to end on toy data: learning, killing, resuming, several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from toys import BLOCK, LAYERS, VOCAB, toy_config, toy_document, toy_model, toy_target

from ddtree.drafter import Drafter, load_drafter
from ddtree.train.estimate import estimate_tau
from ddtree.train.evaluate import tau_intervals
from ddtree.train.objective import Vocabulary
from ddtree.train.prepare import prepare_responses
from ddtree.train.producer import Producer
from ddtree.train.settings import SettingsError, TrainSettings
from ddtree.train.sources import OnlineSource, split_validation
from ddtree.train.store import Document, FeatureStore, StoreError, StoreWriter
from ddtree.train.trainer import Trainer, TrainingStopped

WORKER = Path(__file__).with_name("worker.py")


def counting_records(count: int = 24) -> list[dict]:
    """Responses that count upwards: a continuation a drafter can learn quickly."""
    return [
        {
            "prompt_ids": [1, 2, 3 + i % 7],
            "response_ids": [(5 + i + j) % (VOCAB - 1) for j in range(16)],
            "source": "even" if i % 2 else "odd",
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    prepare_responses(
        toy_target(), counting_records(), folder, layer_ids=LAYERS, max_response_tokens=64
    )
    return folder


def settings(store: Path, out: Path, **changes) -> TrainSettings:
    values = {
        "target": "unused",
        "data": [str(store)],
        "out": str(out),
        "num_layers": 2,
        "block_size": BLOCK,
        "target_layer_ids": list(LAYERS),
        "mask_token_id": VOCAB - 1,
        "documents": 3,
        "anchors": 4,
        "validation": 0.2,
        "common_tokens": 8,
        "sampled_tokens": 8,
        "steps": 12,
        "lr": 3e-3,
        "log_every": 1,
        "save_every": 4,
        "evaluate_every": 0,
        "threads": 1,
        **changes,
    }
    return TrainSettings.from_dict(values)


def losses(lines: list[str]) -> dict[int, str]:
    """The loss shown at each step."""
    steps = [line.split() for line in lines if line.startswith("step") and " loss " in line]
    return {int(words[1].split("/")[0]): words[words.index("loss") + 1] for words in steps}


def train(run: TrainSettings) -> list[str]:
    lines: list[str] = []
    Trainer(run, toy_target(), say=lines.append).run()
    return lines


def test_a_drafter_learns_resumes_and_loads(store, tmp_path):
    run = settings(store, tmp_path, steps=150, log_every=10, save_every=50, evaluate_every=75)
    lines = train(run)
    shown = losses(lines)
    assert float(shown[150]) < 0.5 * float(shown[10])
    taus = [json.loads(line) for line in (tmp_path / "tau.jsonl").read_text().splitlines()]
    assert taus[-1]["tau"]["all"]["chain"] > 2.0
    assert taus[-1]["tau"]["all"]["16"] >= taus[-1]["tau"]["all"]["chain"]
    target = toy_target()
    for folder in ("last", "best"):
        drafter = load_drafter(tmp_path / folder, target=target)
        assert drafter.block_size == BLOCK


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_resuming_gives_the_same_losses_as_never_stopping(store, tmp_path, optimiser):
    choice = {"optimiser": optimiser}
    whole = losses(train(settings(store, tmp_path / "whole", **choice)))
    first = losses(train(settings(store, tmp_path / "parts", stop_step=5, **choice)))
    lines = train(settings(store, tmp_path / "parts", **choice))
    assert any("resuming at step 5" in line for line in lines)
    assert {**first, **losses(lines)} == whole


def test_killed_and_resumed_gives_the_same_losses(store, tmp_path):
    whole = losses(train(settings(store, tmp_path / "whole", steps=40, save_every=3)))
    arguments = [str(store), str(tmp_path / "killed"), '{"steps": 40, "save_every": 3}']
    command = [sys.executable, "-u", str(WORKER), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        before = []
        for line in process.stdout:
            before.append(line)
            if line.startswith("step 11/"):
                os.kill(process.pid, signal.SIGKILL)
                break
    after = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert any("resuming at step" in line for line in after)
    resumed = losses(after)
    assert min(resumed) > 1
    assert {**losses(before), **resumed} == whole


def test_two_processes_take_the_same_steps_as_one(store, tmp_path):
    """Two ranks with three documents each equal one process that accumulates both parts."""
    full = {"steps": 4, "common_tokens": 0, "sampled_tokens": 0}
    wanted = train(settings(store, tmp_path / "alone", accumulate=2, **full))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    shown = {}
    for stop in (2, 4):  # the second call resumes
        options = json.dumps({**full, "stop_step": stop})
        arguments = [str(WORKER), str(store), str(tmp_path / "two"), options]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        shown |= losses(done.stdout.splitlines())
    assert shown == losses(wanted)
    weights = [
        torch.load(tmp_path / name / "state.pt", weights_only=True)["model"]
        for name in ("alone", "two")
    ]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5, msg=name)


def test_online_features_train_like_stored_ones(store, tmp_path):
    responses = tmp_path / "responses.jsonl"
    responses.write_text("".join(json.dumps(r) + "\n" for r in counting_records()))
    stored = losses(train(settings(store, tmp_path / "stored")))
    online = losses(train(settings(responses, tmp_path / "online")))
    for step, loss in stored.items():  # stored features are rounded to bfloat16
        assert float(online[step]) == pytest.approx(float(loss), abs=0.02)


def test_a_non_finite_loss_stops_the_run_and_saves_the_batch(store, tmp_path):
    trainer = Trainer(settings(store, tmp_path), toy_target(), say=lambda _: None)
    with torch.no_grad():
        trainer.model.fc.weight[0, 0] = float("nan")
    with pytest.raises(TrainingStopped, match=r"the loss is nan at step 0; .*bad-batch\.pt"):
        trainer.run()
    saved = torch.load(tmp_path / "bad-batch.pt", weights_only=False)
    assert saved["step"] == 0
    assert len(saved["batch"].roots) == 12


def test_dpace_and_bfloat16_run(store, tmp_path):
    AcceleratorState._reset_state()  # one process, another precision
    shown = losses(train(settings(store, tmp_path, dpace_alpha=0.5, mixed_precision="bf16")))
    AcceleratorState._reset_state()
    assert float(shown[12]) < float(shown[1])


def test_estimated_tau_equals_a_walk_round_by_round():
    target, model = toy_target(), toy_model(7)
    document = toy_document(target, 30, 5, 2)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings().weight
    (result,) = estimate_tau(model, embedding, head, [document], budgets=(4, 12))
    rounds, position, last = 0, 5, 29
    drafter = Drafter(model.eval(), target)
    while position < last:
        cache = drafter.new_cache(1, position)
        drafter.extend_context(cache, document.features[None, :position], torch.arange(position))
        root = document.tokens[position : position + 1]
        guess = drafter.draft_logits(cache, root, torch.tensor([position]))[0].argmax(-1)
        wanted = document.tokens[position + 1 : position + BLOCK]
        agree = (guess[: len(wanted)] == wanted).long().cumprod(0).sum().item()
        position, rounds = position + agree + 1, rounds + 1
    assert result.rounds["chain"] == rounds
    assert result.committed == 24
    assert result.rounds["12"] <= result.rounds["4"]


def test_intervals_hold_the_estimate_and_come_by_category(store):
    target, model = toy_target(), toy_model(1)
    source = FeatureStore([store])
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings().weight
    documents = [source[i] for i in range(len(source))]
    intervals = tau_intervals(estimate_tau(model, embedding, head, documents, budgets=(8,)))
    assert [i.category for i in intervals] == ["all", "all", "even", "even", "odd", "odd"]
    assert all(i.low <= i.tau <= i.high for i in intervals)
    assert intervals[0].documents == 24


def test_validation_does_not_move_as_data_grows(tmp_path):
    target = toy_target()

    def held_out(count):
        path = tmp_path / f"{count}.jsonl"
        records = [{"prompt_ids": [1, i], "response_ids": [4, 5]} for i in range(count)]
        path.write_text("".join(json.dumps(r) + "\n" for r in records))
        training, validation = split_validation(OnlineSource([path], target, LAYERS), 0.25)
        assert sorted(training + validation) == list(range(count))
        return validation

    few, many = held_out(20), held_out(50)
    assert few == [i for i in many if i < 20]
    assert 0 < len(many) < 25


def test_a_store_returns_what_was_written_and_picks_layers(tmp_path):
    writer = StoreWriter(tmp_path, layer_ids=[3, 5], hidden_size=4, shard_tokens=10)
    documents = [
        Document(torch.arange(n), 2, torch.randn(n - 1, 8).to(torch.bfloat16), f"s{n}")
        for n in (4, 9, 5)
    ]
    for document in documents:
        writer.add(document)
    writer.flush()
    read = FeatureStore([tmp_path])
    assert len(list(tmp_path.glob("shard-*"))) == 2
    for index, wanted in enumerate(documents):
        got = read[index]
        assert torch.equal(got.tokens, wanted.tokens)
        assert torch.equal(got.features, wanted.features)
        assert (got.prompt_length, got.source) == (2, wanted.source)
    swapped = FeatureStore([tmp_path], [5])[1]
    assert torch.equal(swapped.features, documents[1].features[:, 4:])
    with pytest.raises(StoreError, match=r"layers \[7\] are not among the stored \[3, 5\]"):
        FeatureStore([tmp_path], [7])


def test_the_producer_is_bounded_ordered_and_passes_errors_on():
    made = []

    def make(index):
        made.append(index)
        if index == 5:
            raise ValueError("broken document")
        return index

    producer = Producer(make, 0, 9, depth=2)
    seen = []

    def consume():
        for item in producer:
            assert len(made) - len(seen) <= 4  # two waiting, one in hand, one being made
            seen.append(item)

    with pytest.raises(ValueError, match="broken document"):
        consume()
    producer.close()
    assert seen == [0, 1, 2, 3, 4]
    assert producer.waited > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"setps": 3}, "unknown settings \\['setps'\\]"),
        ({"documents": 0}, "documents is 0; it must be 1 or more"),
        ({"validation": 1.0}, "validation is 1.0"),
        ({"copy_layers": [1]}, "copy_layers names 1 layers for 2"),
    ],
)
def test_wrong_settings_are_named(store, tmp_path, change, message):
    with pytest.raises(SettingsError, match=message):
        settings(store, tmp_path, **change)


def test_layers_copied_from_the_target_are_its_layers(store, tmp_path):
    trainer = Trainer(
        settings(store, tmp_path, copy_layers=[1, 3], fit_start=False),
        toy_target(),
        say=lambda _: None,
    )
    theirs = toy_target().model.layers[3]
    ours = trainer.model.layers[1]
    scale = theirs.input_layernorm.weight
    assert torch.equal(ours.self_attn.k_proj.weight, theirs.self_attn.k_proj.weight * scale)
    assert torch.equal(ours.mlp.down_proj.weight, theirs.mlp.down_proj.weight)


def test_full_vocabulary_is_used_when_asked_for(store, tmp_path):
    run = settings(store, tmp_path, common_tokens=0, sampled_tokens=0)
    trainer = Trainer(run, toy_target(), say=lambda _: None)
    assert trainer._vocabulary(trainer.plan.batch(0), 0) == Vocabulary()
    assert toy_config().target_layer_ids == LAYERS

"""The commands of `ddtree train` and `ddtree eval`, from prompts to a drafter that generates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from toys import toy_target
from typer.testing import CliRunner

from ddtree.accept import SamplingRule
from ddtree.drafter import load_drafter
from ddtree.engine import generate
from ddtree.train.cli import app, evaluate
from ddtree.train.prompts import PromptError, read_prompts, user_opening, write_instructions

PREPARE = ("--target", "TARGET", "--out", "OUT")
TEMPLATE = (
    "{% for m in messages %}{{ '<user> ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    """A toy target with a tokenizer that splits at spaces."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("target")
    words = ["<unk>", "<user>", "<assistant>", "<end>", *(f"w{i}" for i in range(49))]
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>")
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", eos_token="<end>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    target = toy_target()
    target.generation_config.eos_token_id = 3
    target.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    records = [{"question": f"w{i} w{i + 1} w{3 * i % 40}"} for i in range(12)]
    records += [{"turns": [f"w{i}", "second turn"], "category": "writing"} for i in range(4)]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def call(*arguments: str):
    everything = typer.Typer()
    everything.add_typer(app, name="train")
    everything.command("eval")(evaluate)
    return CliRunner().invoke(everything, [str(a) for a in arguments])


def test_prepare_train_resume_evaluate_and_generate(target_folder, prompts, tmp_path):
    store, out, record = tmp_path / "store", tmp_path / "run", tmp_path / "tau.json"
    asked = ["--target", target_folder, "--prompts", prompts, "--out", store, "--layers", "0,2"]
    done = call("train", "prepare", *asked, "--max-new-tokens", "24", "--write", "2")
    assert done.exit_code == 0, done.output
    assert (store / "responses.jsonl").read_text().count("\n") >= 16

    config = tmp_path / "run.toml"
    config.write_text(
        f'target = "{target_folder}"\ndata = ["{store}"]\nout = "{out}"\n'
        "num_layers = 1\nblock_size = 4\ntarget_layer_ids = [0, 2]\nmask_token_id = 52\n"
        "documents = 4\nanchors = 4\ncommon_tokens = 8\nsampled_tokens = 8\nsteps = 6\n"
        "log_every = 2\nevaluate_every = 3\nsave_every = 2\nvalidation = 0.2\n"
    )
    done = call("train", "run", config, "--stop-step", "4")
    assert done.exit_code == 0, done.output
    done = call("train", "run", config)
    assert done.exit_code == 0, done.output
    assert "resuming at step 4" in done.output
    assert "step 6/6" in done.output

    asked = ["--drafter", out / "last", "--target", target_folder, "--store", store]
    done = call("eval", *asked, "--budgets", "8", "--json", record)
    assert done.exit_code == 0, done.output
    taus = json.loads(record.read_text())["tau"]
    assert {t["category"] for t in taus} >= {"all", "questions", "writing"}
    assert {t["method"] for t in taus} == {"chain", "8"}

    target = toy_target()
    drafter = load_drafter(out / "last", target=target)
    answers = [
        generate(
            target, drafter, torch.tensor([[1, 9, 4]]), mode=mode, max_new_tokens=12, budget=6
        ).tokens
        for mode in ("ar", "dflash", "ddtree")
    ]
    assert answers[0] == answers[1] == answers[2]


def test_evaluate_answers_prompts_and_keeps_them(target_folder, prompts, tmp_path):
    from ddtree.drafter import random_drafter, save_drafter

    drafter = random_drafter(toy_target(), block_size=4, num_layers=2)
    save_drafter(drafter.model, drafter.config, tmp_path / "drafter")
    asked = ["--drafter", tmp_path / "drafter", "--target", target_folder, "--budgets", "4"]
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    work = tmp_path / "work"
    new = ["--prompts", prompts, "--max-new-tokens", "16", "--work", work, "--json", first]
    done = call("eval", *asked, *new)
    assert done.exit_code == 0, done.output
    done = call("eval", *asked, "--store", work, "--json", again)
    assert done.exit_code == 0, done.output
    records = [json.loads(p.read_text())["tau"] for p in (first, again)]
    assert records[0] == records[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "run", "absent.toml"], "absent.toml cannot be read"),
        (["train", "prepare", *PREPARE], "nothing to prepare"),
        (
            [
                "train",
                "prepare",
                "--target",
                "TARGET",
                "--out",
                "OUT",
                "--layers",
                "3",
                "--write",
                "1",
            ],
            "must lie between 0 and 2",
        ),
        (["eval", "--drafter", "OUT", "--target", "TARGET"], "neither a folder nor a hub id"),
        (["train", "prepare", "--target", "OUT", "--out", "OUT"], "cannot be loaded"),
    ],
)
def test_mistakes_get_one_clear_error(arguments, message, target_folder, tmp_path):
    places = {"TARGET": target_folder, "OUT": tmp_path / "nothing"}
    done = call(*[places.get(a, a) for a in arguments])
    assert done.exit_code == 1
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_prompts_of_every_shape_are_read(tmp_path):
    path = tmp_path / "mixed.jsonl"
    records = [
        {"prompt": "plain", "source": "own"},
        {"question": "gsm", "answer": "1"},
        {"turns": ["first", "second"], "category": "qa"},
        {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    read = read_prompts(path)
    assert [p.messages[-1]["content"] for p in read] == ["plain", "gsm", "first", "def f():", "hi"]
    assert [p.source for p in read] == ["own", "mixed", "qa", "mixed", "mixed"]
    assert len(read_prompts(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"}', r"line 1 has none of messages, prompt, question, turns"),
        ("{broken", "line 1 is not valid JSON"),
        ("[1]", "line 1 is not a JSON object"),
        ("", "holds no prompts"),
    ],
)
def test_unreadable_prompts_are_named(line, message, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(PromptError, match=message):
        read_prompts(path)


def test_the_target_writes_instructions_that_end(target_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    ends = list(range(45, 53))
    # The toy repeats itself unless it is hot.
    options = {"eos_token_ids": ends, "seed": 1, "rule": SamplingRule(temperature=8.0)}
    written = write_instructions(toy_target(), tokenizer, 200, **options)
    texts = [p.messages[0]["content"] for p in written]
    assert len(texts) > 1
    assert len(set(texts)) == len(texts)
    again = write_instructions(toy_target(), tokenizer, 200, **options)
    assert [p.messages[0]["content"] for p in again] == texts


def test_the_user_opening_ends_where_the_user_speaks(target_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    assert user_opening(tokenizer) == [1]

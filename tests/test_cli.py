"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import ddtree
from ddtree.cli import app
from ddtree.cli.demo import verdict
from ddtree.cli.pair import open_pair
from ddtree.cli.run import Run, Settings
from ddtree.cli.show import Node, Picture, take_picture
from ddtree.cli.svg import svg
from ddtree.cli.text import TextStream, token_label
from ddtree.drafter import random_drafter, save_drafter
from ddtree.metrics import TreeSummary

SOURCE = str(Path(ddtree.__file__).parents[1])
MODES = ("ar", "dflash", "ddtree")


def run(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


@pytest.fixture(scope="session")
def tiny_drafter(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = AutoModelForCausalLM.from_pretrained(tiny_target)
    drafter = random_drafter(target, block_size=6)
    folder = tmp_path_factory.mktemp("models") / "tiny-drafter"
    save_drafter(drafter.model, drafter.config, folder, torch.float32)
    return folder


@pytest.fixture
def models(tiny_target: Path, tiny_drafter: Path) -> list[str]:
    return ["--target", str(tiny_target), "--drafter", str(tiny_drafter), "--dtype", "float32"]


def plain_tokens(folder: Path, prompt_ids: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(
        torch.tensor([prompt_ids]), max_new_tokens=count, do_sample=False, eos_token_id=1
    )
    return out[0, len(prompt_ids) :].tolist()


def test_calibrate_stores_what_the_server_will_look_for(models, tmp_path, monkeypatch):
    from ddtree.budget import StepCost
    from ddtree.engine.calibrate import DRAFT_BATCHES, VERIFY_SIZES, machine_costs

    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    target, drafter = models[1], models[3]
    assert machine_costs(target, drafter, "cpu", torch.float32) == StepCost.assumed()
    result = run("calibrate", *models, "--repetitions", 2, "--json", tmp_path / "costs.json")
    assert result.exit_code == 0, result.output
    costs = machine_costs(target, drafter, "cpu", torch.float32)
    assert costs.verify.sizes == VERIFY_SIZES
    assert costs.draft.sizes == tuple(6 * batch for batch in DRAFT_BATCHES)
    assert costs.verify(33) >= costs.verify(1) > 0
    record = json.loads((tmp_path / "costs.json").read_text(encoding="utf-8"))
    assert tuple(record["costs"]["verify"]["seconds"]) == costs.verify.seconds
    assert machine_costs(target, drafter, "cpu", torch.bfloat16) == StepCost.assumed()


@pytest.mark.parametrize("mode", MODES)
def test_generate_prints_the_answer_and_records_the_run(mode, models, tiny_target, tmp_path):
    file = tmp_path / "run.json"
    prompt = ["--prompt", "the tree", "--max-new-tokens", 24, "--budget", 9, "--mode", mode]
    result = run("generate", *models, *prompt, "--json", file)
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text(encoding="utf-8"))

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    chat = "<|im_start|>user\nthe tree<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(record["prompt_ids"]) == chat
    assert record["tokens"] == plain_tokens(tiny_target, record["prompt_ids"], 24)
    assert record["text"] == tokenizer.decode(record["tokens"], skip_special_tokens=True)
    assert result.stdout == record["text"] + "\n"

    lengths = record["accept_lengths"]
    assert sum(lengths) == len(record["tokens"]) - 1  # the prefill commits the first
    assert record["rounds"] == len(lengths)
    assert record["tau"] == pytest.approx(sum(lengths) / len(lengths))
    assert record["accept_histogram"] == {
        str(n): lengths.count(n) for n in range(1, max(lengths) + 1)
    }
    assert record["settings"]["mode"] == mode
    assert record["settings"]["budget"] == {"ar": 0, "dflash": 5, "ddtree": 9}[mode]
    assert record["drafter"] == (None if mode == "ar" else models[3])
    assert record["dtype"] == "float32"
    assert record["versions"]["torch"] == torch.__version__
    stages = record["stage_seconds"]
    assert stages["verify"] > 0
    assert (stages["draft"] > 0) == (mode != "ar")
    assert sum(stages.values()) <= record["seconds"]


def test_raw_takes_the_prompt_as_it_is(models, tiny_target, tmp_path):
    file, prompt = tmp_path / "run.json", tmp_path / "prompt.txt"
    prompt.write_text("the path", encoding="utf-8")
    result = run("generate", *models, "--raw", "--prompt-file", prompt, "-n", 2, "--json", file)
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["prompt_ids"] == AutoTokenizer.from_pretrained(tiny_target).encode("the path")


def test_a_sampled_run_can_be_repeated_from_its_record(models, tmp_path):
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    sampled = ["generate", *models, "-p", "the tree", "-n", 16, "--temperature", 1.2]
    assert run(*sampled, "--json", first).exit_code == 0
    record = json.loads(first.read_text(encoding="utf-8"))
    assert run(*sampled, "--seed", record["settings"]["seed"], "--json", second).exit_code == 0
    assert json.loads(second.read_text(encoding="utf-8"))["tokens"] == record["tokens"]


REFUSED = {
    "no prompt": (["generate"], "--prompt"),
    "an empty prompt": (["generate", "-p", " "], "empty"),
    "two prompts": (["generate", "-p", "a", "--prompt-file", "b"], "--prompt-file"),
    "no such prompt file": (["generate", "--prompt-file", "none.txt"], "none.txt"),
    "an unknown mode": (["generate", "-p", "a", "--mode", "tree"], "'ar', 'dflash', 'ddtree'"),
    "a budget that is no number": (["generate", "-p", "a", "--budget", "x"], "--budget"),
    "a negative budget": (["generate", "-p", "a", "--budget", "-1"], "budget is -1"),
    "no new tokens": (["generate", "-p", "a", "-n", "0"], "max_new_tokens is 0"),
    "more tokens than positions": (["generate", "-p", "a", "-n", "9999"], "512 positions"),
    "a bad temperature": (["generate", "-p", "a", "--temperature", "-1"], "temperature is -1"),
    "a bad top-p": (["generate", "-p", "a", "--top-p", "2"], "top_p is 2"),
    "an unknown dtype": (["generate", "-p", "a", "--dtype", "int8"], "float32, bfloat16, float16"),
    "an unknown device": (["generate", "-p", "a", "--device", "toaster"], "toaster"),
    "a record in no folder": (["generate", "-p", "a", "--json", "no/r.json"], "no folder no"),
    "no such target": (["generate", "-p", "a", "--target", "/nowhere"], "/nowhere"),
    "no such drafter": (["generate", "-p", "a", "--drafter", "/nowhere"], "/nowhere"),
    "round 0": (["show", "--round", "0"], "round is 0"),
    "a drawing in no folder": (["show", "--svg", "no/t.svg"], "no folder no"),
    "an unknown option": (["demo", "--bugdet", "3"], "--bugdet"),
    "an unknown command": (["generte"], "generte"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_gets_one_line_and_exit_code_2(case, models, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args, named = REFUSED[case]
    if args[0] in ("generate", "show"):
        args = [args[0], *models, *args[1:]]
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    notes = ("loading ", "note: ")  # said before the mistake is found
    lines = [line for line in result.stderr.splitlines() if not line.startswith(notes)]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert named in lines[0]


def test_a_target_without_a_shipped_drafter_needs_one_named(tiny_target):
    result = run("generate", "--target", tiny_target, "-p", "a")
    assert result.exit_code == 2
    assert "--drafter" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("which", ["--target", "--drafter"])
def test_a_damaged_checkpoint_is_refused(broken, which, models, tmp_path):
    source = Path(models[models.index(which) + 1])
    for file in source.iterdir():
        damaged = file.read_bytes()[:40] if file.name == broken else file.read_bytes()
        (tmp_path / file.name).write_bytes(damaged)
    result = run("generate", *models, which, tmp_path, "-p", "a")
    assert result.exit_code == 2, result.exception
    assert str(tmp_path) in result.stderr.splitlines()[-1]


def test_model_refuses_a_folder_that_holds_something_else(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
    result = run("model", "--out", tmp_path)
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "mine"


def test_show_draws_the_tree_and_its_svg_holds_every_node(models, tmp_path):
    drawing, file = tmp_path / "tree.svg", tmp_path / "tree.json"
    result = run("show", *models, "--budget", 11, "--round", 2, "--svg", drawing, "--json", file)
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text(encoding="utf-8"))
    assert len(record["nodes"]) == 12
    assert "11 nodes" in result.stdout
    drawn = nodes_of(drawing.read_text(encoding="utf-8"))
    assert sorted(drawn) == list(range(12))
    for node in record["nodes"]:
        assert node["label"] in result.stdout
        assert drawn[node["index"]] == (node["label"], node["accepted"])


def nodes_of(text: str) -> dict[int, tuple[str, bool]]:
    """Label and acceptance of the nodes of a drawing."""
    space = "{http://www.w3.org/2000/svg}"
    groups = [g for g in ElementTree.fromstring(text).iter(f"{space}g") if g.get("data-node")]
    return {
        int(g.get("data-node", "")): (
            g.findall(f"{space}text")[0].text or "",
            "accepted" in g.get("class", "").split(),
        )
        for g in groups
    }


def test_a_picture_marks_the_path_the_target_chose(tiny_target, models):
    pair = open_pair(
        Console(stderr=True), str(tiny_target), models[3], dtype="float32", device="cpu"
    )
    ids = pair.input_ids("the tree", raw=False)
    answer = plain_tokens(tiny_target, ids, 40)
    for number in range(1, 6):
        picture = take_picture(Run(pair, ids, Settings("ddtree", 40, 60)), number, "the tree")
        path = [node for node in picture.nodes if node.accepted]
        assert [node.depth for node in path] == list(range(len(path)))
        # The root is in the answer, and the accepted nodes and the bonus token follow it there.
        starts = [i for i, token in enumerate(answer) if token == path[0].token]
        labels = [token_label(pair.tokenizer, token) for token in answer]
        shown = [node.label for node in path] + [picture.bonus]
        assert any(labels[i : i + len(shown)] == shown for i in starts)


def test_a_drawing_survives_any_label():
    labels = ["<b>&\"'", "·the", "漢字", "#7"]
    nodes = tuple(
        Node(i, i - 1, i, i, label, 0.5, 0.5**i, accepted=i < 2) for i, label in enumerate(labels)
    )
    summary = TreeSummary(3, 3, [1, 1, 1], 1.0, [0.5, 0.25, 0.125], 1.875)
    text = svg(Picture(nodes, "]]>", summary, 1, "a\x00b\n</svg>", "\x1b", untrained=True))
    assert [label for label, _ in nodes_of(text).values()] == labels
    assert "untrained" in text


def test_demo_runs_every_mode_and_says_that_the_drafter_is_untrained(tiny_target, tmp_path):
    file = tmp_path / "demo.json"
    result = run("demo", "--target", tiny_target, "--dtype", "float32", "-n", 16, "--json", file)
    assert result.exit_code == 0, result.output
    assert "untrained" in result.stdout
    assert "agree token for token" in result.stdout
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["outputs_agree"] is True
    assert list(record["modes"]) == list(MODES)
    for mode in MODES:
        assert mode in result.stdout
        assert record["modes"][mode]["tokens"] == record["modes"]["ar"]["tokens"]
        assert record["modes"][mode]["tau"] >= 1


def test_demo_says_nothing_of_training_where_a_drafter_is_named(models):
    result = run("demo", *models, "-n", 4, "--no-servers")
    assert result.exit_code == 0, result.output
    assert "untrained" not in result.output


def test_the_verdict_names_the_token_where_outputs_part():
    outputs = {"ar": [1, 2, 3], "dflash": [1, 2, 3], "ddtree": [1, 9, 3]}
    assert "ddtree at token 2" in verdict(outputs, "bfloat16").plain
    assert "dflash" not in verdict(outputs, "bfloat16").plain
    assert "fault" in verdict(outputs, "float32").plain


def test_streamed_text_is_the_decoded_text_whole_characters_only(tiny_target):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    text = "naïve 漢字, 🌳 — ✓"
    tokens = tokenizer.encode(text)
    assert len(tokens) > len(text), "some characters should span tokens"
    for step in (1, 2, 3, 7):
        stream = TextStream(tokenizer)
        pieces = [stream.push(tokens[i : i + step]) for i in range(0, len(tokens), step)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.finish() == text


def test_a_character_cut_off_at_the_end_is_shown_as_such(tiny_target):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    tokens = tokenizer.encode("a🌳")[:-1]
    stream = TextStream(tokenizer)
    assert stream.push(tokens[:1]) == "a"
    assert stream.push(tokens[1:]) == ""
    assert stream.finish() == tokenizer.decode(tokens)[1:]


def test_labels_show_what_cannot_be_seen(tiny_target):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    assert token_label(tokenizer, tokenizer.encode(" the")[0]).startswith("·")
    assert token_label(tokenizer, tokenizer.encode("\n")[0]) == "⏎"
    fragment = tokenizer.encode("🌳")[0]
    assert token_label(tokenizer, fragment) == f"#{fragment}"
    assert token_label(tokenizer, 1) == "<|im_end|>"


def subprocess_run(*code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": SOURCE}
    return subprocess.run(
        [sys.executable, *code], env=environment, capture_output=True, text=True, check=False
    )


def test_help_starts_without_torch():
    code = (
        "import sys\n"
        "from ddtree.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    result = subprocess_run("-c", code)
    assert "generate" in result.stdout
    assert result.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("module", "call"),
    [("typer", "app()"), ("transformers", "app(['demo'])"), ("sglang", "app(['serve'])")],
)
def test_a_missing_extra_is_named(module, call):
    code = f"import sys; sys.modules['{module}'] = None\nfrom ddtree.cli import app\n{call}"
    result = subprocess_run("-c", code)
    assert result.returncode == 2, result.stderr
    extra = "sglang" if module == "sglang" else "engine"
    last = result.stderr.splitlines()[-1]
    assert f"pip install 'sglang-ddtree[{extra}]'" in last
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "shown"), [("train", "prepare"), ("eval", "--budgets"), ("serve", "--port")]
)
def test_help_of_commands_that_live_elsewhere(command, shown):
    result = run(command, "--help")
    assert result.exit_code == 0, result.output
    assert shown in result.stdout
    assert f"ddtree {command}" in result.stdout

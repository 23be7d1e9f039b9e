"""The reference engine on the default target: lossless in float32, small regret in bfloat16.

CI runs a slice of each study: every drafter and every tree shape, on prompts that rotate with the
shape. `--slow` runs all 24 prompts with every shape.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch

from conftest import read_jsonl
from ddtree.drafter import load_drafter, random_drafter
from ddtree.drafter.shipped import shipped_drafter
from ddtree.engine import generate, load_target

SHAPES = [("dflash", None, False), ("ddtree", 1, False), ("ddtree", 8, False),
          ("ddtree", 32, False), ("ddtree", 128, False), ("ddtree", 32, True)]  # fmt: skip
IDS = ["dflash", "ddtree-1", "ddtree-8", "ddtree-32", "ddtree-128", "ddtree-32-seeded"]
PROMPTS = 24
TOKENS = 96
# The share of a study that CI runs: prompts per shape and tokens per prompt.
SLICE_PROMPTS = 1
SLICE_TOKENS = 48
# Separates rounding from faults for this target (docs/structure.md, "Losslessness").
REGRET = 0.3


@pytest.fixture(scope="module")
def prompts(smollm2, shared_data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    records = read_jsonl(shared_data / "spec_bench_a.jsonl")
    # Spread over the file, whose categories follow one another.
    chosen = records[:: len(records) // PROMPTS][:PROMPTS]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": record["turns"][0]}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for record in chosen
    ]


@pytest.fixture(scope="module")
def target(smollm2):
    return load_target(smollm2, dtype=torch.float32)[0]


@pytest.fixture(scope="module")
def drafters(target):
    drafters = {"random": random_drafter(target, block_size=8)}
    folder = shipped_drafter()
    if folder is not None:
        drafters["shipped"] = load_drafter(folder, target=target)
    return drafters


@pytest.fixture(scope="module")
def reference(target, prompts):
    """Plain greedy decoding by transformers, each prompt once."""
    known: dict[int, list[int]] = {}

    def tokens(index: int) -> list[int]:
        if index not in known:
            ids = torch.tensor([prompts[index]])
            out = target.generate(ids, max_new_tokens=TOKENS, do_sample=False)
            known[index] = out[0, ids.shape[1] :].tolist()
        return known[index]

    return tokens


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["random", "shipped"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_float32_greedy_equals_plain_decoding(
    target, drafters, prompts, reference, shape, kind, request
):
    if kind not in drafters:
        pytest.skip("no drafter is shipped in models/ yet")
    mode, budget, seeded = shape
    slow = request.config.getoption("--slow")
    start = SHAPES.index(shape) * SLICE_PROMPTS
    chosen = range(PROMPTS) if slow else [(start + 6 * (kind == "shipped")) % PROMPTS]
    count = TOKENS if slow else SLICE_TOKENS
    for index in chosen:
        got = generate(target, drafters[kind], prompts[index], mode=mode, budget=budget,
                       chain_seed=seeded, max_new_tokens=count, eos_token_ids=[2])  # fmt: skip
        assert got.tokens == reference(index)[:count], f"prompt {index}"


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", ["dflash", "ddtree"])
def test_bfloat16_regret_is_rounding(smollm2, target, prompts, mode, request):
    """Every chosen token is within REGRET of the best by a float32 forward of the same prefix."""
    low, _ = load_target(smollm2, dtype=torch.bfloat16)
    folder = shipped_drafter()
    drafter = load_drafter(folder, target=low) if folder else random_drafter(low)
    slow = request.config.getoption("--slow")
    for index in range(PROMPTS) if slow else [3]:
        prompt = prompts[index]
        got = generate(low, drafter, prompt, mode=mode, max_new_tokens=TOKENS if slow else 24,
                       eos_token_ids=[2])  # fmt: skip
        with torch.inference_mode():
            logits = target(torch.tensor([prompt + got.tokens])).logits[0, len(prompt) - 1 : -1]
        picked = logits.gather(1, torch.tensor(got.tokens)[:, None])[:, 0]
        assert float((logits.amax(-1) - picked).max()) <= REGRET, f"prompt {index}"

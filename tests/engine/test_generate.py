"""The reference engine on tiny models: every mode gives plain decoding's tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("transformers")

import torch
from scipy.stats import chi2_contingency, chisquare

from ddtree.accept import SamplingRule, accept_path, choose_tokens
from ddtree.drafter import random_drafter
from ddtree.engine import EngineError, generate
from ddtree.engine.target import Target
from ddtree.tree import build_tree
from engine.scripted import (
    ARCHITECTURES,
    RECURRENT,
    VOCAB,
    ScriptedDrafter,
    plain,
    tiny_target,
)

PROMPT = [7, 3, 50, 12, 12, 9, 31, 4, 18, 27, 5]
MODES = [("ar", None), ("dflash", None), ("dflash", 3), ("ddtree", 0), ("ddtree", 1),
         ("ddtree", 5), ("ddtree", 16), ("ddtree", 40)]  # fmt: skip


@pytest.fixture(scope="module")
def llama():
    return tiny_target()


@pytest.fixture(scope="module")
def text(llama):
    return PROMPT + plain(llama, PROMPT, 60)


def shapes(name):
    """Modes, budgets and chain seeds to try; few nodes where each is a forward of its own."""
    most = 16 if name in RECURRENT else 40
    for mode, budget in MODES:
        if budget is None or budget <= most:
            yield mode, budget, False
            if mode == "ddtree":
                yield mode, budget, True


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_output_equals_plain_decoding(name):
    target = tiny_target(name)
    reference = plain(target, PROMPT, 32)
    drafter = ScriptedDrafter(target, PROMPT + reference)
    for mode, budget, seeded in shapes(name):
        got = generate(target, drafter, PROMPT, mode=mode, budget=budget, chain_seed=seeded,
                       max_new_tokens=32)  # fmt: skip
        assert got.tokens == reference, (mode, budget, seeded)
        assert got.finish_reason == "length"
        assert sum(got.accept_lengths) + 1 == len(got.tokens)
        if mode == "ddtree" and budget == 40:
            assert got.tau > 2, "the scripted drafter should be accepted often"


def test_greedy_output_does_not_depend_on_the_drafter(llama, text):
    for seed in range(3):
        drafter = random_drafter(llama, block_size=6, seed=seed)
        got = generate(llama, drafter, PROMPT, mode="ddtree", budget=12, max_new_tokens=24)
        assert got.tokens == text[len(PROMPT) :][:24]


def test_a_wide_tree_is_accepted_at_least_as_far_as_the_chain(llama, text):
    def lengths(mode, budget):
        drafter = ScriptedDrafter(llama, text)
        return generate(llama, drafter, PROMPT, mode=mode, budget=budget, max_new_tokens=48)

    assert lengths("ddtree", 60).tau > lengths("dflash", None).tau


@pytest.mark.parametrize("stop", range(1, 14))
def test_generation_ends_with_the_first_eos_wherever_it_falls_in_a_path(llama, text, stop):
    reference = text[len(PROMPT) :]
    eos = reference[stop]
    expected = reference[: reference.index(eos) + 1]
    for mode, budget in MODES:
        got = generate(llama, ScriptedDrafter(llama, text), PROMPT, mode=mode, budget=budget,
                       max_new_tokens=40, eos_token_ids=[eos])  # fmt: skip
        assert got.tokens == expected
        assert got.finish_reason == "stop"
        assert sum(got.accept_lengths) + 1 == len(expected)


@pytest.mark.parametrize("count", range(1, 12))
def test_max_new_tokens_is_exact_in_the_middle_of_a_path(llama, text, count):
    for mode, budget in MODES:
        got = generate(llama, ScriptedDrafter(llama, text), PROMPT, mode=mode, budget=budget,
                       max_new_tokens=count)  # fmt: skip
        assert got.tokens == text[len(PROMPT) :][:count]


def test_a_prompt_of_one_token(llama):
    reference = plain(llama, [5], 20)
    drafter = ScriptedDrafter(llama, [5, *reference])
    for mode, budget in MODES:
        got = generate(llama, drafter, [5], mode=mode, budget=budget, max_new_tokens=20)
        assert got.tokens == reference


def test_generation_up_to_the_last_position_of_the_target(llama, text):
    limit = llama.config.max_position_embeddings
    prompt = (text * 3)[: limit - 9]
    reference = plain(llama, prompt, 9)
    drafter = ScriptedDrafter(llama, prompt + reference)
    for mode, budget in MODES:
        got = generate(llama, drafter, prompt, mode=mode, budget=budget, max_new_tokens=9)
        assert got.tokens == reference
    with pytest.raises(EngineError, match=r"119 tokens.*10.*128 positions.*at most 9"):
        generate(llama, drafter, prompt, mode="ddtree", max_new_tokens=10)


def test_input_may_be_a_list_or_a_tensor(llama, text):
    for ids in (PROMPT, torch.tensor(PROMPT), torch.tensor([PROMPT], dtype=torch.int32)):
        got = generate(llama, None, ids, mode="ar", max_new_tokens=5)
        assert got.tokens == text[len(PROMPT) :][:5]


def test_a_seed_fixes_the_sample_and_leaves_the_global_generator_alone(llama, text):
    def run(seed):
        return generate(llama, ScriptedDrafter(llama, text), PROMPT, mode="ddtree", budget=9,
                        max_new_tokens=30, temperature=1.0, seed=seed).tokens  # fmt: skip

    before = torch.random.get_rng_state()
    assert run(1) == run(1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert len({tuple(run(seed)) for seed in range(5)}) == 5


RULES = {
    "temperature 0.7": SamplingRule(0.7),
    "temperature 1.3": SamplingRule(1.3),
    "top-k": SamplingRule(1.0, top_k=3),
    "top-p": SamplingRule(1.0, top_p=0.8),
    "min-p": SamplingRule(1.0, min_p=0.1),
    "all": SamplingRule(1.3, top_p=0.9, top_k=5, min_p=0.05),
}


@pytest.fixture(scope="module")
def small():
    """A target over eight tokens and two-token continuations' exact probabilities."""
    target = tiny_target(vocab_size=8, initializer_range=0.3)
    prompt = [1, 5, 2]
    with torch.inference_mode():
        first = target(torch.tensor([prompt])).logits[0, -1]
        rows = torch.tensor([[*prompt, token] for token in range(8)])
        second = target(rows).logits[:, -1]
    return target, prompt, first, second


@pytest.mark.parametrize("name", RULES)
def test_a_verified_tree_samples_two_tokens_from_the_exact_distribution(small, name):
    """200,000 draws through one verify forward against exhaustive enumeration."""
    target, prompt, first, second = small
    rule = RULES[name]
    exact = (rule.probabilities(first)[:, None] * rule.probabilities(second)).flatten()

    tree = build_tree(torch.randn(1, 1, 8, generator=torch.Generator().manual_seed(3)),
                      torch.tensor(prompt[-1:]), 4)  # fmt: skip
    view = Target(target, 32, ())
    with torch.inference_mode():
        view.prefill(torch.tensor([prompt[:-1]]))
        logits = view.verify(tree).logits
    draws = 200_000
    generator = torch.Generator().manual_seed(7)
    chosen = choose_tokens(logits.expand(draws, -1, -1), rule, generator)
    fields = ("tokens", "parents", "depths", "scores", "valid")
    wide = replace(tree, **{name: getattr(tree, name).expand(draws, -1) for name in fields})
    walked = accept_path(wide, chosen)
    one = chosen[:, 0]
    # Where the first token was in the tree its node chose the second; else the next round does.
    fresh = choose_tokens(second[one], rule, generator)
    two = torch.where(walked.lengths > 1, walked.next_tokens, fresh)
    assert 0 < (walked.lengths > 1).float().mean() < 1
    counts = torch.bincount(one * 8 + two, minlength=64).double()
    possible = exact > 0
    assert counts[~possible].sum() == 0
    expected = exact[possible].double()
    result = chisquare(counts[possible].numpy(), (expected / expected.sum() * draws).numpy())
    assert result.pvalue > 1e-3


@pytest.mark.parametrize("name", [pytest.param("temperature 1.3", marks=pytest.mark.slow), "all"])
def test_whole_generations_follow_the_distribution_of_plain_decoding(small, name):
    """The engine end to end: `ddtree` against `ar`, each drawn 3,000 times."""
    target, prompt, _, _ = small
    rule = RULES[name]
    drafter = random_drafter(target, block_size=4)

    def counts(mode):
        table = torch.zeros(64)
        for seed in range(3_000):
            tokens = generate(
                target, drafter, prompt, mode=mode, budget=6, max_new_tokens=3,
                temperature=rule.temperature, top_p=rule.top_p, top_k=rule.top_k,
                min_p=rule.min_p, seed=seed if mode == "ar" else 10_000 + seed,
            ).tokens  # fmt: skip
            table[tokens[1] * 8 + tokens[2]] += 1
        return table

    table = torch.stack([counts("ar"), counts("ddtree")])
    common = table.sum(0) >= 20
    pooled = torch.cat([table[:, common], table[:, ~common].sum(1, keepdim=True)], dim=1)
    pooled = pooled[:, pooled.sum(0) > 0]
    assert chi2_contingency(pooled.numpy()).pvalue > 1e-3


GOOD = {"mode": "ddtree", "max_new_tokens": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": []}, "prompt is empty"),
        ({"input_ids": [1, VOCAB]}, rf"token id {VOCAB}.*vocabulary of {VOCAB}"),
        ({"input_ids": [-3]}, "token id -3"),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"\[2, 3\]"),
        ({"input_ids": torch.ones(3)}, "float32"),
        ({"budget": -1}, "budget is -1"),
        ({"mode": "beam"}, "mode is 'beam'.*ar, dflash, ddtree"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"drafter": None}, "needs a drafter"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"min_p": 1.0}, "min_p is 1.0"),
        ({"target": torch.nn.Linear(2, 2)}, "target is a Linear"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(llama, changes, message):
    values = {"target": llama, "drafter": random_drafter(llama), "input_ids": PROMPT, **GOOD}
    values.update(changes)
    with pytest.raises(EngineError, match=message) as raised:
        generate(values.pop("target"), values.pop("drafter"), values.pop("input_ids"), **values)
    assert "\n" not in str(raised.value)


def test_a_target_without_hidden_states_is_refused():
    target = tiny_target()
    drafter = random_drafter(target)
    whole = target.forward

    def forward(input_ids=None, position_ids=None, attention_mask=None, cache=None, **kwargs):
        out = whole(input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask,
                    **{name: cache}, **kwargs)  # fmt: skip
        out.hidden_states = None
        return out

    import inspect

    name = "cache" if "cache" in inspect.signature(whole).parameters else "past_key_values"
    target.forward = forward
    with pytest.raises(EngineError, match="no hidden states"):
        generate(target, drafter, PROMPT, mode="ddtree", max_new_tokens=4)


def test_unknown_layers_and_maskless_attention_are_refused(llama):
    import copy

    hybrid = copy.copy(llama.config)
    hybrid.layer_types = ["mamba", "full_attention"] * 2
    target = tiny_target()
    target.config = hybrid
    with pytest.raises(EngineError, match="mamba"):
        generate(target, None, PROMPT, mode="ar", max_new_tokens=2)
    target = tiny_target()
    target.config._attn_implementation = "flash_attention_2"
    with pytest.raises(EngineError, match=r"flash_attention_2.*sdpa"):
        generate(target, None, PROMPT, mode="ar", max_new_tokens=2)


def test_eager_attention_reads_the_same_mask(text):
    target = tiny_target()
    target.set_attn_implementation("eager")
    got = generate(target, ScriptedDrafter(target, text), PROMPT, mode="ddtree", budget=12,
                   max_new_tokens=24)  # fmt: skip
    assert got.tokens == text[len(PROMPT) :][:24]

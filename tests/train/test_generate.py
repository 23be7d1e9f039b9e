"""Batched generation against transformers' own, and the features against a plain forward."""

from __future__ import annotations

import pytest
import torch

from ddtree.accept import SamplingRule
from ddtree.train.generate import GenerationError, generate_responses, length_groups

PROMPTS = [[5, 9, 3], [7, 2, 8], [11, 4, 6], [1, 2, 3, 4, 5], [9, 9]]


@pytest.fixture(scope="module")
def target():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        vocab_size=37,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.25)
    return model


def by_transformers(target, prompt, length, eos):
    out = target.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0].tolist()


def test_greedy_responses_equal_those_of_transformers(target):
    wanted = [by_transformers(target, p, 12, None) for p in PROMPTS]
    # An id that some responses contain, so that rows finish at different times.
    eos = wanted[0][len(PROMPTS[0]) + 4]
    wanted = [by_transformers(target, p, 12, eos) for p in PROMPTS]
    assert len({len(w) - len(p) for w, p in zip(wanted, PROMPTS, strict=True)}) > 1
    got = generate_responses(target, PROMPTS, max_new_tokens=12, eos_token_ids=[eos], batch_size=2)
    tokens = {c.index: c.tokens.tolist() for c in got}
    assert tokens == dict(enumerate(wanted))


def test_features_equal_a_plain_forward(target):
    stop = by_transformers(target, PROMPTS[1], 12, None)[6]
    responses = list(
        generate_responses(
            target, PROMPTS, max_new_tokens=12, eos_token_ids=[stop], layer_ids=[0, 2]
        )
    )
    assert len(responses) == len(PROMPTS)
    for response in responses:
        with torch.no_grad():
            out = target(response.tokens[None, :-1], output_hidden_states=True)
        wanted = torch.cat([out.hidden_states[1][0], out.hidden_states[3][0]], -1)
        assert torch.equal(response.features[0], wanted[0].to(torch.bfloat16))
        torch.testing.assert_close(
            response.features, wanted.to(torch.bfloat16), rtol=2**-7, atol=1e-5
        )


def test_the_targets_own_attention_is_back_afterwards(target):
    before = target.config._attn_implementation
    list(generate_responses(target, PROMPTS, max_new_tokens=2, eos_token_ids=[0]))
    assert target.config._attn_implementation == before


def test_sampling_follows_the_seed(target):
    def sample(seed):
        return [
            c.tokens.tolist()
            for c in generate_responses(
                target,
                PROMPTS,
                max_new_tokens=8,
                eos_token_ids=[],
                rule=SamplingRule(temperature=1.0),
                generator=torch.Generator().manual_seed(seed),
            )
        ]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_groups_hold_similar_lengths_and_every_prompt_once():
    groups = length_groups(PROMPTS, 2)
    assert sorted(i for g in groups for i in g) == list(range(len(PROMPTS)))
    lengths = [len(PROMPTS[i]) for g in groups for i in g]
    assert lengths == sorted(lengths, reverse=True)
    assert max(map(len, groups)) == 2


def test_a_short_prompt_may_grow_where_a_long_neighbour_may_not(target):
    prompts = [[5] * 60, [7, 2, 8]]
    got = generate_responses(target, prompts, max_new_tokens=30, eos_token_ids=[])
    assert {c.index: len(c.tokens) for c in got} == {0: 64, 1: 33}


def test_a_window_shorter_than_the_text_is_refused(target):
    transformers = pytest.importorskip("transformers")
    names = ("hidden_size", "num_hidden_layers", "head_dim", "num_attention_heads",
             "num_key_value_heads", "intermediate_size", "vocab_size")  # fmt: skip
    shape = {name: getattr(target.config, name) for name in names}
    windowed = transformers.MistralForCausalLM(
        transformers.MistralConfig(**shape, sliding_window=8, max_position_embeddings=64)
    )
    with pytest.raises(GenerationError, match="a sliding window of 8 tokens"):
        list(generate_responses(windowed, [[1, 2, 3]], max_new_tokens=9, eos_token_ids=[]))


def test_a_prompt_that_cannot_be_continued_is_named(target):
    with pytest.raises(GenerationError, match="prompt 1 has 0 tokens"):
        list(generate_responses(target, [[1], []], max_new_tokens=2, eos_token_ids=[0]))
    with pytest.raises(GenerationError, match="prompt 0 has 64 tokens; it must have 1 to 63"):
        list(generate_responses(target, [[1] * 64], max_new_tokens=2, eos_token_ids=[0]))

"""Counting the experts a verify forward reads."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch

from ddtree.engine import EngineError, generate
from ddtree.engine.experts import distinct_experts, expected_experts, record_experts
from engine.scripted import ScriptedDrafter, plain, tiny_target

PROMPT = [7, 3, 50, 12, 12, 9, 31, 4, 18, 27, 5]


@pytest.mark.parametrize("family", ["qwen2-moe", "qwen3-moe", "mixtral", "gpt-oss", "qwen3-next"])
def test_one_token_activates_exactly_its_experts(family):
    target = tiny_target(family)
    with record_experts(target) as counts, torch.no_grad():
        target(input_ids=torch.tensor([[5]]))
    assert counts == [[2] * target.config.num_hidden_layers]


def test_wider_trees_activate_more_experts():
    target = tiny_target("qwen3-moe", num_experts=32)
    drafter = ScriptedDrafter(target, PROMPT + plain(target, PROMPT, 24))
    means = []
    for budget in (0, 7, 31):
        with record_experts(target) as counts:
            generate(target, drafter, PROMPT, mode="ddtree", budget=budget, max_new_tokens=24)
        verify = torch.tensor(counts[1:], dtype=torch.float)  # the first forward is the prefill
        means.append(float(verify.mean()))
    assert means[0] == 2
    assert means[0] < means[1] < means[2] <= 32


def test_uniform_routing_by_simulation():
    generator = torch.Generator().manual_seed(0)
    draws = [
        distinct_experts(torch.stack([torch.randperm(16, generator=generator)[:3]
                                      for _ in range(9)]))
        for _ in range(2000)
    ]  # fmt: skip
    assert sum(draws) / 2000 == pytest.approx(expected_experts(16, 3, 9), abs=0.1)


def test_a_dense_model_has_none():
    with (
        pytest.raises(EngineError, match="no expert router"),
        record_experts(tiny_target("llama")),
    ):
        pass

"""How many experts does a verify forward activate, tree against chain, by width?

    python benchmarks/moe_experts.py

A random Qwen3-MoE of 128 experts, 8 per token (the shape of Qwen3-30B-A3B's layers, 4 of them and
narrow) verifies the trees of a random drafter. Nothing is learned about acceptance, and a trained
router is neither this one nor a uniform one: the study shows that the weights read grow with the
width, and that a tree's grow faster than a chain's. Records go to `results/moe_experts.jsonl`:

* `tree`, `chain`: mean distinct experts per layer of one forward over `width` nodes; no chain is
  longer than the drafter's block;
* `uniform`: expected under independent uniform routing;
* `times_decode`: `tree` over one token's experts: the growth of a memory-bound MoE layer's cost.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import mean

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

from ddtree.drafter import random_drafter
from ddtree.engine.experts import expected_experts, record_experts
from ddtree.engine.target import Target
from ddtree.tree import build_chain, build_tree

EXPERTS, PER_TOKEN, VOCAB = 128, 8, 1024
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS, BLOCK_SIZE = 16, 16
RESULTS = Path(__file__).parent / "results" / "moe_experts.jsonl"


def make_target() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_experts=EXPERTS, num_experts_per_tok=PER_TOKEN, initializer_range=0.3,
    )  # fmt: skip
    set_seed(0)
    return Qwen3MoeForCausalLM(config).eval()


@torch.inference_mode()
def main() -> None:
    target_model = make_target()
    drafter = random_drafter(target_model, block_size=BLOCK_SIZE)
    rng = random.Random(0)
    counts: dict[tuple[str, int], list[float]] = {}
    for _ in range(PROMPTS):
        prompt = torch.tensor([[rng.randrange(VOCAB) for _ in range(64)]])
        target = Target(target_model, 256, drafter.target_layer_ids)
        out = target.prefill(prompt)
        context = drafter.new_cache(1, 256)
        drafter.extend_context(context, out.features, torch.arange(64))
        root = out.logits[:, -1].argmax(-1)
        logits = drafter.draft_logits(context, root, torch.tensor([64]))
        for width in WIDTHS:
            trees = {"tree": build_tree(logits, root, width - 1)}
            if width <= BLOCK_SIZE:
                trees["chain"] = build_chain(logits[:, : width - 1], root)
            for name, tree in trees.items():
                with record_experts(target_model) as forwards:
                    target.verify(tree)
                counts.setdefault((name, width), []).append(mean(forwards[0]))
    records = [
        {
            "width": width,
            "tree": round(mean(counts["tree", width]), 2),
            "chain": round(mean(chain), 2) if (chain := counts.get(("chain", width))) else None,
            "uniform": round(expected_experts(EXPERTS, PER_TOKEN, width), 2),
            "times_decode": round(mean(counts["tree", width]) / PER_TOKEN, 2),
            "experts": EXPERTS,
            "per_token": PER_TOKEN,
            "prompts": PROMPTS,
            "weights": "random",
            "torch": torch.__version__,
        }
        for width in WIDTHS
    ]
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records))
    for record in records:
        print({key: record[key] for key in ("width", "tree", "chain", "uniform", "times_decode")})


if __name__ == "__main__":
    main()

"""What does it bring to leave out of a tree what the grammar forbids?

    python benchmarks/grammar_pruning.py

The default target answers prompts under a grammar, greedily in bfloat16, and the shipped drafter
drafts at every token of the answer. Then rounds of three kinds of trees are replayed over the same
answers, so that they differ in nothing but their nodes. Records go to
`results/grammar_pruning.jsonl`, one for each kind of grammar and budget:

* `unpruned`: tau of the drafter's best-first tree, whatever the grammar says;
* `filtered`: tau of the allowed nodes of a tree four times as large, the best `budget` of them;
* `pruned`: tau of the best-first tree under the drafter's probabilities given what is allowed,
  which is what the server builds;
* `forbidden`: share of the unpruned trees' nodes that the grammar forbids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xgrammar

from ddtree.constrained import Candidates, build_constrained_tree
from ddtree.drafter import load_drafter
from ddtree.drafter.shipped import shipped_drafter
from ddtree.engine import load_target
from ddtree.engine.default_target import prepare_default_target
from ddtree.engine.target import Target
from ddtree.tree import DraftTree, TopTokens, root_tree, top_tokens, tree_of_tokens

BUDGETS = (8, 16, 32)
OFFERED = 1024  # as in the server
NEW_TOKENS = 64
RESULTS = Path(__file__).parent / "results" / "grammar_pruning.jsonl"

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer"},
        "job": {"enum": ["farmer", "teacher", "engineer", "doctor", "none"]},
    },
    "required": ["name", "age", "job"],
}
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "country": {"type": "string"},
        "landmarks": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["city", "country", "landmarks"],
}
SCHEMAS = (PERSON, PLACE)
REGEXES = (r"(red|green|blue)(, (red|green|blue)){3}\.", r"[A-Z][a-z ]{20,60}\.")
TOPICS = (
    "a farmer in Norway", "the capital of France", "a teacher who sails", "Marie Curie",
    "the last city you visited", "your favourite colours", "a doctor in Peru", "Mount Fuji",
)  # fmt: skip


@dataclass
class Answer:
    """A constrained answer with what the drafter said at each of its tokens."""

    tokens: list[int]
    offers: list[TopTokens]  # at root tokens[i]
    grammar: xgrammar.CompiledGrammar


class Walker:
    """What the grammar allows after drafted tokens, from the end of the committed ones on."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocab: int) -> None:
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._bits = xgrammar.allocate_token_bitmask(1, vocab)

    def commit(self, tokens: list[int]) -> None:
        for token in tokens:
            assert self._matcher.accept_token(token)

    def allowed(self, path: list[int], node: int = 0) -> torch.Tensor | None:
        taken = sum(self._matcher.accept_token(token) for token in path)
        assert taken == len(path)
        bits = None
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._bits)
            bits = self._bits[0].clone()
        self._matcher.rollback(taken)
        return bits

    def allows(self, path: list[int]) -> bool:
        bits = self.allowed(path[:-1])
        return bits is not None and bool(int(bits[path[-1] // 32]) >> path[-1] % 32 & 1)


@torch.inference_mode()
def answer(target_model: Any, drafter: Any, prompt: list[int], grammar: Any) -> Answer:
    vocab = target_model.config.vocab_size
    walker, capacity = Walker(grammar, vocab), len(prompt) + NEW_TOKENS + 1
    target = Target(target_model, capacity, drafter.target_layer_ids)
    context = drafter.new_cache(1, capacity)
    out = target.prefill(torch.tensor([prompt]))
    tokens: list[int] = []
    offers, length = [], 0
    while len(tokens) < NEW_TOKENS and (bits := walker.allowed([])) is not None:
        logits = out.logits[:, -1].float()
        xgrammar.apply_token_bitmask_inplace(logits, bits[None], backend="cpu")
        root = logits.argmax(-1)
        count = out.features.shape[1]
        drafter.extend_context(context, out.features, torch.arange(length, length + count))
        length += count
        drafted = drafter.draft_logits(context, root, torch.tensor([length]))
        offers.append(top_tokens(drafted.float(), OFFERED))
        tokens.append(int(root))
        walker.commit(tokens[-1:])
        out = target.verify(root_tree(root))
        target.commit([0])
    return Answer(tokens, offers, grammar)


def unpruned(offer: TopTokens, root: int, budget: int) -> DraftTree:
    levels = min(budget, offer.costs.shape[1])
    top = TopTokens(
        offer.costs[:, :levels, :budget].contiguous(),
        offer.tokens[:, :levels, :budget].contiguous(),
        offer.totals[:, :levels],
    )
    return tree_of_tokens(top, torch.tensor([root]), budget)


def paths_of(tree: DraftTree) -> Iterator[list[int]]:
    paths: list[list[int]] = [[]]
    for node in range(1, int(tree.valid.sum())):
        paths.append([*paths[int(tree.parents[0, node])], int(tree.tokens[0, node])])
        yield paths[-1]


@dataclass
class Replay:
    """Rounds over an answer with one kind of tree."""

    kind: str
    budget: int
    rounds: int = 0
    committed: int = 0
    nodes: int = 0
    forbidden: int = 0

    def run(self, one: Answer, vocab: int) -> None:
        walker, place = Walker(one.grammar, vocab), 0
        walker.commit(one.tokens[:1])
        while place < len(one.tokens) - 1:
            paths = self._paths(one.offers[place], one.tokens[place], walker)
            ahead = one.tokens[place + 1 :]
            depth = max((len(p) for p in paths if p == ahead[: len(p)]), default=0)
            count = min(depth + 1, len(ahead))
            walker.commit(ahead[:count])
            place += count
            self.rounds += 1
            self.committed += count

    def _paths(self, offer: TopTokens, root: int, walker: Walker) -> list[list[int]]:
        if self.kind == "pruned":
            candidates = Candidates(offer.costs[0, :, None], offer.tokens[0])
            return list(
                paths_of(build_constrained_tree(candidates, root, self.budget, walker.allowed))
            )
        factor = 4 if self.kind == "filtered" else 1
        paths = list(paths_of(unpruned(offer, root, factor * self.budget)))
        kept: list[list[int]] = [[]]
        for path in paths:
            if path[:-1] in kept and walker.allows(path):
                kept.append(path)
        self.nodes += len(paths)
        self.forbidden += len(paths) - len(kept) + 1
        return kept[1:][: self.budget]


def main() -> None:
    target, tokenizer = load_target(prepare_default_target(), dtype=torch.bfloat16)
    drafter = load_drafter(shipped_drafter(), target=target)
    vocab = target.config.vocab_size
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab, stop_token_ids=[tokenizer.eos_token_id]
        )
    )
    grammars = {
        "JSON schema": [compiler.compile_json_schema(json.dumps(s)) for s in SCHEMAS],
        "regex": [compiler.compile_regex(regex) for regex in REGEXES],
    }
    records = []
    for kind, compiled in grammars.items():
        answers = []
        for topic in TOPICS:
            messages = [{"role": "user", "content": f"Tell me about {topic}."}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            prompt = tokenizer.encode(text)
            answers += [answer(target, drafter, prompt, grammar) for grammar in compiled]
        for budget in BUDGETS:
            replays = {k: Replay(k, budget) for k in ("unpruned", "filtered", "pruned")}
            for replay in replays.values():
                for one in answers:
                    replay.run(one, vocab)
            plain = replays["unpruned"]
            taus = {k: round(r.committed / r.rounds, 3) for k, r in replays.items()}
            records.append(
                {
                    "grammar": kind,
                    "budget": budget,
                    **taus,
                    "forbidden": round(plain.forbidden / plain.nodes, 3),
                    "answers": len(answers),
                    "tokens": plain.committed,
                    "target": "SmolLM2-135M-Instruct",
                    "drafter": shipped_drafter().name,
                    "torch": torch.__version__,
                    "xgrammar": version("xgrammar"),
                }
            )
            print(records[-1])
    RESULTS.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()

"""Contenders on the reference engine, for machines without SGLang: one request at a time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ddtree.bench.answers import Answer, Ledger, Visit
from ddtree.bench.client import chat_ids
from ddtree.bench.plan import BenchError, Cell, Contender, Plan
from ddtree.drafter import load_drafter
from ddtree.engine import check_request, decode, load_target
from ddtree.metrics import StageClock
from ddtree.train.prompts import Prompt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Models:
    """A target and its drafter, loaded once for all contenders."""

    def __init__(self, target: str, drafter: str | None, dtype: str, device: str) -> None:
        kind = None if dtype == "auto" else DTYPES.get(dtype)
        if kind is None and dtype != "auto":
            raise BenchError(f"dtype is {dtype!r}; it must be auto or one of {', '.join(DTYPES)}")
        self.target, self.tokenizer = load_target(target, dtype=kind, device=device)
        self.drafter = load_drafter(drafter, target=self.target) if drafter else None
        self.device = next(self.target.parameters()).device
        self.dtype = str(next(self.target.parameters()).dtype).removeprefix("torch.")
        eos = self.target.generation_config.eos_token_id
        ids = {*eos} if isinstance(eos, list) else {eos}
        self.eos = (ids | {self.tokenizer.eos_token_id}) - {None}


class ReferenceBackend:
    """One mode of the reference engine."""

    can_score = True

    def __init__(self, contender: Contender, prompts: Sequence[Prompt], models: Models) -> None:
        if contender.arguments or contender.environment:
            raise BenchError(f"{contender.label} has server settings; the engine takes none")
        self.contender = contender
        self.dtype = models.dtype
        self._prompts, self._models = prompts, models
        self._ledger = Ledger()

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def flush(self) -> None:
        """The engine keeps no prefixes."""

    def ask(self, prompts: Sequence[int], cell: Cell, plan: Plan) -> Visit:
        if cell.concurrency != 1:
            raise BenchError(
                f"the reference engine answers one request at a time; concurrency is "
                f"{cell.concurrency}, so use --concurrency 1 or servers"
            )
        start = time.perf_counter()
        answers = [self._answer(prompt, cell, plan) for prompt in prompts]
        return Visit(answers, time.perf_counter() - start)

    def _answer(self, prompt: int, cell: Cell, plan: Plan) -> Answer:
        models = self._models
        request = check_request(
            models.target, models.drafter, chat_ids(models.tokenizer, self._prompts[prompt], cell),
            mode=self.contender.mode, max_new_tokens=plan.max_new_tokens,
            budget=self.contender.budget, temperature=cell.temperature,
            seed=None if cell.greedy else prompt,
            eos_token_ids=() if plan.ignore_eos else models.eos,
        )  # fmt: skip
        clock = StageClock(models.device)
        tokens: list[int] = []
        lengths: list[int] = []
        start, first = time.perf_counter(), 0.0
        for step in decode(models.target, models.drafter, request, clock):
            tokens += step.tokens
            if step.tree is None:
                first = time.perf_counter() - start
            else:
                lengths.append(len(step.tokens))
        seconds = time.perf_counter() - start
        stages = clock.seconds()
        stages.pop("prefill")
        self._ledger.add(len(lengths), stages)
        return Answer(prompt, tokens, "", len(tokens), 1, first, seconds, dict(Counter(lengths)))

    def ledger(self) -> Ledger:
        ledger, self._ledger = self._ledger, Ledger()
        return ledger

    @torch.inference_mode()
    def regrets(self, prompt: int, tokens: list[int], cell: Cell) -> list[float]:
        ids = chat_ids(self._models.tokenizer, self._prompts[prompt], cell)
        whole = torch.tensor([ids + tokens], device=self._models.device)
        kept = len(tokens) + 1
        logits = self._models.target(whole, logits_to_keep=kept).logits[0, :-1].float()
        chosen = logits.gather(1, whole[0, len(ids) :, None])[:, 0]
        return (logits.amax(1) - chosen).tolist()

    def describe(self) -> dict[str, Any]:
        model = self._models.target
        return {"engine": "reference", "dtype": self.dtype, "target": type(model).__name__}

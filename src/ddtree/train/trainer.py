"""The training loop: one process or many, resumable after a kill at any moment."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor

from ddtree.drafter import (
    DFlashConfig,
    DFlashDraftModel,
    config_for_target,
    load_weights,
    save_drafter,
)
from ddtree.train.batch import Batch
from ddtree.train.estimate import CHAIN, DocumentTau, block_embeddings, estimate_tau
from ddtree.train.objective import LossResult, Vocabulary, block_loss, sample_vocabulary
from ddtree.train.optimise import build_optimisers, learning_rate, set_lr
from ddtree.train.producer import BatchPlan, Producer
from ddtree.train.settings import TrainSettings
from ddtree.train.sources import DocumentSource, open_source, split_validation
from ddtree.train.start import copy_target_layers, start_from_statistics

STATE_FILE = "state.pt"
BAD_BATCH_FILE = "bad-batch.pt"
# Responses read to find the most frequent tokens.
_FREQUENCY_DOCUMENTS = 2000
# Documents whose features the start is fitted to.
_FIT_DOCUMENTS = 40


class TrainingStopped(RuntimeError):
    """The loss became non-finite; the message says where the batch was saved."""


@dataclass
class StepTotals:
    """Sums over micro-batches and ranks, to be divided once."""

    values: Tensor

    @classmethod
    def empty(cls, horizon: int, device: torch.device) -> StepTotals:
        return cls(torch.zeros(2 + 3 * horizon, device=device))

    def add(self, result: LossResult) -> None:
        scalars = torch.stack((result.total.detach(), result.weight))
        self.values += torch.cat((scalars, result.hits, result.counts, result.nll))

    @property
    def loss(self) -> float:
        """Weighted mean negative log-likelihood."""
        return (self.values[0] / self.values[1].clamp(min=1e-9)).item()

    def accuracy(self) -> list[float]:
        """Share of correct argmax tokens by position after the root."""
        hits, counts, _ = self.values[2:].view(3, -1)
        return (hits / counts.clamp(min=1)).tolist()


@dataclass
class Trainer:
    """A run described by its settings.

    Args:
        settings: the run; target: the frozen transformers causal model.
        say: receives one line per event worth showing.
        tick: called after every step with the step, the last step and seconds per step.
    """

    settings: TrainSettings
    target: Any
    say: Callable[[str], None] = print
    tick: Callable[[int, int, float], None] | None = None
    step: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        s = self.settings
        set_seed(s.seed)
        self.accelerator = Accelerator(
            mixed_precision=s.mixed_precision, cpu=not torch.cuda.is_available()
        )
        if s.threads:
            torch.set_num_threads(s.threads)
        self.out = Path(s.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.config = drafter_config(s, self.target)
        self.target.to(self.accelerator.device).eval().requires_grad_(False)
        self._embedding = self.target.get_input_embeddings()
        self._head = self.target.get_output_embeddings().weight
        self._open_data()
        model = DFlashDraftModel(self.config)
        self._start(model)
        self.model, *self.optimisers = self.accelerator.prepare(model, *build_optimisers(model, s))
        self._resume()

    def _start(self, model: DFlashDraftModel) -> None:
        s = self.settings
        if s.start_from:
            load_weights(model, s.start_from)
            return
        if s.copy_layers:
            copy_target_layers(model, self.target, s.copy_layers)
        if s.fit_start:
            documents = [self.source[i] for i in self.plan.indices[:_FIT_DOCUMENTS]]
            # The first token of many models is an outlier a thousand times larger than the rest.
            features = torch.cat([d.features[1:].cpu() for d in documents])
            roots = torch.cat([d.tokens[d.prompt_length :] for d in documents])
            start_from_statistics(model, features, self._embedding.weight.cpu(), roots)

    def _open_data(self) -> None:
        s = self.settings
        self.source: DocumentSource = open_source(
            s.data, self.target, self.config.target_layer_ids, s.max_tokens
        )
        training, self.validation = split_validation(self.source, s.validation)
        self.plan = BatchPlan(
            self.source,
            training,
            s.documents,
            s.anchors,
            s.block_size,
            s.seed,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            s.max_tokens,
        )
        self._common = torch.zeros(0, dtype=torch.long)
        if s.common_tokens:
            self._common = common_tokens(self.source, training, s.common_tokens)

    def run(self) -> None:
        """Train to the last step, from wherever the output folder left off.

        Raises:
            TrainingStopped: the loss is not finite.
        """
        s = self.settings
        last = min(s.steps, s.stop_step or s.steps)
        first = self.step
        producer = Producer(self._make, first * s.accumulate, last * s.accumulate)
        batches = iter(producer)
        began, self._log = time.perf_counter(), self._tensorboard()
        window = StepTotals.empty(s.block_size - 1, self.accelerator.device)
        try:
            while self.step < last:
                window.values += self._train_step(batches).values
                self.step += 1
                if self.tick is not None:
                    rate = (time.perf_counter() - began) / (self.step - first)
                    self.tick(self.step, last, rate)
                if self.step % s.log_every == 0:
                    self._report(window, began, first, last, producer.waited)
                    window = StepTotals.empty(s.block_size - 1, self.accelerator.device)
                if s.evaluate_every and self.step % s.evaluate_every == 0:
                    self._evaluate()
                if self.step % s.save_every == 0 or self.step == last:
                    self.save()
        finally:
            producer.close()
            self._log.close()

    def _make(self, index: int) -> Batch:
        batch = self.plan.batch(index)
        return batch.pin() if self.accelerator.device.type == "cuda" else batch

    def _train_step(self, batches: Iterator[Batch]) -> StepTotals:
        s = self.settings
        set_lr(self.optimisers, learning_rate(s, self.step))
        totals = StepTotals.empty(s.block_size - 1, self.accelerator.device)
        self.model.zero_grad()
        for micro in range(s.accumulate):
            batch = next(batches)
            result = self._loss(batch, self.step * s.accumulate + micro)
            self._check_finite(result.total, batch)
            totals.add(result)
            self.accelerator.backward(result.total)
        totals.values = self.accelerator.reduce(totals.values, "sum")
        # Ranks average their gradients of sums; one division by the global weight makes the
        # step independent of how documents fall on ranks and micro-batches.
        scale = self.accelerator.num_processes / totals.values[1].clamp(min=1e-9)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= scale
        self.gradient_norm = self.accelerator.clip_grad_norm_(self.model.parameters(), s.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        return totals

    def _loss(self, batch: Batch, index: int) -> LossResult:
        s, device = self.settings, self.accelerator.device
        batch = batch.to(device, torch.float32)
        vocabulary = self._vocabulary(batch, index)
        with self.accelerator.autocast():
            embeddings = block_embeddings(self._raw(), self._embedding, batch.roots)
            hidden = self.model(batch.context, embeddings)[:, 1:]
        return block_loss(
            hidden,
            batch.labels,
            self._head,
            vocabulary=vocabulary,
            decay=s.decay,
            dpace_alpha=s.dpace_alpha,
        )

    def _vocabulary(self, batch: Batch, index: int) -> Vocabulary:
        s = self.settings
        if not s.common_tokens and not s.sampled_tokens:
            return Vocabulary()
        rank = self.accelerator.process_index
        generator = torch.Generator().manual_seed(s.seed * 104_729 + index * 64 + rank)
        common = self._common.to(batch.labels.device)
        return sample_vocabulary(batch.labels, common, s.sampled_tokens, len(self._head), generator)

    def _check_finite(self, total: Tensor, batch: Batch) -> None:
        if torch.isfinite(total):
            return
        path = self.out / BAD_BATCH_FILE
        torch.save({"step": self.step, "batch": batch}, path)
        raise TrainingStopped(
            f"the loss is {total.item()} at step {self.step}; the batch was saved to {path}"
        )

    def _report(self, window: StepTotals, began, first, last, waited) -> None:
        elapsed = time.perf_counter() - began
        rate = elapsed / (self.step - first)
        accuracy = window.accuracy()
        if not self.accelerator.is_main_process:
            return
        scalars = {
            "loss": window.loss,
            "lr": self.optimisers[0].param_groups[0]["lr"],
            "gradient_norm": float(self.gradient_norm),
            "seconds_per_step": rate,
            "waiting_share": waited / elapsed,
            **{f"accuracy/{k}": a for k, a in enumerate(accuracy, 1)},
        }
        for name, value in scalars.items():
            self._log.add_scalar(f"train/{name}", value, self.step)
        epoch = self.plan.epoch(self.step * self.settings.accumulate)
        shown = " ".join(f"{a:.2f}" for a in accuracy)
        self.say(
            f"step {self.step}/{last} epoch {epoch:.2f} loss {window.loss:.3f} accuracy {shown} "
            f"{rate:.2f} s/step waiting {waited / elapsed:.0%} "
            f"eta {rate * (last - self.step) / 60:.0f} min"
        )

    def _evaluate(self) -> None:
        if not self.accelerator.is_main_process or not self.validation:
            return
        s, model = self.settings, self._raw()
        model.eval()
        chosen = self.validation[: s.evaluate_documents]
        documents = (self.source[i] for i in chosen)
        results = estimate_tau(model, self._embedding, self._head, documents, s.budgets)
        model.train()
        taus = tau_by_source(results)
        for source, methods in taus.items():
            for method, tau in methods.items():
                self._log.add_scalar(f"tau/{source}/{method}", tau, self.step)
        with (self.out / "tau.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": self.step, "tau": taus}) + "\n")
        self.say(f"step {self.step} estimated tau {json.dumps(taus)}")
        self._export_if_best(taus["all"][CHAIN])

    def _export_if_best(self, tau: float) -> None:
        path = self.out / "best.json"
        best = json.loads(path.read_text())["tau"] if path.exists() else 0.0
        if tau > best:
            save_drafter(self._raw(), self.config, self.out / "best")
            path.write_text(json.dumps({"tau": tau, "step": self.step}))

    def save(self) -> None:
        """Write a checkpoint and the exported drafter; a kill leaves the former one whole."""
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return
        state = {
            "step": self.step,
            "model": self._raw().state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "settings": self.settings.to_dict(),
        }
        partial = self.out / (STATE_FILE + ".partial")
        torch.save(state, partial)
        os.replace(partial, self.out / STATE_FILE)
        save_drafter(self._raw(), self.config, self.out / "last")

    def _resume(self) -> None:
        path = self.out / STATE_FILE
        if not path.exists():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        self._raw().load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step = state["step"]
        self.say(f"resuming at step {self.step} from {path}")

    def _raw(self) -> DFlashDraftModel:
        return self.accelerator.unwrap_model(self.model)

    def _tensorboard(self):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.out / "logs"))


def drafter_config(settings: TrainSettings, target: Any) -> DFlashConfig:
    """The drafter a run trains."""
    choices: dict[str, Any] = {
        "num_hidden_layers": settings.num_layers,
        "block_size": settings.block_size,
        "mask_token_id": settings.mask_token_id,
    }
    if settings.target_layer_ids:
        choices["target_layer_ids"] = settings.target_layer_ids
    return config_for_target(target, **choices)


def common_tokens(source: DocumentSource, indices: Sequence[int], count: int) -> Tensor:
    """int64 most frequent response tokens, in ascending order."""
    frequency: Counter[int] = Counter()
    for index in indices[:_FREQUENCY_DOCUMENTS]:
        frequency.update(source.response(index).tolist())
    return torch.tensor(sorted(t for t, _ in frequency.most_common(count)), dtype=torch.long)


def tau_by_source(results: Sequence[DocumentTau]) -> dict[str, dict[str, float]]:
    """Committed tokens per round, by source and by method."""
    taus = {}
    for source in ["all", *sorted({r.source for r in results})]:
        chosen = [r for r in results if source in ("all", r.source)]
        committed = sum(r.committed for r in chosen)
        methods = chosen[0].rounds if chosen else {}
        taus[source] = {m: round(committed / sum(r.rounds[m] for r in chosen), 3) for m in methods}
    return taus

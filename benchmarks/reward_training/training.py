"""The Bradley-Terry loop: -log sigmoid(score of chosen - score of rejected), AdamW, cosine decay.

A checkpoint holds the trained weights, the optimizer's two moments (safetensors) and the step
(JSON); a resumed run repeats the batches, cuts and dropout of an uninterrupted one. Held-out
pairs are scored after every epoch and the epoch with the lowest held-out loss is kept.
Invariant: a checkpoint's JSON is renamed into place last and names the tensors that belong to it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from benchmarks.reward_training.backbone import RewardModel, autocast, collate, score_rows
from benchmarks.reward_training.pairs import (
    Facts,
    Pair,
    cut_pairs,
    epoch_batches,
    micro_batches,
    sequences,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the trained weights; a checkpoint is resumed under the same recipe only."""

    rank: int = 8
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    epochs: int = 2
    lr: float = 6e-4
    warmup_fraction: float = 0.05
    weight_decay: float = 0.01
    batch_pairs: int = 64
    max_length: int = 1536
    truncate_fraction: float = 0.25
    center: float = 0.01  # weight of (chosen + rejected)^2, which keeps scores around zero
    holdout: float = 0.06
    seed: int = 0


@dataclass(slots=True)
class Progress:
    step: int = 0
    best_loss: float = math.inf
    best_epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


def learning_rate(recipe: Recipe, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    warmup = max(1, round(recipe.warmup_fraction * num_steps))
    if step < warmup:
        return recipe.lr * (step + 1) / warmup
    share = (step - warmup) / max(1, num_steps - warmup)
    return recipe.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


class Trainer:
    def __init__(
        self,
        model: RewardModel,
        facts: Facts,
        recipe: Recipe,
        folder: Path,
        max_tokens: int,
        checkpoint_steps: int = 100,
    ) -> None:
        self.model, self.facts, self.recipe = model, facts, recipe
        self.folder = folder / "checkpoint"
        self.max_tokens, self.checkpoint_steps = max_tokens, checkpoint_steps
        self.device = model.classifier.score.weight.device
        self.optimizer = torch.optim.AdamW(
            model.trained().values(),
            lr=recipe.lr,
            betas=(0.9, 0.99),
            weight_decay=recipe.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.progress = Progress()

    def fit(
        self, pairs: Sequence[Pair], held_out: Sequence[Pair], stop_step: int | None = None
    ) -> Progress:
        """Trains to the end, or to `stop_step`; leaves the best epoch's weights in the model."""
        self.resume()
        recipe, progress = self.recipe, self.progress
        per_epoch = -(-len(pairs) // recipe.batch_pairs)
        num_steps = per_epoch * recipe.epochs
        if progress.step == 0 and held_out:
            self._report(held_out, epoch=0, train_loss=math.log(2))
        clock = Meter(num_steps, progress.step)
        for epoch in range(progress.step // per_epoch, recipe.epochs):
            cut = cut_pairs(pairs, recipe.truncate_fraction, recipe.seed, epoch)
            batches = epoch_batches(cut, recipe.batch_pairs, recipe.seed, epoch)
            losses = []
            for batch in batches[progress.step - epoch * per_epoch :]:
                if progress.step == stop_step:
                    self.save()
                    return progress
                lr = learning_rate(recipe, progress.step, num_steps)
                losses.append(self._step([cut[i] for i in batch], lr, clock))
                progress.step += 1
                clock.tell(progress.step, losses)
                if progress.step % self.checkpoint_steps == 0:
                    self.save()
            if losses:
                self._end_epoch(held_out, epoch + 1, losses)
        self._load_weights(self.folder / "best.safetensors")
        return progress

    def _step(self, batch: Sequence[Pair], lr: float, clock: Meter) -> torch.Tensor:
        """One update; returns [loss, accuracy] on the device, so that no step waits for the GPU."""
        self.model.train()
        torch.manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)  # dropout
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        rows = sequences(batch, self.facts)
        totals = torch.zeros(2, device=self.device)
        for chosen in micro_batches([len(row) for row in rows], self.max_tokens, unit=2):
            ids, last = collate([rows[i] for i in chosen], self.facts.pad_id, self.device)
            clock.num_tokens += sum(len(rows[i]) for i in chosen)
            with autocast(self.device):
                scores = self.model(ids, last)
            better, worse = scores[0::2], scores[1::2]
            loss = functional.softplus(worse - better)
            centred = self.recipe.center * (better + worse).square()
            ((loss + centred).sum() / len(batch)).backward()
            with torch.no_grad():
                totals += torch.stack((loss.sum(), (better > worse).float().sum())) / len(batch)
        torch.nn.utils.clip_grad_norm_(self.model.trained().values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return totals

    def _end_epoch(self, held_out: Sequence[Pair], epoch: int, losses: list[torch.Tensor]) -> None:
        train_loss = float(torch.stack(losses)[:, 0].mean())
        loss = self._report(held_out, epoch, train_loss) if held_out else -float(epoch)
        if loss < self.progress.best_loss:
            self.progress.best_loss, self.progress.best_epoch = loss, epoch
            self._write(self.folder / "best.safetensors", self._weights())
        self.save()

    def _report(self, held_out: Sequence[Pair], epoch: int, train_loss: float) -> float:
        scores = score_pairs(self.model, held_out, self.facts, self.max_tokens)
        margins = scores[:, 0] - scores[:, 1]
        loss = float(np.mean(np.logaddexp(0, -margins)))
        accuracy = float(np.mean((margins > 0) + 0.5 * (margins == 0)))
        line = {
            "epoch": epoch,
            "train_loss": train_loss,
            "held_out_loss": loss,
            "held_out_accuracy": accuracy,
        }
        self.progress.history.append(line)
        logger.info("%s", json.dumps(line))
        return loss

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in self.model.trained().items()}

    def _load_weights(self, path: Path) -> None:
        loaded = load_file(path)
        weights = self.model.trained()
        if loaded.keys() != weights.keys():
            raise ValueError(f"{path} holds other weights than this recipe trains")
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(loaded[name])

    def save(self) -> None:
        """Writes the tensors under a new name, then the JSON that names them."""
        tensors = {f"weight.{name}": value for name, value in self._weights().items()}
        for name, weight in self.model.trained().items():
            for moment in ("exp_avg", "exp_avg_sq"):
                if weight in self.optimizer.state:
                    tensors[f"{moment}.{name}"] = self.optimizer.state[weight][moment]
        name = f"step_{self.progress.step:07d}.safetensors"
        self._write(self.folder / name, tensors)
        state = {"recipe": asdict(self.recipe), "tensors": name, **asdict(self.progress)}
        if not math.isfinite(state["best_loss"]):
            state["best_loss"] = None
        partial = self.folder / "state.json.part"
        partial.write_text(json.dumps(state, indent=1))
        os.replace(partial, self.folder / "state.json")
        for old in self.folder.glob("step_*.safetensors"):
            if old.name != name:
                old.unlink()

    def resume(self) -> None:
        """Takes up the checkpoint, if there is one; refuses one of another recipe."""
        path = self.folder / "state.json"
        if not path.exists():
            return
        state = json.loads(path.read_text())
        mine, theirs = asdict(self.recipe), state["recipe"]
        differing = [f"{k}: {theirs.get(k)} -> {v}" for k, v in mine.items() if theirs.get(k) != v]
        if differing:
            raise ValueError(
                f"{self.folder} was trained with other settings ({', '.join(differing)}); give the "
                "same ones to go on, or another --out"
            )
        best = math.inf if state["best_loss"] is None else state["best_loss"]
        self.progress = Progress(state["step"], best, state["best_epoch"], state["history"])
        tensors = load_file(self.folder / state["tensors"])
        with torch.no_grad():
            for name, weight in self.model.trained().items():
                weight.copy_(tensors[f"weight.{name}"])
                if f"exp_avg.{name}" in tensors:
                    self.optimizer.state[weight] = {
                        "step": torch.tensor(float(state["step"]), device=self._step_device()),
                        "exp_avg": tensors[f"exp_avg.{name}"].to(weight.device),
                        "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(weight.device),
                    }
        logger.info("resumed at step %d", self.progress.step)

    def _step_device(self) -> torch.device:
        """Where AdamW keeps its step count: on the GPU when fused."""
        return self.device if self.device.type == "cuda" else torch.device("cpu")

    def _write(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        save_file({name: value.contiguous().cpu() for name, value in tensors.items()}, partial)
        os.replace(partial, path)


class Meter:
    """Says every ten seconds where the run is."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        self.num_steps, self.first_step = num_steps, first_step
        self.begin = self.told = time.monotonic()
        self.num_tokens = 0

    def tell(self, step: int, losses: list[torch.Tensor]) -> None:
        now = time.monotonic()
        if now - self.told < 10 and step != self.num_steps:
            return
        self.told = now
        loss, accuracy = torch.stack(losses[-20:]).mean(dim=0).tolist()
        elapsed = time.monotonic() - self.begin
        left = elapsed / (step - self.first_step) * (self.num_steps - step)
        logger.info(
            "step %d/%d  loss %.4f  accuracy %.3f  %.0f tokens/s  %.0f s left",
            step,
            self.num_steps,
            loss,
            accuracy,
            self.num_tokens / elapsed,
            left,
        )


def score_pairs(
    model: RewardModel,
    pairs: Sequence[Pair],
    facts: Facts,
    max_tokens: int,
    bfloat16: bool = True,
) -> np.ndarray:
    """[pairs, 2]: chosen, rejected."""
    rows = sequences(pairs, facts)
    return score_rows(model, rows, facts.pad_id, 2 * max_tokens, bfloat16).reshape(-1, 2)

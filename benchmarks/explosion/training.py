"""Training one recipe under one arithmetic, seed after seed: the same data, weights and optimizer for all.

On a GPU forward and backward are one CUDA graph and the optimizer's step another. Every `every` steps a probe measures
the spectral norms of W_Q and W_K, the largest logit of every head and how wrong the gradient of W_Q is, against FP32
attention at the same weights and data; and it asks the monitor for the bias of delta since the probe before. A run is
saved at every fourth probe and goes on from there, bit for bit.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from arithmetics import ARITHMETICS, float32
from network import Network, initialise
from recipes import Recipe, batch, places
from torch import Tensor

import precisionpass

SAVED_EVERY = 4  # probes


class Trainer:
    """One compiled network and its optimizer, used for every seed: `run` starts from that seed's weights."""

    def __init__(self, recipe: Recipe, arithmetic: str, corpus: Tensor, backend: str = "inductor"):
        self.recipe, self.name, self.corpus = recipe, arithmetic, corpus
        self.how = ARITHMETICS[arithmetic]
        self.network = Network(recipe, self.how.attend).to(corpus.device)
        self.trained = self.network.query_key() if recipe.trained == "query_key" else list(self.network.parameters())
        for parameter in self.network.parameters():
            parameter.requires_grad_(any(parameter is one for one in self.trained))
        self.oracle = Network(recipe, float32).to(corpus.device)
        self.oracle.load_state_dict(self.network.state_dict())
        for mine, other in zip(self.network.modules(), self.oracle.modules(), strict=True):
            for name in mine._parameters:  # one set of weights
                setattr(other, name, getattr(mine, name))
        self.rate = torch.zeros((), device=corpus.device)
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=self.rate, betas=recipe.betas, eps=recipe.eps, weight_decay=0.0,
            capturable=corpus.is_cuda, foreach=corpus.is_cuda,
        )  # fmt: skip
        initialise(self.network, 0)
        self.begin = places(recipe, len(corpus), 0)[0].to(corpus.device)
        self.loss = torch.zeros((), device=corpus.device)
        self.monitor = None
        self.gradients, self.update = self._steps(self.how.compiled(self.network, backend))
        if self.how.watched:
            self.monitor = precisionpass.monitor(self.network)
            self.monitor.reset()
            self.unwatched = self.monitor.state_dict()

    def _steps(self, compiled) -> tuple[Any, Any]:
        def gradients() -> None:
            with self.how.within():
                loss = compiled(*batch(self.recipe, self.corpus, self.begin))
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            loss.backward()
            self.loss.copy_(loss.detach())

        held = int(self.recipe.heads * self.recipe.sink_heads) * (self.recipe.width // self.recipe.heads)

        def update() -> None:
            if self.recipe.trained == "others":
                for weight in self.network.query_key():
                    weight.grad[:held].zero_()
            if self.recipe.clip:
                torch.nn.utils.clip_grad_norm_(self.trained, self.recipe.clip)
            self.optimizer.step()

        if not self.corpus.is_cuda or not self.how.graphs:
            gradients()
            update()  # the optimizer's state exists from here on
            return gradients, update
        return captured(gradients), captured(update)

    def run(self, seed: int, folder: Path, every: int = 50, start: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Train one seed, or go on with it; the record, which `folder` then holds as well.

        start: weights to begin with instead of the seed's; the seed then only orders the data.
        """
        saved = folder / f"{self.name}-{seed}.pt"
        starts = places(self.recipe, len(self.corpus), seed).to(self.corpus.device)
        record: dict[str, Any] = {
            "arithmetic": self.name, "seed": seed, "step": [], "loss": [], "query_norm": [], "key_norm": [],
            "max_logit": [], "query_error": [],
        }  # fmt: skip
        if self.monitor is not None:
            record |= {"delta_bias": [], "delta_bias_t": [], "alarms": []}
            self.monitor.load_state_dict(self.unwatched)
        losses = torch.zeros(self.recipe.steps, device=self.corpus.device)
        initialise(self.network, seed)
        if start is not None:
            self.network.load_state_dict(start)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        first = 0
        if saved.exists():
            record, first = self._restore(saved, losses)
        for step in range(first, self.recipe.steps):
            self.begin.copy_(starts[step])
            self.rate.fill_(self.recipe.rate * min(1.0, (step + 1) / (self.recipe.warm_up + 1)))
            self.gradients()
            losses[step] = self.loss
            done = step + 1
            if done % every == 0 or done == self.recipe.steps:
                self._probe(record, done, losses[record["step"][-1] if record["step"] else 0 : done])
            self.update()
            if len(record["step"]) % SAVED_EVERY == 0 and record["step"] and record["step"][-1] == done:
                self._save(saved, record, done, losses)
            if not math.isfinite(record["loss"][-1] if record["loss"] else 0.0):
                break
        self._save(saved, record, self.recipe.steps, losses)
        return record

    def _probe(self, record: dict[str, Any], step: int, losses: Tensor) -> None:
        """Before the update of `step`: what .grad holds belongs to the weights at hand."""
        query_key = self.network.query_key()
        norms = torch.linalg.svdvals(torch.stack([w.detach() for w in query_key])).amax(-1)
        queries = query_key[: self.recipe.layers]
        tokens, targets = batch(self.recipe, self.corpus, self.begin)
        largest: list[Tensor] = []
        watches = [
            block.attention.register_forward_pre_hook(lambda layer, inputs: largest.append(max_logits(layer, *inputs)))
            for block in self.oracle.blocks
        ]
        exact = torch.autograd.grad(self.oracle(tokens, targets), queries)
        for watch in watches:
            watch.remove()
        error = [
            _by_head(weight.grad - right, self.recipe).norm(dim=1) / _by_head(right, self.recipe).norm(dim=1)
            for weight, right in zip(queries, exact, strict=True)
        ]
        record["step"].append(step)
        record["loss"].append(losses.mean().item())
        record["query_norm"].append(norms[: self.recipe.layers].tolist())
        record["key_norm"].append(norms[self.recipe.layers :].tolist())
        record["max_logit"].append(torch.stack(largest).tolist())
        record["query_error"].append(torch.stack(error).tolist())
        if self.monitor is not None:
            sites = self.monitor.read().values()
            worst = max(sites, key=lambda figures: abs(figures["delta_bias_t"]))
            record["delta_bias"].append(worst["delta_bias"])
            record["delta_bias_t"].append(worst["delta_bias_t"])
            record["alarms"].append(len(self.monitor.alarms()))
            record["events"] = [f"{event.step} {event.site}: {event.message}" for event in self.monitor.events]
            self.monitor.reset()

    def _save(self, path: Path, record: dict[str, Any], done: int, losses: Tensor) -> None:
        content = {
            "recipe": asdict(self.recipe), "record": record, "done": done, "losses": losses, "optimizer": self._state(),
            "weights": self.network.state_dict(), "monitor": self.monitor and self.monitor.state_dict(),
        }  # fmt: skip
        part = path.with_suffix(".part")
        torch.save(content, part)
        os.replace(part, path)

    def _restore(self, path: Path, losses: Tensor) -> tuple[dict[str, Any], int]:
        content = torch.load(path, map_location=self.corpus.device, weights_only=True)
        if content["recipe"] != asdict(self.recipe):
            raise ValueError(f"{path} is a run of another recipe; name another folder with --out")
        with torch.no_grad():
            for name, value in self.network.state_dict().items():
                value.copy_(content["weights"][name])
            for mine, saved in zip(self._state(), content["optimizer"], strict=True):
                mine.copy_(saved)
            losses.copy_(content["losses"])
        if self.monitor is not None:
            self.monitor.load_state_dict(content["monitor"])
        return content["record"], content["done"]

    def _state(self) -> list[Tensor]:
        return [value for one in self.trained for value in self.optimizer.state[one].values()]


def _by_head(weight: Tensor, recipe: Recipe) -> Tensor:
    return weight.detach().reshape(recipe.heads, -1)


@torch.no_grad()
def max_logits(layer, x: Tensor) -> Tensor:
    """The largest causal score of every head, [H] FP32."""
    q, k = layer.split(layer.query(x)).float(), layer.split(layer.key(x)).float()
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return scores.masked_fill(later, -torch.inf).amax((0, 2, 3))


def captured(function) -> Any:
    """The replay of a CUDA graph of `function`, which is run a few times first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay

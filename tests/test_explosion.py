"""benchmarks/explosion: the recipes start as they say, and a run that was cut off goes on bit for bit."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks" / "explosion"
NAMES = ("arithmetics", "drawing", "network", "plots", "pretraining", "recipes", "summary", "training")


@pytest.fixture(scope="module")
def explosion():
    """The benchmark's modules, which are scripts beside each other, by name."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: __import__(name) for name in NAMES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture
def tiny(explosion):
    return replace(explosion["recipes"].RECIPES["scratch-small"], steps=12, length=16, sequences=2, width=32, pads=3)


@pytest.fixture
def corpus(explosion):
    return explosion["recipes"].text(50_000)


def test_every_sequence_begins_with_pads_and_predicts_the_text(explosion, tiny, corpus):
    recipes = explosion["recipes"]
    tokens, targets = recipes.batch(tiny, corpus, recipes.places(tiny, len(corpus), 0)[0])
    assert tokens.shape == targets.shape == (2, 16)
    assert (tokens[:, :3] == recipes.PAD).all() and (tokens[:, 3:] < recipes.PAD).all()
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    start = int(recipes.places(tiny, len(corpus), 0)[0, 0])
    assert torch.equal(targets[0, 2:], corpus[start : start + 14])


def test_the_sinks_stand_as_far_above_as_the_recipe_says(explosion, corpus):
    recipe = explosion["recipes"].RECIPES["scratch-small"]
    network = explosion["network"].Network(recipe, explosion["arithmetics"].float32)
    explosion["network"].initialise(network, 0)
    seen = []
    for block in network.blocks:
        block.attention.register_forward_pre_hook(
            lambda layer, given: seen.append(explosion["training"].max_logits(layer, *given))
        )
    begin = explosion["recipes"].places(recipe, len(corpus), 0)[0]
    network(*explosion["recipes"].batch(recipe, corpus, begin))
    assert 0.7 * recipe.gap < torch.stack(seen)[0].min() and torch.stack(seen).max() < 2 * recipe.gap


@pytest.mark.parametrize("name", ["ours", "ours-escalating", "flash", "all-bf16"])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(explosion, tiny, corpus, tmp_path, monkeypatch, name):
    Trainer = explosion["training"].Trainer
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    trainer = Trainer(tiny, name, corpus, "aot_eager")
    expected = trainer.run(1, whole, every=2)
    weights = {key: value.clone() for key, value in trainer.network.state_dict().items()}
    assert len(expected["step"]) == 6 and expected["loss"][-1] < 5

    probe = Trainer._probe

    def cut(self, record, step, losses):
        if step == 10:  # the probe at 8 is the fourth: saved
            raise KeyboardInterrupt
        probe(self, record, step, losses)

    monkeypatch.setattr(Trainer, "_probe", cut)
    with pytest.raises(KeyboardInterrupt):
        trainer.run(1, parts, every=2)
    monkeypatch.setattr(Trainer, "_probe", probe)
    trainer.run(0, tmp_path, every=6)  # something else in between
    assert trainer.run(1, parts, every=2) == expected
    assert all(torch.equal(value, trainer.network.state_dict()[key]) for key, value in weights.items())
    with pytest.raises(ValueError, match="another recipe"):
        Trainer(replace(tiny, gap=17.0), name, corpus, "aot_eager").run(1, parts)


def test_a_row_says_when_a_run_left_fp32_and_when_the_alarm_came(explosion):
    def run(norms, alarms):
        return {
            "seed": 0, "step": [10, 20, 30], "query_norm": [[1.0, norm] for norm in norms], "key_norm": [[1.0]] * 3,
            "max_logit": [[[5.0]], [[90.0]], [[70.0]]], "loss": [3.0, 2.0, 1.5], "alarms": alarms,
        }  # fmt: skip

    records = {"float32": [run([2, 2, 2], [0, 0, 0])], "flash": [run([2, 3.5, 7], [1, 0, 2])]}
    exact, flash = explosion["summary"].rows(records)
    assert exact["onset_1.5"] is exact["onset_3"] is exact["alarm"] is None
    assert (flash["onset_1.5"], flash["onset_3"], flash["alarm"]) == (20, 30, 10)
    assert (flash["max_logit"], flash["peak_logit"], flash["loss_difference"]) == (70.0, 90.0, 0.0)
    assert "1 of 1" in explosion["summary"].table([exact, flash])
    assert explosion["drawing"].curves(records).startswith("<svg")

"""Compiled artifacts are reused exactly when rules and op sources are the same: two processes, one cache folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from precisionpass import cache

ROOT = Path(__file__).parents[1]

# One training step under Inductor; prints the gradient and what the caches counted.
CHILD = """
import json, sys, torch, precisionpass
from torch._dynamo.utils import counters

def attend(q, k, v):
    return (q @ k.mT / 8**0.5).softmax(-1) @ v

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 8, 8).to(torch.bfloat16).requires_grad_() for _ in range(3))
(precisionpass.compile(attend, rules=sys.argv[1])(q, k, v).float() * torch.randn(1, 2, 8, 8)).sum().backward()
counted = {**counters["inductor"], **counters["aot_autograd"]}
print(json.dumps({
    "package": precisionpass.__file__, "gradient": q.grad.double().sum().item(),
    "fx hit": counted.get("fxgraph_cache_hit", 0), "fx miss": counted.get("fxgraph_cache_miss", 0),
    "aot hit": counted.get("autograd_cache_hit", 0), "aot miss": counted.get("autograd_cache_miss", 0),
}))
"""
RULES = "version: 1\nrules:\n- {id: a, match: {op: attention}, apply: {delta: DELTA}}\n"


class Processes:
    """Runs CHILD in fresh processes that share one cache folder and one copy of the package."""

    def __init__(self, folder: Path):
        self.folder, self.package = folder, folder / "source" / "precisionpass"
        shutil.copytree(ROOT / "precisionpass", self.package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "rules", folder / "source" / "rules")

    def run(self, delta: str = "residual") -> dict:
        rules = self.folder / "rules.yaml"
        rules.write_text(RULES.replace("DELTA", delta))
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            "PYTHONPATH": str(self.package.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        ran = subprocess.run(
            [sys.executable, "-c", CHILD, str(rules)], env=environment, cwd=self.folder, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        told = json.loads(ran.stdout.splitlines()[-1])
        assert Path(told["package"]).is_relative_to(self.package)
        return told

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.package / file
        text = path.read_text()
        assert text.count(old) >= 1, f"{file} no longer has {old!r}"
        path.write_text(text.replace(old, new))


def fresh(told: dict) -> bool:
    return told["fx hit"] == told["aot hit"] == 0 and told["fx miss"] + told["aot miss"] > 0


def test_two_processes(tmp_path):
    """Unchanged: a hit. A changed rule, then a changed backward: never the old artifact."""
    processes = Processes(tmp_path)
    first = processes.run()
    assert fresh(first)
    again = processes.run()
    assert again["aot hit"] == 1 and again["aot miss"] == again["fx miss"] == 0, again
    assert again["gradient"] == first["gradient"]
    other_rule = processes.run(delta="output")
    assert fresh(other_rule)
    # a backward whose gradients are doubled: only the source of the op's autograd formula says so
    processes.edit("ops/attention.py", "found = [gradient if needed", "found = [2 * gradient if needed")
    changed = processes.run()
    assert fresh(changed)
    assert changed["gradient"] == pytest.approx(2 * first["gradient"], rel=1e-2)


def test_the_key_names_everything_that_decides_results(monkeypatch):
    before = cache.key("rules")
    assert cache.key("rules") == before
    assert cache.key("other rules") != before
    monkeypatch.setattr(cache, "source_digest", lambda: "other sources")
    assert cache.key("rules") != before
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "3.0")
    assert cache.key("rules") != before


def test_the_digest_covers_every_source_file(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "precisionpass", tmp_path / "p", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cache, "files", lambda package: tmp_path / "p")
    digests = []
    for file in ("reference/attention.py", "kernels/attention_backward.py", "ops/rms_norm.py", "sites/norms.py"):
        (tmp_path / "p" / file).open("a").write("\n# changed\n")
        digests.append(cache.source_digest.__wrapped__())
    (tmp_path / "p" / "new.py").write_text("")
    digests.append(cache.source_digest.__wrapped__())
    assert len({cache.source_digest(), *digests}) == 6


def test_a_users_own_pass_still_runs_and_joins_the_key():
    from torch._inductor.custom_graph_pass import CustomGraphPass

    import precisionpass

    class Own(CustomGraphPass):
        ran = 0

        def __call__(self, graph):
            Own.ran += 1

        def uuid(self):
            return "own"

    identity = cache.IdentityPass("digest", Own())
    assert identity.uuid() == ("digest", "own")
    assert cache.IdentityPass("digest").uuid() == ("digest", None)
    torch._dynamo.reset()

    def call(q):
        return (q @ q.mT).softmax(-1) @ q

    with torch._inductor.config.patch(force_disable_caches=True):
        precisionpass.compile(call, options={cache.PASS_OPTION: Own()})(torch.randn(2, 3, 5, 8))
    assert Own.ran >= 1

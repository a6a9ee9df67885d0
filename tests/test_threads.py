"""Threads that compile, run and explain at once do not disturb one another and never wait for ever."""

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Each worker compiles, trains and explains its own model in turns; then everything is compared with one thread's.
WORKERS = """
import copy, threading, torch, precisionpass
from tests.agreement import counts, step
from tests.small_models import Stack

def work(number, rounds=2):
    told = []
    for turn in range(rounds):
        model = models[number]
        x = inputs[number]
        if (turn + number) % 2:
            told.append(precisionpass.explain(model, (x,), training=bool(turn % 2)).to_json())
        compiled = precisionpass.compile(copy.deepcopy(model), rules=rules[number], backend="aot_eager", dynamic=False)
        done = compiled(x)
        done.square().sum().backward()
        report = precisionpass.report(compiled)
        told += [done.detach().clone(), counts(report), report.to_json()]
        told += [p.grad.clone() for p in compiled.parameters()] + [torch.is_grad_enabled(), model.training]
    results[number] = told

def collect(threads):
    global results
    torch._dynamo.reset()
    results = {}
    if threads:
        running = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        [t.start() for t in running]
        [t.join() for t in running]
    else:
        [work(number) for number in range(count)]
    return results

count = 2
torch.manual_seed(0)
models = [Stack(1) for _ in range(count)]
inputs = [torch.randn(2, 8, 32) for _ in range(count)]
rules = ["stable-bf16", "watch", "stable-bf16"]
alone, together = collect(False), collect(True)
assert alone.keys() == together.keys() == {0, 1}, together.keys()
for number in range(count):
    for one, other in zip(alone[number], together[number], strict=True):
        same = torch.allclose(one, other, rtol=1e-5) if isinstance(one, torch.Tensor) else one == other
        assert same, (number, one, other)
print("same")
"""

# One thread explains while the other compiles: each needs torch's compile lock and ours.
TURNS = """
import threading, torch, precisionpass
from tests.small_models import Stack

x = torch.randn(2, 5, 32)
def explain():
    for _ in range(6):
        precisionpass.explain(Stack(1), (x,))
def compile():
    for _ in range(6):
        precisionpass.compile(Stack(1), backend="eager")(x)
running = [threading.Thread(target=explain), threading.Thread(target=compile)]
[t.start() for t in running]
[t.join() for t in running]
print("same")
"""


def run(script: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=ROOT,
        timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.splitlines()[-1]


def test_threads_that_compile_and_explain_at_once():
    assert run(WORKERS) == "same"


def test_explaining_and_compiling_never_deadlock():
    assert run(TURNS) == "same"

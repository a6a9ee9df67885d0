"""The review in torch's logs and traces. This is the test to read first when a new torch moves `trace_structured`."""

import itertools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import torch

import precisionpass
from precisionpass.review import trace
from tests.small_models import Stack

ROOT = Path(__file__).parents[2]
CODE = """
import torch, precisionpass
from tests.small_models import Stack
model = precisionpass.compile(Stack(1), backend="eager")
model(torch.randn(2, 6, 32))
"""


def run(**environment: str) -> subprocess.CompletedProcess:
    ran = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def test_torch_still_has_what_is_used():
    from torch._logging import trace_structured

    assert trace.trace_structured is trace_structured
    trace_structured("artifact", metadata_fn=lambda: {"name": "x", "encoding": "string"}, payload_fn=lambda: "y")


def test_traces_and_logs_hold_the_review_of_each_graph(tmp_path):
    """What tlparse reads: one line of JSON for each artefact, with the compilation it belongs to."""
    told = run(TORCH_TRACE=str(tmp_path), TORCH_LOGS="+precisionpass").stderr
    assert "graph 0: 1 attention site rewritten" in told and "attention x 1" in told
    (log,) = tmp_path.iterdir()
    lines, found = log.read_text().splitlines(), {}
    for position, line in enumerate(lines):
        if '"artifact": {"name": "precisionpass' in line:
            head = json.loads(line[line.index("{") :])
            body = itertools.takewhile(lambda follows: follows.startswith("\t"), lines[position + 1 :])
            found[head["artifact"]["name"]] = (head, "\n".join(follows[1:] for follows in body))
    assert list(found) == ["precisionpass_review", "precisionpass_graph_0.diff"]
    head, text = found["precisionpass_review"]
    assert (head["frame_id"], head["frame_compile_id"], head["artifact"]["encoding"]) == (0, 0, "string")
    assert text.startswith("1 attention site rewritten, 1 layer_norm site kept")
    assert "= torch.ops.precisionpass.attention" in found["precisionpass_graph_0.diff"][1]


def test_the_log_without_a_sign_is_one_line():
    told = run(TORCH_LOGS="precisionpass").stderr
    assert "graph 0: 1 attention site rewritten" in told and "attention x 1" not in told


def test_the_log_says_one_line_a_graph(caplog):
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "precisionpass"):
        precisionpass.explain(Stack(1), (torch.randn(2, 6, 32),))
    assert [record.message for record in caplog.records] == [
        "graph 0: 1 attention site rewritten, 1 layer_norm site kept (already satisfied)."
    ]

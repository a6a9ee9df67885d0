import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from precisionpass import PrecisionPassError
from precisionpass.review.files import safe_name
from tests.review import gpt2

FIXED = ["index.html", "report.json", "sites.jsonl", "summary.txt", "why_not.txt"]
GRAPHS = ["graph_0.after.py", "graph_0.before.py", "graph_0.diff"]


def held(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_a_review_has_its_files(tmp_path):
    gpt2.report().save(tmp_path / "new" / "review")
    files = held(tmp_path / "new" / "review")
    assert sorted(files) == sorted(FIXED + GRAPHS)
    assert files["summary.txt"].decode() == gpt2.report().text()
    assert files["report.json"].decode() == gpt2.report().to_json()
    assert files["graph_0.diff"] == b"-before\n+after\n"
    rows = [json.loads(line) for line in files["sites.jsonl"].splitlines()]
    assert [row["module"] for row in rows] == [site.module for site in gpt2.report().sites]


def test_running_twice_gives_the_same_bytes_whatever_the_hash_order(tmp_path):
    code = "import sys; from tests.review import gpt2; gpt2.report().save(sys.argv[1])"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / seed)], env=environment, check=True)
    assert held(tmp_path / "1") == held(tmp_path / "2")


def test_graph_files_of_an_older_review_go_and_a_persons_files_stay(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "graph_paper.py").write_text("mine")
    replace(gpt2.report(), artifacts={"graph_0.diff": "", "graph_7.1.before.py": ""}).save(tmp_path)
    gpt2.report().save(tmp_path)
    assert sorted(held(tmp_path)) == sorted([*FIXED, *GRAPHS, "notes.md", "graph_paper.py"])


def test_a_full_disk_leaves_the_older_review_as_it_was(tmp_path):
    """The limit on a file's size stands in for the full disk: the kernel refuses the write halfway."""
    gpt2.report(layers=1).save(tmp_path)
    before = held(tmp_path)
    code = (
        "import resource, sys; from tests.review import gpt2;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); gpt2.report().save(sys.argv[1])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert "PP301 the review could not be written" in ran.stderr
    assert "why: File too large" in ran.stderr
    assert held(tmp_path) == before


@pytest.mark.parametrize(
    ("folder", "why"), [("taken", "File exists"), ("taken/below", "Not a directory"), ("a\0b", "null")]
)
def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path, folder, why):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(PrecisionPassError) as caught:
        gpt2.report().save(tmp_path / folder)
    message = str(caught.value)
    assert message.splitlines()[0] == "PP301 the review could not be written"
    assert why in message
    assert 'fix: name a folder, for example review="review/", that can be written and has room' in message
    assert held(tmp_path) == {"taken": b"a file"}


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/b.py", ".hidden", "x" * 500, "", "summary.txt", "a\nb", "é", "--rf"]
)
def test_hostile_artifact_names_become_plain_ones(tmp_path, name):
    replace(gpt2.report(), artifacts={name: "text \ud800"}).save(tmp_path / "review")
    (added,) = set(held(tmp_path / "review")) - set(FIXED)
    assert added.isascii() and len(added) <= 120 and added[0] not in ".-"
    assert (tmp_path / "review" / added).read_bytes() == b"text \\ud800"
    assert held(tmp_path / "review")["summary.txt"].decode() == gpt2.report().text()


def test_different_names_stay_different():
    names = ["a/b.before.py", "a_b.before.py", "a\\b.before.py", "x" * 200, "x" * 201]
    assert len({safe_name(name) for name in names}) == len(names)
    assert safe_name("graph_0.before.py") == "graph_0.before.py"
    assert safe_name("a/b.before.py").endswith(".before.py")

"""The generated module of a score expression: where it is kept, what its name covers, and that no other text is run."""

import pytest
import torch

pytest.importorskip("triton")

import triton

from precisionpass.kernels import score_code
from precisionpass.kernels.score_code import module_source, score_function

BY_HEAD, BY_BOTH = torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 5, 5)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Triton's cache in a folder of the test's own."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    score_code._load.cache_clear()
    yield tmp_path / "precisionpass"
    score_code._load.cache_clear()


def test_one_file_is_written_and_loaded_once(folder):
    function = score_function("s * t0", (BY_HEAD,))
    assert function is score_function("s * t0", (BY_HEAD,))
    (file,) = folder.glob("*.py")
    assert file.stem == function.fn.__name__ and "Score: (s * t0)" in file.read_text()


def test_the_name_covers_the_expression_and_how_its_inputs_vary():
    boolean = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    kinds = [("s * t0", BY_HEAD), ("s + t0", BY_HEAD), ("s * t0", BY_BOTH), ("s * t0", boolean)]
    names = {score_function(text, (tensor,)).fn.__name__ for text, tensor in kinds}
    assert len(names) == 4
    assert score_function("s  *  t0", (BY_HEAD,)).fn.__name__ in names, "spaces mean nothing"


def test_the_name_covers_what_the_function_calls(monkeypatch):
    before = module_source("s * t0", ((True, True, False),))[1]
    monkeypatch.setattr(score_code, "_imported", lambda: b"another load_input")
    assert module_source("s * t0", ((True, True, False),))[1] != before


def test_a_file_with_another_text_is_written_anew_and_not_run(folder):
    source, name = module_source("s * 2", ())
    folder.mkdir()
    (folder / f"{name}.py").write_text("raise RuntimeError('this ran')")
    assert score_function("s * 2", ()).fn.__name__ == name
    assert (folder / f"{name}.py").read_text() == source
    assert [file.suffix for file in folder.iterdir() if file.is_file()] == [".py"]


def test_what_the_expression_does_not_read_is_not_loaded():
    assert "numbers.score_inputs[1]" in module_source("s + t1", ((True, True, False),) * 3)[0]
    assert "score_inputs[0]" not in module_source("s + t1", ((True, True, False),) * 3)[0]

"""FILE.py:FACTORY: what it may give, and one screen for everything that can be wrong with it."""

import json
import sys
from pathlib import Path

import pytest

from precisionpass.errors import PrecisionPassError
from precisionpass.rules.codes import CODES
from precisionpass.target import load_model, split_target

MODELS = """
class Model:
    def named_modules(self):
        return []

def plain():
    return Model()

def with_args():
    return Model(), (1, 2)

def with_kwargs():
    return Model(), [1], {"mask": None}

def needs(size, depth=3):
    return Model()

def fails():
    return undefined_name

def exits():
    raise SystemExit("bye")

def nothing():
    return None

def one_tuple():
    return (Model(),)

def four():
    return Model(), (), {}, 3

def bad_args():
    return Model(), 7

def bad_kwargs():
    return Model(), (), 7

def swapped():
    return (1, 2), Model()

model = Model()
size = 3
mine = {"sites": [1], "actions": {"own.a": print}}
other = {"sites": [1], "rules": []}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of a user's files, as the working directory; what loading them leaves behind is undone."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("my_model", "broken", "raising", "beside"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(MODELS)
    Path("broken.py").write_text("import json\nx = 1 +\n")
    Path("raising.py").write_text("def deep():\n    raise KeyError('x')\n\ndeep()\n")
    return tmp_path


def loaded(target):
    return load_model(*split_target(target))


def test_what_a_factory_may_give():
    assert list(loaded("my_model.py:plain")) == ["model"]
    assert loaded("my_model.py:with_args")["args"] == (1, 2)
    given = loaded("my_model.py:with_kwargs")
    assert (type(given["model"]).__name__, given["args"], given["kwargs"]) == ("Model", [1], {"mask": None})
    assert type(loaded("my_model.py:Model")["model"]).__name__ == "Model"


def test_what_is_ones_own_comes_along():
    given = load_model(*split_target("my_model.py:with_args"), "mine")
    assert (given["args"], given["sites"], list(given["actions"])) == ((1, 2), [1], ["own.a"])


@pytest.mark.parametrize(("name", "why"), [
    ("other", "its key 'rules' is neither"), ("size", "it is an int"), ("none", "it is None"),
])  # fmt: skip
def test_what_is_no_dict_of_ones_own(name, why):
    with pytest.raises(PrecisionPassError) as raised:
        load_model(*split_target("my_model.py:plain"), name)
    assert str(raised.value) == (
        f"PP127 --own {name} names no dict of sites and actions\n  where: my_model.py\n  why: {why}\n"
        f'  fix: write: {name} = {{"sites": [*default_sites, ...], "actions": {{"own.NAME": function}}}}'
    )


def test_a_file_may_have_the_name_of_a_loaded_module(folder):
    (folder / "json.py").write_text(MODELS)
    assert list(loaded("json.py:plain")) == ["model"]
    assert sys.modules["json"] is json


def test_a_file_may_import_what_lies_beside_it_and_have_dataclasses(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "beside.py").write_text("number = 7\n")
    (folder / "sub" / "my_model.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom beside import number\n"
        "@dataclass\nclass Model:\n    size: int = number\n    def named_modules(self): return []\n"
    )
    assert loaded(str(folder / "sub" / "my_model.py") + ":Model")["model"].size == 7


TARGETS = [
    ("my_model.py", "PP120 the model to explain is given as FILE.py:FACTORY, not 'my_model.py'\n"
     "  why: a function in a Python file of yours builds the model\n"
     "  fix: write for example: precisionpass explain my_model.py:make_model --rules stable-bf16"),
    ("my_model:plain", "PP120 the model to explain is given as FILE.py:FACTORY, not 'my_model:plain'\n"
     "  why: a function in a Python file of yours builds the model\n"
     "  fix: write for example: precisionpass explain my_model.py:make_model --rules stable-bf16"),
    ("no.py:plain", "PP121 there is no file no.py\n  where: looked in {folder}\n"
     "  fix: give a path from the folder you are in, or an absolute one"),
    ("my_model.py:plian", "PP122 my_model.py has no function plian\n  where: my_model.py\n"
     '  fix: did you mean "plain"?'),
    ("my_model.py:zzz", "PP122 my_model.py has no function zzz\n  where: my_model.py\n"
     "  fix: its functions are: bad_args, "
     "bad_kwargs, exits, fails, four, needs, nothing, one_tuple, plain, swapped, with_args, with_kwargs"),
    ("my_model.py:size", "PP122 size is no function but an int\n  where: my_model.py\n"
     "  fix: write: def make_model(): return size"),
    ("my_model.py:model", "PP122 model is no function but a Model\n  where: my_model.py\n"
     "  fix: write: def make_model(): return model"),
    ("broken.py:plain", "PP123 broken.py failed while it was loaded\n  where: broken.py:2\n"
     "  why: SyntaxError: invalid syntax (broken.py, line 2)\n  fix: run it by itself: python broken.py"),
    ("raising.py:plain", "PP123 raising.py failed while it was loaded\n  where: raising.py:2\n  why: KeyError: 'x'\n"
     "  fix: run it by itself: python raising.py"),
    ("my_model.py:needs", "PP124 needs needs arguments, and a factory is called without\n  where: my_model.py:15\n"
     "  why: missing a required argument: 'size'\n"
     "  fix: give them defaults, or write a small function that calls needs"),
    ("my_model.py:fails", "PP124 fails failed\n  where: my_model.py:19\n"
     "  why: NameError: name 'undefined_name' is not defined\n  fix: run it by itself: python my_model.py"),
    ("my_model.py:exits", "PP124 exits failed\n  where: my_model.py:22\n  why: SystemExit: bye\n"
     "  fix: run it by itself: python my_model.py"),
    ("my_model.py:nothing", "PP125 nothing returned no model to explain\n  where: my_model.py:24\n"
     "  why: it returned None\n{fix}"),
    ("my_model.py:one_tuple", "PP125 one_tuple returned no model to explain\n  where: my_model.py:27\n"
     "  why: it returned a tuple of 1\n{fix}"),
    ("my_model.py:four", "PP125 four returned no model to explain\n  where: my_model.py:30\n"
     "  why: it returned a tuple of 4\n{fix}"),
    ("my_model.py:bad_args", "PP125 bad_args returned no model to explain\n  where: my_model.py:33\n"
     "  why: its args are an int\n{fix}"),
    ("my_model.py:bad_kwargs", "PP125 bad_kwargs returned no model to explain\n  where: my_model.py:36\n"
     "  why: its kwargs are an int\n{fix}"),
    ("my_model.py:swapped", "PP125 swapped returned no model to explain\n  where: my_model.py:39\n"
     "  why: its model is a tuple\n{fix}"),
]  # fmt: skip
RETURNS = "  fix: return model, (model, args) or (model, args, kwargs): a torch.nn.Module, a tuple such as (x,), a dict"


@pytest.mark.parametrize(("target", "message"), TARGETS, ids=[target for target, _ in TARGETS])
def test_what_can_be_wrong(folder, target, message):
    with pytest.raises(PrecisionPassError) as raised:
        loaded(target)
    assert str(raised.value) == message.format(folder=folder, fix=RETURNS)


def test_every_code_of_the_target_has_a_test():
    assert {message[:5] for _, message in TARGETS} == {code for code in CODES if "PP120" <= code <= "PP125"}

"""compile, explain, report, is_active, and the backend by name: what a user may rely on."""

import copy
import io
import json
import pickle
import warnings

import pytest
import torch

import precisionpass
from precisionpass import PrecisionPassError, Rule
from tests.agreement import counts, same, step
from tests.small_models import Stack, family

ATTENTION = [Rule(id="mine", match={"op": "attention"}, apply={"implementation": "auto"})]


def attend(q, k, v):
    return (q @ k.mT / 8**0.5).softmax(-1) @ v


def qkv():
    return tuple(torch.randn(2, 3, 5, 8) for _ in range(3))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def test_a_report_before_the_first_call_says_so():
    compiled = precisionpass.compile(Stack(1), backend="eager")
    report = precisionpass.report(compiled)
    assert (report.sites, report.events) == ((), ("nothing has been captured yet",))
    assert report.rules_name == "stable-bf16"


def test_a_report_of_what_was_never_compiled():
    with pytest.raises(PrecisionPassError) as raised:
        precisionpass.report(Stack(1))
    assert str(raised.value) == (
        "PP405 this model was not compiled by precisionpass\n"
        "  where: precisionpass.report\n"
        "  why: it is a copy, or compile was never called on it\n"
        "  fix: call precisionpass.compile(model, rules=...) first"
    )


def test_is_active_follows_the_compilation():
    model = Stack(1)
    assert not precisionpass.is_active(model)
    precisionpass.compile(model, backend="eager")
    assert precisionpass.is_active(model)
    model.compile(backend="eager")
    assert not precisionpass.is_active(model), "someone else compiled it since"
    precisionpass.compile(model, backend="eager")
    assert precisionpass.is_active(model)
    assert precisionpass.is_active(precisionpass.compile(attend, backend="eager"))
    assert not precisionpass.is_active(attend)
    assert not precisionpass.is_active(3)


def test_a_second_compile_replaces_the_first():
    model, x = Stack(1), torch.randn(2, 5, 32)
    precisionpass.compile(model, backend="aot_eager")
    model(x)
    assert counts(precisionpass.report(model)) == {"attention": 1}
    precisionpass.compile(model, rules="fp32-statistics", backend="aot_eager")
    model(x)
    report = precisionpass.report(model)
    assert (report.rules_name, counts(report)) == ("fp32-statistics", {})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(x)
    assert not [e.key for e in profiler.key_averages() if e.key.startswith("precisionpass")]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_work_and_warn_once(how):
    model, x = Stack(1), torch.randn(2, 5, 32)
    precisionpass.compile(model, backend="eager")
    expected = model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            held = io.BytesIO()
            torch.save(model, held)
            held.seek(0)
            twin = torch.load(held, weights_only=False)
    ours = [str(w.message) for w in caught if "precisionpass" in str(w.message)]
    assert ours == ["precisionpass: a copy of a compiled model is not compiled; call precisionpass.compile on the copy"]
    assert torch.allclose(twin(x), expected, atol=1e-6)
    assert precisionpass.is_active(model)
    assert not precisionpass.is_active(twin)
    assert precisionpass.is_active(precisionpass.compile(twin, backend="eager"))
    assert torch.allclose(twin(x), expected, atol=1e-6)


def test_state_dict_round_trip():
    model = precisionpass.compile(Stack(1), backend="eager")
    twin = Stack(1)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 32)
    assert torch.allclose(model(x), twin(x), atol=1e-6)


def test_functions():
    compiled = precisionpass.compile(attend, backend="aot_eager")
    inputs = qkv()
    assert torch.allclose(compiled(*inputs), attend(*inputs), atol=1e-6)
    (site,) = precisionpass.report(compiled).sites
    assert (site.module, site.decision) == ("", "rewritten")
    assert site.source.startswith("tests/test_api.py:")
    assert counts(precisionpass.explain(attend, inputs)) == {"attention": 1}


def test_rules_in_python_and_as_a_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nrules:\n- id: mine\n  match: {op: attention}\n  apply: {implementation: auto}\n")
    for rules in (ATTENTION, str(path), path):
        report = precisionpass.explain(attend, qkv(), rules=rules)
        assert [(site.decision, site.rule) for site in report.sites] == [("rewritten", "mine")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": "stable-bf61"}, 'PP109 no preset is called "stable-bf61"; did you mean "stable-bf16"?'),
        ({"rules": "nowhere.yaml"}, 'PP100 the file "nowhere.yaml" cannot be read: it does not exist'),
        ({"hooks": ()}, "PP135 the hook hooks cannot be used"),
        ({"mode": "default", "options": {"epilogue_fusion": True}}, "PP404 mode and options are both given"),
    ],
)
def test_bad_calls_are_refused_before_anything_happens(options, message):
    model = Stack(1)
    before = dict(model.__dict__)
    with pytest.raises(PrecisionPassError) as raised:
        precisionpass.compile(model, **options)
    assert str(raised.value).splitlines()[0] == message
    assert model.__dict__ == before


def test_the_review_folder_is_written_at_the_first_call(tmp_path):
    folder = tmp_path / "review"
    model = precisionpass.compile(Stack(1), backend="eager", review=str(folder))
    assert not folder.exists()
    model(torch.randn(2, 5, 32))
    files = {file.name for file in folder.iterdir()}
    assert {"index.html", "summary.txt", "sites.jsonl", "why_not.txt", "report.json", "graph_0.diff"} <= files
    assert (folder / "summary.txt").read_text() == precisionpass.report(model).text()
    sites = [json.loads(line) for line in (folder / "sites.jsonl").read_text().splitlines()]
    assert [site["kind"] for site in sites] == ["layer_norm", "attention"]
    assert "+    attention_default = torch.ops.precisionpass.attention" in " ".join(
        (folder / "graph_0.diff").read_text().replace("+        ", "+    ").splitlines()
    )


def test_a_review_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    model = precisionpass.compile(Stack(1), backend="eager", review=str(tmp_path / "file" / "review"))
    with pytest.warns(UserWarning, match="the review could not be written"):
        model(torch.randn(2, 5, 32))
    assert "the review could not be written" in precisionpass.report(model).events[0]


def test_modes_and_options_of_torch_compile():
    def call(x):
        return x.softmax(-1) @ x

    x = torch.randn(8, 8)
    for extra in ({"mode": "max-autotune-no-cudagraphs"}, {"options": {"max_fusion_size": 32}}, {"fullgraph": True}):
        torch._dynamo.reset()
        assert torch.allclose(precisionpass.compile(call, **extra)(x), call(x), atol=1e-5)


def test_fullgraph_still_refuses_a_graph_break():
    def call(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        precisionpass.compile(call, backend="eager", fullgraph=True)(torch.ones(2))


def test_a_callable_backend_gets_the_rewritten_graph():
    seen = []

    def mine(module, inputs):
        seen.extend(str(node.target) for node in module.graph.nodes)
        return module

    precisionpass.compile(attend, backend=mine)(*qkv())
    assert "precisionpass.attention.default" in seen


def test_the_backend_by_name_with_options(tmp_path):
    review = tmp_path / "review"
    options = {"rules": "stable-bf16", "review": str(review), "backend": "aot_eager"}
    model, x = Stack(2), torch.randn(2, 5, 32)
    ours = torch.compile(model, backend="precisionpass", options=options)
    assert torch.allclose(ours(x), model(x), atol=1e-5)
    assert "2 attention sites rewritten" in (review / "summary.txt").read_text()


def test_the_backend_by_name_reports_all_graphs_of_the_process(tmp_path):
    def call(q, k, v):
        first = attend(q, k, v)
        torch._dynamo.graph_break()
        return attend(first, k, v)

    options = {"review": str(tmp_path), "backend": "eager"}
    torch.compile(call, backend="precisionpass", options=options)(*qkv())
    assert json.loads((tmp_path / "report.json").read_text())["graphs"] == 2


def test_the_backend_by_name_with_environment_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("PRECISIONPASS_RULES", "watch")
    monkeypatch.setenv("PRECISIONPASS_REVIEW", str(tmp_path / "review"))
    inputs = qkv()
    torch.compile(attend, backend="precisionpass", options={"backend": "eager"})(*inputs)
    report = json.loads((tmp_path / "review" / "report.json").read_text())
    assert (report["rules_name"], [site["decision"] for site in report["sites"]]) == ("watch", ["kept"])
    monkeypatch.setenv("PRECISIONPASS_RULES", "stable-bf61")
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="did you mean"):
        torch.compile(attend, backend="precisionpass")(*inputs)


def test_explain_takes_a_mode_and_gives_it_back():
    model = Stack(1, dropout=0.3)
    model[0].norm.eval()
    x = torch.randn(2, 5, 32)
    for training, dropout in ((True, 0.3), (False, 0.0), (None, 0.3)):
        report = precisionpass.explain(model, (x,), training=training)
        (site,) = [site for site in report.sites if site.kind == "attention"]
        assert site.facts["dropout"] == pytest.approx(dropout)
        assert [m.training for m in model.modules()].count(False) == 1
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_explain_on_meta_tensors_finds_the_same_sites(name):
    model, kwargs = family(name)
    real = precisionpass.explain(model, kwargs=kwargs)
    meta = precisionpass.explain(model.to("meta"), kwargs={key: value.to("meta") for key, value in kwargs.items()})

    def told(report):
        return [(s.kind, s.module, s.decision, {**s.facts, "device": ""}) for s in report.sites]

    assert told(meta) == told(real)


def test_explain_of_a_compiled_model_leaves_it_compiled():
    model, x = Stack(1), torch.randn(2, 5, 32)
    precisionpass.compile(model, backend="aot_eager")
    expected = step(model, (x,))
    assert counts(precisionpass.explain(model, (x,), rules="watch")) == {}
    assert precisionpass.is_active(model)
    same(step(model, (x,)), expected, 0.0)
    assert precisionpass.report(model).rules_name == "stable-bf16"


def test_the_same_report_every_time():
    model, x = Stack(2), torch.randn(2, 5, 32)
    first, second = (precisionpass.explain(model, (x,)).to_json() for _ in range(2))
    assert first == second
    compiled = precisionpass.compile(model, backend="eager")
    compiled(x)
    assert precisionpass.report(compiled).to_json() == first

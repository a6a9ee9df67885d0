"""The wheel, as a stranger gets it: built, installed away from the repository, and used from there."""

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRESETS = ("fp32-statistics", "off", "paper-shift", "stable-bf16", "watch")


def run(*command: object, cwd: Path = ROOT, **options) -> str:
    ran = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=cwd, **options)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel)
    return folder


@pytest.fixture(scope="module")
def contents(wheel) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_presets_and_the_page(contents):
    assert {f"precisionpass/presets/{name}.yaml" for name in PRESETS} <= contents
    assert {f"precisionpass/review/page.{kind}" for kind in ("html.j2", "css", "js")} <= contents


def test_the_wheel_holds_every_module_and_nothing_else(contents):
    modules = {file.relative_to(ROOT).as_posix() for file in (ROOT / "precisionpass").rglob("*.py")}
    assert modules == {name for name in contents if name.endswith(".py")}
    assert {name.partition("/")[0].partition("-")[0] for name in contents} == {"precisionpass"}
    assert not [name for name in contents if "__pycache__" in name or name.startswith("rules/")]


def test_the_wheel_installs_the_command_and_the_backend(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        text = archive.read(name).decode()
    assert "[console_scripts]\nprecisionpass = precisionpass.cli:main\n" in text
    assert "[torch_dynamo_backends]\nprecisionpass = precisionpass.backend:precisionpass" in text


@pytest.mark.parametrize("preset", PRESETS)
def test_an_installed_wheel_finds_its_presets(installed, preset):
    """Without `site` the editable install is not on the path: the repository is out of sight."""
    code = (
        f"import sys; sys.path += [{str(installed)!r}, {sysconfig.get_path('purelib')!r}];"
        "import precisionpass, precisionpass.rules as rules;"
        f"print(precisionpass.__file__, rules.load({preset!r}).name, {str(ROOT)!r} in sys.path)"
    )
    where, name, repository_seen = run("-S", "-P", "-c", code, cwd=installed).split()
    assert where == str(installed / "precisionpass" / "__init__.py")
    assert (name, repository_seen) == (preset, "False")


def test_the_editable_install_finds_its_presets(tmp_path):
    code = "import precisionpass, precisionpass.rules as rules; print(precisionpass.__file__, rules.load('off').name)"
    where, name = run("-P", "-c", code, cwd=tmp_path).split()
    assert (where, name) == (str(ROOT / "precisionpass" / "__init__.py"), "off")


def test_triton_is_asked_for_by_the_development_set_up_only():
    needs = [need for need in distribution("precisionpass").requires or [] if need.startswith("triton")]
    assert needs and all("extra == 'dev'" in need.replace('"', "'") for need in needs)


def test_the_pinned_versions_name_no_host_and_no_hash():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert all(line.count("==") == 1 and not set(line) & set("/@;\\ ") and "--" not in line for line in lines)


def test_every_direct_dependency_is_pinned():
    pinned = {
        line.partition("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (need for needs in project["optional-dependencies"].values() for need in needs)
    names = {need.partition(">")[0].partition("[")[0].lower() for need in (*project["dependencies"], *extras)}
    assert names - pinned == set()

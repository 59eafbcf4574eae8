"""The package as others get it: what it exports, what it declares, and the built wheel in a fresh environment."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from contextlib import contextmanager
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import pytest

import livedraft

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL_IMPORTS = {"wandb"}
"""Asked for by a flag, whose absence is a sentence with the command that installs it."""


def test_all_names_what_is_there():
    assert livedraft.__all__ == sorted(livedraft.__all__)
    for name in livedraft.__all__:
        assert getattr(livedraft, name) is not None
    namespace = {}
    exec("from livedraft import *", namespace)
    assert set(livedraft.__all__) <= set(namespace)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        livedraft.Nothing  # noqa: B018


def test_the_version_is_said_in_one_way():
    assert livedraft.__version__ == PROJECT["version"]


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "livedraft" / "py.typed").exists()


CONSUMER = """
from pathlib import Path

from livedraft import LLM, SamplingParams


def answer(prompt: str, state: Path) -> tuple[str, float | None]:
    with LLM("smollm2-135m", state=state, learn=True) as llm:
        output = llm.generate([{"role": "user", "content": prompt}], SamplingParams(max_tokens=16, temperature=0.0))[0]
        several = llm.generate(["one", "two"], store=False)
    return output.text + several[1].text, output.stats.acceptance_rate
"""
WRONG = {
    "max_tokens=16": "max_tokens='16'",
    "state=state": "state=3",
    "-> tuple[str, float | None]": "-> tuple[int, str]",
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_strict_mypy_accepts_a_program_that_uses_the_package_and_finds_its_faults(tmp_path):
    mypy = pytest.importorskip("mypy.api")
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = True\nfollow_imports = silent\nignore_missing_imports = True\n"
    )

    def complaints(text):
        (tmp_path / "consumer.py").write_text(text)
        options = ["--config-file", str(tmp_path / "mypy.ini"), "--cache-dir", str(tmp_path / "cache")]
        said, errors, _ = mypy.run([*options, str(tmp_path / "consumer.py")])
        assert errors == ""
        return [line for line in said.splitlines() if "error:" in line]

    assert complaints(CONSUMER) == []
    for right, wrong in WRONG.items():
        assert len(complaints(CONSUMER.replace(right, wrong))) == 1, wrong


def names(requirements):
    """Distribution names as they are compared: lower case, one kind of dash."""
    return {normal(requirement.split(";")[0].split("[")[0].split(">")[0].split("=")[0]) for requirement in requirements}


def normal(name):
    return name.strip().lower().replace("_", "-")


def imported_modules():
    """Top-level names of everything that livedraft's source imports from outside."""
    found = {}
    for file in (ROOT / "livedraft").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            for module in modules:
                found.setdefault(module.split(".")[0], file.relative_to(ROOT))
    return {name: file for name, file in found.items() if name not in sys.stdlib_module_names and name != "livedraft"}


def test_everything_imported_is_declared_and_everything_declared_is_imported():
    extras = set().union(*(names(PROJECT["optional-dependencies"][extra]) for extra in ("structured", "bench")))
    declared = names(PROJECT["dependencies"]) | extras
    distributions = packages_distributions()
    used = set()
    for module, file in imported_modules().items():
        if module in OPTIONAL_IMPORTS or (module == "vllm" and "integrations/vllm" in str(file)):
            continue  # that part runs in vLLM's own environment
        providers = {normal(name) for name in distributions.get(module, [module])}
        assert providers & (declared | _AT_HAND), f"{file} imports {module}, which pyproject.toml does not name"
        used |= providers
    assert declared - used - _NOT_IMPORTED == set()


_AT_HAND = {"starlette", "huggingface-hub"}
"""Come with what is declared and are its public face: fastapi's, transformers'."""
_NOT_IMPORTED = {"jinja2", "httptools", "datasets", "tomli"}
"""Used by what is imported (transformers' templates, uvicorn's parser), or on older Pythons only."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and sdist, from a copy: building leaves folders beside the source."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    source.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, files):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return next((folder / "dist").glob("*.whl")), next((folder / "dist").glob("*.tar.gz"))


@pytest.mark.long
def test_wheel_and_sdist_hold_what_they_need_and_no_more(built):
    wheel, sdist = built
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    assert {"livedraft/py.typed", "livedraft/models/kernels/step.cpp", "livedraft/cli/main.py"} <= in_wheel
    assert {name.split("/")[0] for name in in_wheel} == {"livedraft", f"livedraft-{livedraft.__version__}.dist-info"}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "livedraft").rglob("*.py")}
    assert sources <= in_wheel
    page, kernels = ROOT / "livedraft" / "server" / "dashboard", ROOT / "livedraft" / "models" / "kernels"
    files = [path for path in (*page.iterdir(), *kernels.iterdir()) if path.is_file()]
    assert {path.suffix for path in files} == {".py", ".html", ".js", ".css", ".svg", ".txt", ".cpp", ".hpp"}
    assert "uplot.LICENSE.txt" in {path.name for path in files}
    assert {str(path.relative_to(ROOT)) for path in files} <= in_wheel
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "livedraft/py.typed",
        "livedraft/models/kernels/step.cpp",
    } <= in_sdist


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_wheel_works_in_a_fresh_environment_without_the_repository(built, tmp_path, model_folder):
    """As pipx installs it: an environment of its own. Its dependencies are those of the running tests, seen through a path
    file, so that torch is not fetched again; that they are all declared is tested above."""
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    python = environment / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", built[0]], check=True, timeout=120)
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    clean = {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }

    def run(*command):
        return subprocess.run(
            [str(word) for word in command],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    where = run(python, "-c", "import livedraft; print(livedraft.__file__)").stdout
    assert where.startswith(str(environment))
    assert "doctor" in run(python, "-m", "livedraft", "--help").stdout
    assert run("livedraft", "--version").stdout.strip() == livedraft.__version__
    report = run("livedraft", "doctor", model_folder, "--port", 0, "--json")
    assert report.returncode == 0, report.stdout + report.stderr
    kernels = next(finding for finding in json.loads(report.stdout)["findings"] if finding["name"] == "kernels")
    assert "could not be built" not in kernels["text"]  # the source of the kernels is in the wheel
    answer = run("livedraft", "generate", "hello", "--model", model_folder, "--max-tokens", 4, "--json")
    assert answer.returncode == 0, answer.stderr
    assert len(json.loads(answer.stdout)["token_ids"]) > 0
    with open_page(environment / "bin" / "livedraft", model_folder, tmp_path, clean) as url:
        page = httpx.get(url, timeout=10)
        assert page.status_code == 200
        for name in re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text):
            assert httpx.get(f"{url}{name}", timeout=10).status_code == 200, name


@contextmanager
def open_page(program, model, folder, environment):
    """The dashboard's address while `serve` runs."""
    server = subprocess.Popen(
        [program, "serve", model, "--no-learn", "--port", "0"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        assert server.stdout is not None
        yield next(line.split()[1] for line in server.stdout if line.split()[:1] == ["dashboard"])
    finally:
        server.terminate()
        server.communicate(timeout=60)

"""House rules that prose alone would not keep: imports, start-up, what files may name."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "knapspec_edge"

# Lowest first. A unit imports itself and lower layers only; units of one layer do not know each
# other. `__init__` is the entrance from outside and stands above them all.
LAYERS = (
    {"errors", "config", "records", "folders", "closing", "styling"},
    {"backend", "arguments", "turns"},
    {"decode", "native", "gguf_check"},
    {"latency", "models", "text", "gguf_head"},
    {"search", "quantize", "sampling"},
    {"policies"},
    {"engine"},
    {"apps"},
    {"terminal", "keyboard"},
    {"cli_config"},
    {"cli_completion"},
    {"repl", "cli_options", "cli_open"},
    {"cli_summarize"},
    {"cli"},
    {"__main__", "__init__"},
)
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}

# package -> the places that may import it
FENCED = {
    "numba": ("search/kernels",),
    "click": (
        "cli",
        "cli_completion",
        "cli_config",
        "cli_open",
        "cli_options",
        "cli_summarize",
    ),
    "llama_cpp": ("native", "text"),
    "prompt_toolkit": ("keyboard",),
    "matplotlib": ("apps/plots",),
    "pypdfium2": ("text/documents/pdf",),
    "mammoth": ("text/documents/archives",),
    "markdownify": ("text/documents/html",),
    "bs4": ("text/documents/html",),
    "chardet": ("text/documents/encodings",),
    "distributed": ("apps/summarize_dask",),
    "dask": ("apps/summarize_dask",),
    "bayes_opt": ("policies/bayesian",),
    "threadpoolctl": ("policies/bayesian",),
}

# The loop and the planner work, and are tested, without the native library.
WITHOUT_NATIVE = {"decode", "latency", "search"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def label(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imports(path: Path, tree: ast.AST | None = None) -> Iterator[str]:
    """Absolute dotted names of everything a module imports, wherever in the file."""
    tree = tree or ast.parse(path.read_text(encoding="utf-8"))
    here = ["knapspec_edge", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}/") for place in places)


def upward_imports(path: Path, tree: ast.AST | None = None) -> list[str]:
    unit = label(path).split("/")[0]
    found = []
    for name in imports(path, tree):
        parts = name.split(".")
        if parts[0] != "knapspec_edge" or len(parts) < 2:
            continue
        other = parts[1]
        # names of the package itself, such as its version, belong to no unit
        if other not in RANK or other == unit or unit == "__init__":
            continue
        if RANK[other] >= RANK[unit]:
            found.append(f"{label(path)} imports {name}")
        if unit in WITHOUT_NATIVE and other in {"native", "text"}:
            found.append(f"{label(path)} must work without {other}")
    return found


def fence_breaks(path: Path, tree: ast.AST | None = None) -> list[str]:
    return [
        f"{label(path)} imports {name}"
        for name in imports(path, tree)
        if name.split(".")[0] in FENCED and not within(label(path), FENCED[name.split(".")[0]])
    ]


def is_program(tree: ast.Module) -> bool:
    """Whether the module is also a program of its own, such as a worker process."""
    return any(
        isinstance(node, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(node.test))
        for node in tree.body
    )


def prints(tree: ast.AST) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def test_every_unit_has_a_layer():
    units = {label(path).split("/")[0] for path in modules()}
    assert units <= set(RANK), f"give {sorted(units - set(RANK))} a place in LAYERS"


def test_imports_point_downward():
    assert [line for path in modules() for line in upward_imports(path)] == []


def test_fenced_packages_stay_in_their_place():
    assert [line for path in modules() for line in fence_breaks(path)] == []


def test_library_modules_do_not_print():
    speakers = {"cli", "cli_summarize", "repl", "terminal"}
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if label(path).split("/")[0] not in speakers and not is_program(tree):
            assert prints(tree) == [], label(path)


def test_every_module_says_what_it_is():
    for path in modules():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{label(path)} has no docstring"


def test_the_rules_notice_what_they_forbid():
    """The checks above on sources that break them: a check that cannot fail protects nothing."""
    loop = PACKAGE / "decode" / "loop.py"
    assert upward_imports(loop, ast.parse("from ..native import open_model"))
    assert upward_imports(loop, ast.parse("import knapspec_edge.search.planner"))
    assert upward_imports(loop, ast.parse("def f():\n    from .. import engine"))
    assert upward_imports(PACKAGE / "errors.py", ast.parse("from .records import Plan"))
    assert not upward_imports(loop, ast.parse("from .rollback import truncate\nimport math"))
    assert fence_breaks(loop, ast.parse("import numba"))
    assert fence_breaks(loop, ast.parse("from llama_cpp import Llama"))
    assert not fence_breaks(PACKAGE / "search" / "kernels" / "loops.py", ast.parse("import numba"))
    assert prints(ast.parse("def f():\n    print(1)")) == [2]
    assert is_program(ast.parse("if __name__ == '__main__':\n    main()"))
    assert not is_program(ast.parse("if __debug__:\n    print(1)"))


HEAVY = (
    "numpy", "llama_cpp", "rich", "numba", "gguf", "prompt_toolkit", "jinja2", "matplotlib",
    "pypdfium2", "mammoth", "markdownify", "bs4", "chardet", "distributed", "dask",
    "bayes_opt", "threadpoolctl",
)  # fmt: skip


def test_home_folders_are_expanded_without_a_traceback():
    """Path.expanduser raises RuntimeError for a user that does not exist."""
    for file in PACKAGE.rglob("*.py"):
        assert ").expanduser(" not in file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["chat", "--help"]])
def test_start_up_imports_nothing_heavy(arguments):
    code = (
        "import sys\n"
        "from knapspec_edge.cli import main\n"
        f"sys.argv = ['knapspec-edge', *{arguments!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    assert not stop.code, stop.code\n"
        f"found = sorted(set(sys.modules) & set({HEAVY!r}))\n"
        "assert not found, found\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_opening_a_model_imports_no_numba():
    """Only a search does: plain decoding must not wait for it."""
    code = (
        "import sys\n"
        "import knapspec_edge.apps.run, knapspec_edge.engine, knapspec_edge.search.planner\n"
        "assert not {'numba', 'llvmlite'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


NUMBA_WHEELS = [
    ("3.10", "linux", "x86_64", True),
    ("3.15", "linux", "aarch64", True),
    ("3.15", "win32", "AMD64", True),
    ("3.14", "darwin", "arm64", True),
    ("3.13", "darwin", "x86_64", True),
    ("3.14", "darwin", "x86_64", False),
    ("3.16", "linux", "x86_64", False),
    ("3.13", "linux", "riscv64", False),
]


@pytest.mark.parametrize(("version", "system", "machine", "wanted"), NUMBA_WHEELS)
def test_numba_is_asked_for_where_it_has_wheels(version, system, machine, wanted):
    """Elsewhere an installation must not fail over it: NumPy does its work."""
    requirements = pytest.importorskip("packaging.requirements")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = re.findall(r'^    "(numba[^"]*)",$', text, re.MULTILINE)
    environment = {
        "python_version": version,
        "sys_platform": system,
        "platform_machine": machine,
        "implementation_name": "cpython",
    }
    marker = requirements.Requirement(line).marker
    assert marker.evaluate(environment) == wanted
    assert not marker.evaluate({**environment, "implementation_name": "pypy"})


# ---------------------------------------------------------------------------------------------
# What the repository says

# written in pieces, so that this file passes its own test
FORBIDDEN = {
    "address of a package index": re.compile(
        "|".join(("pypi" + r"\.org", "python" + r"hosted\.org", r"--index" + r"-url\s*=?\s*http"))
    ),
    "path of one machine": re.compile(
        r"(?<![\w./~-])/(?:" + "work|root|home/[a-z]+|Users/[A-Za-z]+|opt/pypi" + r")/[\w.]"
    ),
}
BINARY = {".gguf", ".png", ".gz", ".whl", ".npz"}


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git and a checkout")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, env=environment, capture_output=True, check=True
    ).stdout.decode()
    paths = [ROOT / name for name in listing.split("\0") if name]
    return [path for path in paths if path.is_file() and path.suffix not in BINARY]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names_what_belongs_to_one_machine(what):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in tracked_files()
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), 1
        )
        if FORBIDDEN[what].search(line)
    ]
    assert found == [], what


def test_the_forbidden_patterns_find_what_they_should():
    paths = FORBIDDEN["path of one machine"]
    for text in ("see /" + "work/main", '"/' + "root/.cache", "(/" + "home/somebody/x)"):
        assert paths.search(text), text
    for text in ("src/work/main", "/work", "https://example.org/work/x", "~/work/x"):
        assert not paths.search(text), text
    assert FORBIDDEN["address of a package index"].search("https://" + "pypi" + ".org/x")


def test_scripts_are_executable():
    if os.name == "nt":
        pytest.skip("no executable bit on Windows")
    for name in ("scripts/run", "scripts/test", "scripts/patches.py", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name


def test_old_pythons_can_read_the_version_check():
    """scripts/run must be able to say that Python is too old, so old Pythons must parse it."""
    for name in ("run", "test", "_bootstrap_python.py"):
        source = (ROOT / "scripts" / name).read_text(encoding="ascii")
        tree = ast.parse(source, feature_version=(3, 4))
        assert not any(isinstance(node, (ast.JoinedStr, ast.AnnAssign)) for node in ast.walk(tree))
        assert "from __future__ import annotations" not in source

"""The rules of the house, read from the source: who may import whom, who prints, nothing that changes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sdpa_repro"
MODULES = sorted(PACKAGE.rglob("*.py"))

ORDER = [
    "version",
    "errors",
    "attention",
    "visibility",
    "mask_scan",
    "mask_pattern",
    "mask_picture",
    "mask",
    "recipe",
    "dumping",
    "dump",
    "switches",
    "environment",
    "ranks",
    "situation",
    "issue_triggers",
    "known_issues",
    "replaying",
    "capturing",
    "explaining",
    "reducing",
    "locating",
    "publishing",
    "guarding",
    "diagnosing",
    "cli",
    "__main__",
]
"""A module imports only from those before it; a folder counts as one place."""

PRINTS = "cli"
TRANSFORMERS = ("capturing/prefill.py", "capturing/loading.py", "capturing/tiny.py", "locating/")
FILES = [path for folder in ("sdpa_repro", "tests", "docs", ".ci") for path in sorted((ROOT / folder).rglob("*"))]
FILES += [path for path in sorted(ROOT.iterdir()) if path.is_file()]
TEXT = [path for path in FILES if path.suffix in {".py", ".md", ".cfg", ".toml", ".txt", ".sh", ""} and path.is_file()]

modules = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path) -> str:
    """The folder of the package that the module lives in, or its own name."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(node: ast.AST, path: Path, *, typing: bool = True) -> Iterator[tuple[ast.AST, str]]:
    """Every import below `node` with the dotted name of the module; without `typing`, not those for types only."""
    for child in ast.iter_child_nodes(node):
        if not typing and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((child, name.name) for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{path}: relative import"
            yield child, child.module or ""
            yield from ((child, f"{child.module}.{name.name}") for name in child.names)
        yield from imports(child, path, typing=typing)


@modules
def test_a_module_imports_only_from_those_before_it(path: Path) -> None:
    here = place(path)
    if here == "__init__":
        return
    assert here in ORDER, f"{here} has no place in the order: add it to ORDER where the design puts it"
    for _, name in imports(tree(path), path):
        parts = name.split(".")
        if parts[0] != "sdpa_repro" or len(parts) == 1:
            continue
        assert parts[1] == here or ORDER.index(parts[1]) < ORDER.index(here), f"{here} imports {name}"


@modules
def test_only_the_command_line_imports_click_and_rich_or_prints(path: Path) -> None:
    if place(path) == PRINTS:
        return
    names = {name.split(".")[0] for _, name in imports(tree(path), path)}
    assert not names & {"click", "rich"}
    calls = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]


@modules
def test_transformers_is_imported_late_and_in_few_places(path: Path) -> None:
    where = str(path.relative_to(PACKAGE))
    found = [node for node, name in imports(tree(path), path, typing=False) if name.split(".")[0] == "transformers"]
    if found:
        assert where.startswith(TRANSFORMERS)
    assert not [node for node in found if node in tree(path).body or getattr(node, "col_offset", 1) == 0]


@modules
def test_the_command_line_imports_torch_late(path: Path) -> None:
    if place(path) != PRINTS:
        return
    heavy = ("torch", "transformers", "numpy", "rich")
    for node, name in imports(tree(path), path, typing=False):
        if name.split(".")[0] in heavy:
            assert getattr(node, "col_offset", 0) > 0, f"{name} at module level"


@modules
def test_no_module_has_globals_that_change(path: Path) -> None:
    module = tree(path)
    assert not [node for node in ast.walk(module) if isinstance(node, ast.Global)]
    mutable = {name for node in module.body for name in assigned_containers(node)}
    for node in ast.walk(module):
        changed = changed_name(node)
        if changed in mutable:
            shadowed = is_local(module, node, changed)
            assert shadowed, f"line {getattr(node, 'lineno', 0)}: {changed} is changed"


def assigned_containers(node: ast.stmt) -> set[str]:
    """Names bound at module level to a list, dict, set or a call (which may be one)."""
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return set()
    if not isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)):
        return set()
    return {target.id for target in targets if isinstance(target, ast.Name)}


MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard"}


def changed_name(node: ast.AST) -> str | None:
    """The name whose object a statement changes: `x.append(...)`, `x[...] = `, `del x[...]`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        target: ast.expr = node.func.value
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        target = node.value
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


def is_local(module: ast.Module, node: ast.AST, name: str) -> bool:
    """Whether a function around `node` binds `name` itself, so that it is not the module's."""
    for function in ast.walk(module):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or node not in ast.walk(function):
            continue
        names = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        leaves = [leaf for leaf in ast.walk(function) if isinstance(leaf, ast.Name)]
        names |= {leaf.id for leaf in leaves if isinstance(leaf.ctx, ast.Store)}
        if name in names:
            return True
    return False


@modules
def test_every_module_and_public_function_says_what_it_is_for(path: Path) -> None:
    module = tree(path)
    assert ast.get_docstring(module), "no module docstring"
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"line {node.lineno}: {node.name} has no docstring"


@modules
def test_no_module_is_too_long_to_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@modules
def test_nothing_is_called_manager_or_registry(path: Path) -> None:
    names = [node.name for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    assert not [name for name in names if re.search("Manager|Registry|Handler|Factory", name)]


@pytest.mark.parametrize("path", TEXT, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_names_a_path_of_one_machine(path: Path) -> None:
    machine = r"(?<![\w.])/(?:work|root|home/[a-z]+|Users/[A-Za-z]+)/|\.\./shar" + "ed"
    assert not re.findall(machine, path.read_text(encoding="utf-8"))


def test_the_version_is_written_in_one_place() -> None:
    version = re.search(r'^VERSION = "(.+)"$', (PACKAGE / "version.py").read_text(), re.M)
    assert version is not None
    elsewhere = [path for path in MODULES if path.name != "version.py" and f'"{version[1]}"' in path.read_text()]
    assert elsewhere == []
    assert "attr: sdpa_repro.version.VERSION" in (ROOT / "setup.cfg").read_text()

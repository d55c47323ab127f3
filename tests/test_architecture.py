"""Which part may import which, and what is loaded when."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import flagstone

ROOT = Path(flagstone.__file__).parent

# From the bottom to the top. A part imports itself and what stands before it.
ORDER = ["errors", "layout", "storage", "checkpoint", "adapters", "flat", "sharding", "api", "cli"]
FACE = {"flagstone", "flagstone.__main__"}  # stands above all

# What else each part may import, besides the standard library.
THIRD = {
    "errors": set(),
    "layout": {"msgspec"},
    "storage": {"numpy"},
    "checkpoint": {"numpy", "msgspec", "xxhash", "ml_dtypes"},
    "adapters": {"numpy", "msgspec", "torch"},
    "flat": {"torch"},
    "sharding": {"numpy", "torch"},
    "api": {"msgspec"},
    "cli": {"numpy", "msgspec", "rich", "typer", "torch"},
}


def module_name(path):
    parts = ("flagstone", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(p): p for p in sorted(ROOT.rglob("*.py"))}


def part(module):
    return module.split(".")[1] if "." in module else "flagstone"


def imports(path):
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in MODULES)


@pytest.mark.parametrize("module", [m for m in MODULES if m not in FACE])
def test_a_part_imports_nothing_that_stands_above_it(module):
    below = ORDER[: ORDER.index(part(module)) + 1]
    for name in imports(MODULES[module]):
        if name == "flagstone":
            raise AssertionError(f"{module} imports the face of the library")
        if name.startswith("flagstone."):
            assert part(name) in below, f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if m not in FACE])
def test_a_part_imports_only_the_libraries_that_it_is_made_for(module):
    allowed = THIRD[part(module)] | ({"pytest"} if module.endswith(".testing") else set())
    for name in imports(MODULES[module]):
        top = name.split(".")[0]
        assert top == "flagstone" or top in sys.stdlib_module_names or top in allowed, f"{module} imports {name}"


def test_every_part_has_its_place_in_the_order():
    assert {part(m) for m in MODULES if m not in FACE} <= set(ORDER)


def run(code, *, without=()):
    """Run code in a fresh interpreter where some libraries are not installed."""
    prelude = f"""
        import sys

        class Without:
            def __init__(self, finder):
                self.finder = finder

            def find_spec(self, name, path=None, target=None):
                return None if name.split(".")[0] in {set(without)!r} else self.finder.find_spec(name, path, target)

        sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
    """
    source = textwrap.dedent(prelude) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


HEAVY = ("torch", "numpy", "rich", "typer", "msgspec", "xxhash", "ml_dtypes", "safetensors", "jax")


def test_importing_flagstone_loads_neither_torch_nor_numpy_nor_the_command_line():
    code = f"import sys, flagstone; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_everything_that_is_offered_can_be_had_and_is_listed():
    code = """
        import flagstone as fs
        assert set(fs.__all__) <= set(dir(fs))
        for name in fs.__all__:
            assert getattr(fs, name) is getattr(fs, name)
        try:
            fs.no_such_thing
        except AttributeError as error:
            assert "no_such_thing" in str(error)
        else:
            raise AssertionError
    """
    run(code)


NUMPY = """
    import sys
    import numpy as np
    import flagstone as fs

    path = {path!r}
    arrays = {{"w": np.arange(12.0).reshape(3, 4), "model": {{"b": np.ones(3, np.int8)}}}}
    fs.save({{**arrays, "step": 7, "tags": ("a", {{1, 2}})}}, path)
    assert fs.verify(path).tensors == 2
"""


def test_a_numpy_state_is_saved_loaded_opened_and_verified_where_there_is_no_torch(tmp_path):
    code = (
        NUMPY
        + """
    loaded = fs.load(path)
    assert type(loaded["w"]) is np.ndarray and (loaded["w"] == arrays["w"]).all()
    assert loaded["step"] == 7 and loaded["tags"] == ("a", {{1, 2}})
    into = {{"w": np.zeros((3, 4)), "model": {{"b": np.zeros(3, np.int8)}}, "step": 0, "tags": ()}}
    fs.load(path, into=into)
    assert (into["w"] == arrays["w"]).all() and into["step"] == 7
    with fs.open(path) as checkpoint:
        assert (checkpoint["w"][1:, 2] == arrays["w"][1:, 2]).all()
    print("torch" in sys.modules)
    """
    )
    code = code.format(path=str(tmp_path / "step-1"))
    assert run(code, without=("torch", "rich", "typer", "safetensors")) == "False\n"


def test_a_numpy_state_is_saved_and_verified_without_loading_torch_where_there_is_one(tmp_path):
    code = NUMPY.format(path=str(tmp_path / "step-1"))
    assert run(f"{code}\n    print('torch' in sys.modules)") == "False\n"


def test_the_tests_that_are_shipped_load_no_pytest():
    assert run("import flagstone.storage.testing; print('pytest' in sys.modules)") == "False\n"

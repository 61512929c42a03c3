"""No comparison in the tests may succeed because a value is NaN."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LARGEST = {"max", "amax", "nanmax", "maximum", "fmax"}
# The maximum functions of these modules return NaN if a value is NaN. So does Tensor.max.
KEEPS_NAN = {"torch"}
MEANT = {  # files that test NaN on purpose
    "kernels/test_kernels.py",
    "gpu/test_kernels_gpu.py",
    "unit/test_codec.py",
}


def passes_nan(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the lines with a comparison that NaN would pass, each with a reason."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and negated_order(node.test):
            found.append((node.lineno, "`assert not a > b` holds for NaN: write `assert a <= b`"))
        elif isinstance(node, ast.If) and raises(node.body) and too_large(node.test):
            found.append((node.lineno, "`if gap > limit: raise` passes NaN: `if not gap <= limit`"))
        elif isinstance(node, ast.Call) and keeps_largest(node):
            found.append((node.lineno, "a maximum that drops NaN: compare each, or torch's max"))
        elif isinstance(node, ast.keyword) and node.arg == "equal_nan":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                found.append((node.value.lineno, "equal_nan makes NaN equal to NaN"))
        elif isinstance(node, ast.Attribute) and node.attr in (
            "assert_allclose",
            "assert_array_equal",
        ):
            found.append((node.lineno, f"NumPy's {node.attr} counts NaN as equal to NaN"))
    return found


def negated_order(test: ast.expr) -> bool:
    """Return whether the test is like `not a > b` or `not (a > b).any()`."""
    return (
        isinstance(test, ast.UnaryOp)
        and isinstance(test.op, ast.Not)
        and any(
            isinstance(n, ast.Compare) and isinstance(n.ops[0], (ast.Gt, ast.GtE, ast.Lt, ast.LtE))
            for n in ast.walk(test.operand)
        )
    )


def raises(body: list[ast.stmt]) -> bool:
    return any(isinstance(statement, ast.Raise) for statement in body)


def too_large(test: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], (ast.Gt, ast.GtE))
        and holds_gap(test.left)
    )


def keeps_largest(call: ast.Call) -> bool:
    """Return whether the call is Python's or NumPy's max of differences or absolute values."""
    function = call.func
    if isinstance(function, ast.Name):
        known = function.id == "max"
    else:
        known = (
            isinstance(function, ast.Attribute)
            and function.attr in LARGEST
            and isinstance(function.value, ast.Name)
            and function.value.id in ("np", "numpy")
        )
    return known and any(holds_gap(argument) for argument in call.args)


def holds_gap(node: ast.expr) -> bool:
    """Return whether the expression contains the magnitude of a difference, or a variable that by
    its name holds such a magnitude.
    """
    for n in ast.walk(node):
        if isinstance(n, ast.Call):
            name = n.func.id if isinstance(n.func, ast.Name) else getattr(n.func, "attr", "")
            if name in ("abs", "norm", "fabs"):
                return True
        if isinstance(n, ast.Name) and n.id in ("worst", "gap", "gaps", "diff", "err", "error_max"):
            return True
    return False


def files() -> list[Path]:
    return [*TESTS.rglob("*.py"), *(TESTS.parent / "examples").glob("*.py")]


@pytest.mark.parametrize("file", files(), ids=lambda p: p.relative_to(TESTS.parent).as_posix())
def test_comparisons_fail_on_nan(file: Path):
    if file.relative_to(TESTS.parent).as_posix().removeprefix("tests/") in MEANT:
        return
    assert passes_nan(ast.parse(file.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        "assert not gap > 1e-6",
        "assert not (a - b > limit).any()",
        "worst = max(worst, x)",
        "assert max(abs(a - b) for a, b in pairs) < 1",
        "np.max(np.abs(a - b))",
        "if abs(a - b) > 1e-3:\n    raise ValueError",
        "torch.allclose(a, b, equal_nan=True)",
        "np.testing.assert_allclose(a, b)",
    ],
)
def test_what_passes_nan_is_found(text: str):
    assert passes_nan(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    ["assert gap <= 1e-6", "max(sizes)", "assert (a - b).abs().max() < 1", "torch.equal(a, b)"],
)
def test_what_fails_on_nan_is_left_alone(text: str):
    assert passes_nan(ast.parse(text)) == []

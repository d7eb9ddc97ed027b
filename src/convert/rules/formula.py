"""Formulas of a rule file: arithmetic with facts and letters, such as the size of an axis or the bound of a fact."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from convert.core.yaml_nodes import Position

OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
END = re.compile(r"(?P<letter>\w+)\[(?P<end>0|-1)\]")  # the size of an axis that varies, in the first or the last layer
EXPECTED = "numbers, facts, letters, + - * / //, int() and parentheses"


@dataclass(frozen=True)
class Formula:
    """A formula such as ``int(mlp_ratio*W)``.

    Attributes:
        text: the formula.
        names: facts and letters in it.
    """

    text: str
    names: tuple[str, ...]

    def value(self, given: Mapping[str, float]) -> float:
        """Compute the formula.

        Raises:
            ArithmeticError: it has no value, as after a division by zero.
        """
        return _value(ast.parse(self.text, mode="eval").body, given)


@dataclass(frozen=True)
class SizeFormula(Formula):
    """A formula whose value is the size of an axis.

    Attributes:
        letter: of the axis.
        at: position of the formula in the rule file.
    """

    letter: str
    at: Position


def parse_formula(text: str) -> tuple[str, ...]:
    """Return the names of a formula.

    Raises:
        ValueError: the text is no formula.
    """
    try:
        tree = ast.parse(text, mode="eval")
        names = _names(tree.body)
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"expected a formula of {EXPECTED}, not {text!r}") from error
    return tuple(dict.fromkeys(names))


def _names(node: ast.expr) -> list[str]:
    match node:
        case ast.Name():
            return [node.id]
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return []
        case ast.Subscript(value=ast.Name()) if END.fullmatch(name := ast.unparse(node)):
            return [name]
        case ast.BinOp() if type(node.op) in OPERATORS:
            return [*_names(node.left), *_names(node.right)]
        case ast.Call(func=ast.Name(id="int"), args=[inner], keywords=[]):
            return _names(inner)
    raise SyntaxError


def _value(node: ast.expr, given: Mapping[str, float]) -> float:
    match node:
        case ast.Name() | ast.Subscript():
            return given[ast.unparse(node)]
        case ast.Constant():
            return node.value  # type: ignore[return-value]  # `parse_formula` takes numbers alone
        case ast.BinOp():
            result: float = OPERATORS[type(node.op)](_value(node.left, given), _value(node.right, given))
            return result
        case ast.Call():
            return int(_value(node.args[0], given))
    raise AssertionError(ast.dump(node))

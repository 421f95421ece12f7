"""A tool for configs/tools.yaml: the model can call `calc`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calc(x: str) -> str:
    """Work out an arithmetic expression of numbers, + - * / and brackets."""
    result = calculate(x)
    return str(result) if result.denominator == 1 else f"{float(result):.10g}"


def calculate(expression: str) -> Fraction:
    """The exact value of an expression, computed from its syntax tree; no code is executed.

    Raises SyntaxError, ValueError or ZeroDivisionError for an expression without a value.
    """
    if not re.fullmatch(r"[-+*/().0-9 ]{1,200}", expression):
        raise ValueError("an expression is up to 200 characters of 0-9 . + - * / ( ) and space")
    return value(ast.parse(expression.strip(), mode="eval").body)


def value(node: ast.expr) -> Fraction:
    """The value of a node of the tree."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))  # exact: 0.1 is a tenth
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
    raise ValueError("the operators are + - * /")

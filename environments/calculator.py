"""A tool environment: the model may call a calculator, sees the result, and then answers.

Each tool call is answered by one `tool` message; a turn without calls is the answer and ends the
episode. Mistakes of the model are not errors of the environment: a malformed call, an unknown tool
or a division by zero is answered by an error message, and the model may try again, `attempts` times
in total. Rewards do the scoring.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from retrain import Action, Environment, Message, Prompt, StepResult, ToolCall, ToolSpec

OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator(Environment):
    """Offers the tool `calc(x)`; ends with a turn without a call.

    Args:
        attempts: Also end the episode after this many turns with a failed call.
    """

    tools = (
        ToolSpec(
            "calc",
            "Work out an arithmetic expression of numbers, + - * / and brackets.",
            {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        ),
    )

    def __init__(self, attempts: int = 3) -> None:
        if attempts < 1:
            raise ValueError(f"got attempts {attempts}, expected at least 1")
        self.attempts = attempts

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        self.failed = 0
        return prompt.messages

    async def step(self, action: Action) -> StepResult:
        answers = [answer(call) for call in action.tool_calls]
        self.failed += any(text.startswith("error") for text in answers)
        messages = [
            Message(role="tool", content=text, tool_call_id=call.id)
            for text, call in zip(answers, action.tool_calls, strict=True)
        ]
        over = not answers or self.failed == self.attempts
        return StepResult(messages, 0.0, over, False, {"failed_calls": self.failed})


def answer(call: ToolCall) -> str:
    """The tool's reply to a call: the result or an error."""
    if call.error:  # also of an unknown tool or wrong arguments
        return f"error: {call.error}"
    try:
        result = calculate(call.arguments["x"])
    except ZeroDivisionError:
        return "error: division by zero"
    except SyntaxError as error:
        return f"error: {error.msg}"
    except ValueError as error:
        return f"error: {error}"
    return str(result) if result.denominator == 1 else f"{float(result):.10g}"


def calculate(expression: str) -> Fraction:
    """The exact value of an expression, computed from its syntax tree; no code is executed.

    Raises SyntaxError, ValueError or ZeroDivisionError for an expression without a value.
    """
    if not re.fullmatch(r"[-+*/().0-9 ]{1,200}", expression):
        raise ValueError("an expression is up to 200 characters of 0-9 . + - * / ( ) and space")
    return value(ast.parse(expression.strip(), mode="eval").body)


def value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))  # exact: 0.1 is a tenth
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
    raise ValueError("the operators are + - * /")

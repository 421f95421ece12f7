"""Chat templates with tool calls: those that TRL ships, and synthetic ones of the other forms.

A synthetic template is written by us after a vendor's published form; it is not the vendor's file.
Each has a reply with one call as its model writes it, and one with two calls if that is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests import chat_kit

MISTRAL = (
    "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if m == asked[-1] and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs must have nine letters and digits') }}{% endif %}"
    "[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}</s>{% endif %}{% endfor %}"
)
MISTRAL_LIST = MISTRAL.replace(
    "CALLS",
    "[TOOL_CALLS][{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, "
    '"id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]',
)
MISTRAL_NAMED = MISTRAL.replace(
    "CALLS",
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}",
).replace("m == asked[-1]", "m == asked[0]")

EACH = "{% for c in m.tool_calls %}"
PAIRS = "{% for k, v in c.function.arguments.items() %}"
SHORT = {
    "hermes": EACH + "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}",
    "qwen3_coder": EACH
    + "<tool_call><function={{ c.function.name }}>"
    + PAIRS
    + "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>{% endfor %}",
    "glm": EACH
    + "<tool_call>{{ c.function.name }}\n"
    + PAIRS
    + "<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>{% endfor %}</tool_call>"
    "{% endfor %}",
    "llama3_json": EACH + '{"name": {{ c.function.name | tojson }}, "parameters": '
    "{{ c.function.arguments | tojson }}}{{ '' if loop.last else '; ' }}{% endfor %}",
    "pythonic": "[" + EACH + "{{ c.function.name }}(" + PAIRS + "{{ k }}={{ v | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]",
    "mistral": EACH + "[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}",
}
"""Synthetic: how each format's calls are written, for the tokens of the built-in model."""


def short(form: str) -> str:
    """A synthetic template of the built-in model's shape, with the calls of a format."""
    return (
        "{% if tools %}<|system|>{% for t in tools %}{{ t.function.name }}{% endfor %}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.tool_calls %}"
        + SHORT[form]
        + "{% endif %}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


DEEPSEEK_V31 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}"
    "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}<｜tool▁call▁begin｜>{{ c.function.name }}"
    "<｜tool▁sep｜>{{ c.function.arguments }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% endif %}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜></think>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK_V31.replace(
    "{{ c.function.name }}<｜tool▁sep｜>{{ c.function.arguments }}",
    "function<｜tool▁sep｜>{{ c.function.name }}\n```json\n{{ c.function.arguments }}\n```",
)

MAGISTRAL = chat_kit.TOOLS.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n[THINK]")

ARGUMENTS = '{"a": 1, "b": 2}'
HERMES = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA = f'{{"name": "add", "parameters": {ARGUMENTS}}}'
GLM = (
    "\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
)
NAMED = f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}"
LIST = f'{{"name": "add", "arguments": {ARGUMENTS}, "id": "abc123XYZ"}}'
V31 = f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
V3 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
HARMONY = (
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.add <|constrain|>json<|message|>{ARGUMENTS}"
)


def calls_of(one: str) -> tuple[str, str]:
    """One and two calls of DeepSeek."""
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    return f"{begin}{one}{end}", f"{begin}{one}{one}{end}"


@dataclass(frozen=True)
class Case:
    """A template, and what its model writes."""

    form: str
    template: str
    """A synthetic one, or the name of a file of TRL."""
    one: str
    two: str = ""
    ending: str = "<|im_end|>"
    answer: str = "It is 3."
    """A reply without calls."""
    reasoning: str = ""
    """Of the reply with one call."""
    extends: bool = True
    """Whether the prompt after the calls extends the reply; else the template rewrites it."""
    shown: bool = True
    """Whether the history has the calls as calls."""
    special: Sequence[str] = ()
    """Markup that is special tokens of the model."""

    @property
    def source(self) -> str | None:
        """The template's text; None if TRL isn't installed or has no such file."""
        if "{" in self.template:
            return self.template
        found = find_spec("trl")
        for folder in (found.submodule_search_locations or []) if found else []:
            path = Path(folder) / "chat_templates" / f"{self.template}.jinja"
            if path.is_file():
                return path.read_text(encoding="utf-8")
        return None


def think(said: str) -> str:
    return f"<think>\nI add.\n</think>\n\n{said}"


MARKERS = ("<|eot_id|>", "<|user|>", "<|observation|>")
EOT, EOM = "<|eot_id|>", "<|eom_id|>"
EOS = "<｜end▁of▁sentence｜>"
HARMONIC = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>",
            "<|return|>")  # fmt: skip
TOOL_CALLS = ("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[INST]", "[/INST]")
CASES = {
    "Qwen2.5": Case("hermes", "qwen2_5", HERMES, f"{HERMES}\n{HERMES}"),
    "Qwen3": Case("hermes", "qwen3", think(HERMES), think(HERMES * 2), reasoning="I add.",
                  answer=think("It is 3.")),
    "Qwen3 2507": Case("hermes", "qwen3_instruct_2507", HERMES, f"{HERMES}\n{HERMES}"),
    "Qwen3.5": Case("qwen3_coder", "qwen3_5_think", f"I add.\n</think>\n\n{XML}",
                    f"I add.\n</think>\n\n{XML}\n{XML}", reasoning="I add.",
                    answer="Hm\n</think>\n\nIt is 3."),
    "Qwen3.6": Case("qwen3_coder", "qwen3_6", f"I add.\n</think>\n\n{XML}",
                    reasoning="I add.", answer="Hm\n</think>\n\nIt is 3."),
    "Nemotron 3": Case("qwen3_coder", "nemotron_3_nano", f"I add.\n</think>\n{XML}",
                       reasoning="I add.", answer="Hm\n</think>\nIt is 3."),
    "Llama 3.1": Case("llama3_json", "llama3_1", LLAMA, f"{LLAMA}; {LLAMA}", EOT,
                      special=("<|python_tag|>", EOM)),
    "Llama 3.1, python_tag": Case("llama3_json", "llama3_1", f"<|python_tag|>{LLAMA}", "", EOM,
                                  special=("<|python_tag|>", EOM)),
    "Llama 3.2": Case("llama3_json", "llama3_2", LLAMA, "", EOT),
    "LFM2.5": Case("pythonic", "lfm2_2_5", "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>",
                   "<|tool_call_start|>[add(a=1, b=2), add(b=2, a=1)]<|tool_call_end|>",
                   special=("<|tool_call_start|>", "<|tool_call_end|>")),
    "DeepSeek-V3": Case("deepseek", "deepseekv3", "Hm\n</think>\n\n" + calls_of(V3)[0],
                        "", EOS, reasoning="Hm", answer="It is 3.", shown=False, extends=False),
    "DeepSeek-R1 distilled": Case(
        "deepseek", "deepseek_r1_distill", "Hm\n</think>\n\n" + calls_of(V3)[0], "", EOS,
        reasoning="Hm", shown=False, extends=False),
    "GLM-4.5": Case("glm", "glm4moe", f"\n<think>I add.</think>{GLM}",
                    f"\n<think>I add.</think>{GLM}{GLM}", "<|observation|>", reasoning="I add.",
                    answer="\n<think>Hm</think>\nIt is 3.", extends=True),
    "gpt-oss": Case("gpt_oss", "gptoss", HARMONY, "", "<|call|>", reasoning="I add.",
                    answer="<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
                    "<|channel|>final<|message|>It is 3.", special=HARMONIC),
    "synthetic, Mistral with lists": Case(
        "mistral", MISTRAL_LIST, f"[TOOL_CALLS][{LIST}]", f"[TOOL_CALLS] [{LIST}, {LIST}]", "</s>",
        special=TOOL_CALLS),
    "synthetic, Mistral with names": Case(
        "mistral", MISTRAL_NAMED, NAMED, NAMED * 2, "</s>", special=TOOL_CALLS),
    "synthetic, Llama 4": Case("pythonic", short("pythonic"), "[add(a=1, b=2)]",
                               "[add(a=1,b=2),add(b=2,a=1)]", "<|end|>"),
    "synthetic, DeepSeek-V3.1": Case("deepseek", DEEPSEEK_V31, *calls_of(V31), EOS),
    "synthetic, DeepSeek-V3 with tools": Case("deepseek", DEEPSEEK_V3, *calls_of(V3), EOS),
    "synthetic, [THINK]": Case("hermes", MAGISTRAL, f"I add.[/THINK]{HERMES}", "",
                               reasoning="I add.", answer="Hm[/THINK]It is 3.",
                               special=("[THINK]", "[/THINK]")),
}  # fmt: skip


def tokenizer_of(case: Case) -> Any:
    """A byte-level tokenizer with the case's template, its end of turn and its special tokens."""
    tokenizer = chat_kit.byte_level(case.source, eos="<|endoftext|>")
    tokenizer.bos_token = "<|begin|>"
    special = [case.ending, *MARKERS, *case.special]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer

"""The calls of one rollout: what continues what, budgets, cancellation, text completions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from retrain.agents import histories
from retrain.agents.calls import CallError, Calls
from retrain.chat import Chat
from retrain.engine.tiny import tiny_tokenizer
from retrain.environment import ToolSpec
from retrain.errors import RunError
from retrain.observe.rollout_lines import encoded, with_fate
from retrain.pipeline.meter import Meter
from retrain.report.samples import MAX_CALLS, MAX_TEXT, Samples
from retrain.types import Group, Prompt, Trajectory
from tests import chat_kit
from tests.calls_kit import ADD, Scripted, given_back, user

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1.0, "b": {"c": [true, 2]}}}</tool_call>'
THOUGHT = "<think>\nHm\n</think>\n\n4"


class Desk:
    """Calls whose sampler says the given texts in turn, the last one again and again."""

    def __init__(self, *sayings: str, tokenizer: Any = None, max_turns: int = 100,
                 max_tokens: int | None = None, template: str = "auto") -> None:  # fmt: skip
        self.tokenizer = tokenizer or chat_kit.byte_level(chat_kit.TOOLS, eos="<|endoftext|>")
        self.sayings = list(sayings)
        self.sampler = Scripted(self.say, self.tokenizer.decode)
        chat = Chat(self.tokenizer, template=template)
        self.calls = Calls(chat, self.sampler, max_turns, max_tokens)

    def say(self) -> list[int]:
        text = self.sayings.pop(0) if len(self.sayings) > 1 else self.sayings[0]
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def parents(self) -> list[int | None]:
        return [turn.parent for turn in self.calls.turns]

    def seen(self, turn: int = -1) -> str:
        return str(self.tokenizer.decode(self.calls.turns[turn].prompt_ids))


def changed(**fields: Any) -> Any:
    return lambda said: {**said, **fields}


def arguments(value: Any) -> Any:
    function = {"arguments": value, "name": "add"}
    return changed(tool_calls=[{"id": "x", "type": "function", "function": function}])


FORMS = {
    "as it was": (CALL, lambda said: said, True),
    "other ids, numbers and order": (CALL, arguments({"b": {"c": [True, 2.0]}, "a": 1}), True),
    "true is not 1": (CALL, arguments({"a": 1, "b": {"c": [1, 2]}}), False),
    "another argument": (CALL, arguments({"a": 2, "b": {"c": [True, 2]}}), False),
    "a text beside the call": (CALL, changed(content="So:"), False),
    "whitespace at the ends": (" 4\n", changed(content="4"), True),
    "whitespace inside": ("4 5", changed(content="4  5"), False),
    "another word": ("4", changed(content="5"), False),
    "reasoning dropped": (THOUGHT, changed(content="4"), True),
    "reasoning kept": (THOUGHT, changed(reasoning_content="Hm"), True),
    "reasoning in the text": (THOUGHT, changed(content="<think>Hm</think>4"), True),
    "reasoning edited": (THOUGHT, changed(reasoning_content="Hm!"), False),
    "a malformed call is text": ("<tool_call>{oops}</tool_call>", lambda said: said, True),
    "an unfinished call is text": ("4 <tool_call>", lambda said: said, True),
    "nothing at all": ("", lambda said: said, True),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_history_that_says_the_same_continues_the_tokens(form: str) -> None:
    said, change, continues = FORMS[form]
    desk = Desk(f"{said}<|im_end|>")
    opening = [{"role": "system", "content": "Add."}, user("Hi")]
    [reply] = await desk.calls.chat(opening, (ADD,))
    message = change(given_back(reply, 0))
    more = [user("More")]
    if "tool_calls" in message:
        made_up = message["tool_calls"][0]["id"]
        more = [{"role": "tool", "content": "3", "tool_call_id": made_up}]
    await desk.calls.chat([*opening, message, *more], (ADD,))
    first, second = desk.calls.turns
    assert second.parent == (0 if continues else None)
    assert first.is_start_of(second.prompt_ids) is (continues or form == "whitespace at the ends")
    assert len(second.messages) == (2 if continues else 5)
    if continues and "tool_calls" in message:  # templates that show ids see those of the reply
        assert second.messages[0]["tool_call_id"] == reply.tool_calls[0].id


async def test_a_call_compares_what_is_new_and_no_edit_of_the_rest_is_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[Any] = []
    key_of = histories.key_of
    monkeypatch.setattr(histories, "key_of", lambda m: compared.append(m) or key_of(m))
    desk = Desk("4<|im_end|>", CALL + "<|im_end|>", *["4<|im_end|>"] * 60)
    history: list[Any] = [user("Hi")]
    for number in range(50):
        [reply] = await desk.calls.chat(history, (ADD,))
        compared.clear()
        history = [*history, given_back(reply, 0), user(f"{number}?")]
    await desk.calls.chat(json.loads(json.dumps(history)), (ADD,))
    assert desk.calls.turns[-1].parent == 49
    assert len(compared) == 4, "the first message, the two new ones and the reply"
    edited = json.loads(json.dumps(history))
    edited[3]["tool_calls"][0]["function"]["arguments"]["b"]["c"] = [1, 2]  # was [true, 2]
    await desk.calls.chat(edited, (ADD,))
    assert desk.calls.turns[-1].parent is None


async def test_what_changes_besides_the_messages_branches() -> None:
    desk = Desk("4<|im_end|>")
    [reply] = await desk.calls.chat([user("Hi")], (ADD,), seat="a")
    history = [user("Hi"), given_back(reply, 0), user("More")]
    other = ToolSpec("add", "Add all.", ADD.parameters)
    for tools, seat in [((ADD,), "a"), ((other,), "a"), ((), "a"), ((ADD,), "b")]:
        await desk.calls.chat(history, tools, seat=seat)
    await desk.calls.chat([{**user("Hi"), "name": "Bo"}, *history[1:]], (ADD,), seat="a")
    assert desk.parents() == [None, 0, None, None, None, None]
    await desk.calls.chat(history[:2], (ADD,), seat="a")  # another turn of the assistant
    assert desk.parents()[-1] == 0
    assert desk.seen().endswith("4<|im_end|>\n<|im_start|>assistant\n")


async def test_of_replies_that_say_the_same_the_one_with_the_ids_is_continued() -> None:
    desk = Desk(f"{CALL}<|im_end|>")
    replies = await desk.calls.chat([user("Hi")], (ADD,), n=3)
    assert [reply.tool_calls[0].id for reply in replies] == ["call00000", "call00001", "call00002"]
    for reply in replies:
        answer = {"role": "tool", "content": "3", "tool_call_id": reply.tool_calls[0].id}
        await desk.calls.chat([user("Hi"), given_back(reply, 0), answer], (ADD,))
    assert desk.parents() == [None, None, None, 0, 1, 2]
    thoughts = Desk("<think>a</think>4", "<think>b</think>4", "4")
    replies = [*await thoughts.calls.chat([user("Hi")]), *await thoughts.calls.chat([user("Hi")])]
    for form, parent in [(2, 0), (0, 1)]:  # with its reasoning; without it, the latest
        await thoughts.calls.chat([user("Hi"), given_back(replies[0], form), user("More")])
        assert thoughts.parents()[-1] == parent


async def test_dropped_reasoning_is_rendered_by_the_template_from_what_was_sampled() -> None:
    kept = chat_kit.byte_level(chat_kit.CHATML.replace("assistant\n", "assistant\n<think>\n"))
    dropped = chat_kit.byte_level(chat_kit.THINKING)
    for tokenizer, start in [(kept, ""), (dropped, "<think>\n")]:
        desk = Desk(f"{start}Hm\n</think>\n\n4<|im_end|>", tokenizer=tokenizer)
        [reply] = await desk.calls.chat([user("Hi")])
        assert (reply.reasoning, reply.text) == ("Hm", "4")
        await desk.calls.chat([user("Hi"), {"role": "assistant", "content": "4"}, user("More")])
        assert desk.parents() == [None, 0]
        first, second = desk.calls.turns
        extends = first.is_start_of(second.prompt_ids)
        assert ("Hm" in desk.seen()) == extends == (tokenizer is kept)


async def test_a_call_that_is_repeated_is_sampled_again_with_another_seed() -> None:
    desk = Desk("4<|im_end|>")
    await asyncio.gather(*[desk.calls.chat([user("Hi")]) for _ in range(2)])
    await desk.calls.chat([user("Hi")])
    assert len(set(desk.sampler.keys)) == 3
    assert desk.parents() == [None] * 3
    desk.sampler.gate = asyncio.Event()
    lost = asyncio.ensure_future(desk.calls.chat([user("Hi")]))
    await desk.sampler.waiting.acquire()
    lost.cancel()
    await asyncio.wait([lost])
    desk.sampler.gate.set()
    await desk.calls.chat([user("Hi")])
    assert desk.sampler.keys[3] == desk.sampler.keys[4]  # as if nobody had left
    assert len(desk.calls.turns) == 4


async def test_budgets_are_exact_under_parallel_calls_and_given_back_when_a_client_leaves() -> None:
    desk = Desk("4<|im_end|>", max_turns=4)
    desk.sampler.gate = asyncio.Event()
    lost = asyncio.ensure_future(desk.calls.chat([user("Hi")], n=2))
    await asyncio.sleep(0)
    lost.cancel()
    await asyncio.wait([lost])
    asked = [asyncio.ensure_future(desk.calls.chat([user("Hi")], n=2)) for _ in range(3)]
    await asyncio.sleep(0)
    desk.sampler.gate.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [len(a) for a in answers if isinstance(a, list)] == [2, 2]
    [refused] = [a for a in answers if isinstance(a, CallError)]
    assert (refused.status, desk.calls.truncated) == (429, "max_turns")
    assert "4 of its 4 completions" in str(refused)
    assert len(desk.calls.turns) == 4
    tokens = Desk("4<|im_end|>", max_tokens=3)
    for _ in range(2):
        await tokens.calls.chat([user("Hi")])
    with pytest.raises(CallError, match=r" 4 .* 3 \(rollout.max_t"):
        await tokens.calls.chat([user("Hi")])
    assert tokens.calls.truncated == "max_tokens"


@pytest.mark.parametrize("answered", [False, True])
async def test_a_rollout_that_ends_cancels_its_calls_and_takes_no_late_reply(
    answered: bool,
) -> None:
    desk = Desk("4<|im_end|>")
    desk.sampler.gate = asyncio.Event()
    calls = [asyncio.ensure_future(desk.calls.chat([user("Hi")])) for _ in range(2)]
    for _ in calls:
        await desk.sampler.waiting.acquire()
    if answered:  # the replies are on their way
        desk.sampler.gate.set()
        await asyncio.sleep(0)
    await desk.calls.close()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [getattr(answer, "status", None) for answer in answers] == [401, 401]
    assert len(desk.sampler.given) == (2 if answered else 0)
    assert desk.calls.turns == []
    for call in (desk.calls.chat([user("Hi")]), desk.calls.complete("Hi")):
        with pytest.raises(CallError, match="is over"):
            await call
    with pytest.raises(CallError, match="is over"):
        desk.calls.reward(1.0)


async def test_a_sampler_that_fails_ends_the_rollout_with_its_error() -> None:
    desk = Desk("4")
    desk.sampler.error = RunError("out of memory")
    for message in ("its sampler failed", "its sampler failed"):
        with pytest.raises(CallError, match=message):
            await desk.calls.chat([user("Hi")])
    assert desk.calls.failure is desk.sampler.error
    assert len(desk.sampler.keys) == 1


async def test_a_prompt_without_room_is_a_truncated_rollout() -> None:
    desk = Desk("4")
    desk.sampler.error = CallError(400, "context_length_exceeded", "the prompt has 9 tokens")
    with pytest.raises(CallError, match="has 9 tokens"):
        await desk.calls.chat([user("Hi")])
    assert (desk.calls.truncated, desk.calls.failure) == ("context", None)


async def test_messages_that_the_template_rejects_are_the_agents_fault() -> None:
    template = "{{ raise_exception('no') if messages | length > 1 else messages[0].content }}"
    desk = Desk("4", tokenizer=chat_kit.byte_level(template))
    with pytest.raises(CallError, match=r"messages: .*template") as error:
        await desk.calls.chat([user("Hi"), user("Hi")])
    assert error.value.status == 400


async def test_a_stop_string_of_the_call_is_cut_off_and_its_tokens_stay() -> None:
    desk = Desk("4\nObservation:")
    [reply] = await desk.calls.chat([user("Hi")], options={"stop": ("Observation:",)})
    assert reply.text == "4\n"
    await desk.calls.chat([user("Hi"), given_back(reply, 1), user("More")])
    assert desk.parents() == [None, 0]
    assert "4\nObservation:" in desk.seen()


CONTINUED = {
    "cut off": (" upon", " a time", " upon a time", True),
    "nothing added": (" upon", "", " upon", True),
    "the end was sampled and is given": (" upon<|end|>", "<|end|>More", " upon<|end|>More", True),
    "the end was sampled and is not": (" upon<|end|>", " a time", " upon a time", False),
}


@pytest.mark.parametrize("case", CONTINUED)
async def test_a_string_continues_an_earlier_completion(case: str) -> None:
    said, added, seen, extends = CONTINUED[case]
    desk = Desk(said, tokenizer=tiny_tokenizer())
    [reply] = await desk.calls.complete("Once")
    await desk.calls.complete("Once" + reply.text + added)
    assert desk.parents() == [None, 0]
    assert desk.seen() == "Once" + seen
    first, second = desk.calls.turns
    assert first.is_start_of(second.prompt_ids) is extends
    assert second.messages[0]["content"] == added


async def test_ids_continue_the_tokens_of_any_earlier_call() -> None:
    desk = Desk("4<|end|>", "<|end|>", tokenizer=tiny_tokenizer())
    await desk.calls.chat([user("Hi")])
    known = [*desk.calls.turns[0].prompt_ids, *desk.calls.turns[0].completion.token_ids]
    for prompt in (known, [*known, 9], known[:-1]):
        await desk.calls.complete(prompt)
        assert desk.calls.turns[-1].prompt_ids == prompt
    assert desk.parents() == [None, 0, 0, None]
    for _ in range(2):  # nothing but the end was sampled: a repeated call continues nothing
        await desk.calls.complete("Once")
    assert desk.parents()[-2:] == [None, None]
    with pytest.raises(CallError, match="empty prompt"):
        await desk.calls.complete([])


async def test_rewards_are_added_per_turn_and_for_the_rollout() -> None:
    desk = Desk("4")
    await desk.calls.chat([user("Hi")], n=2)
    for value, turn in [(1.0, 1), (0.5, 1), (2.0, None)]:
        desk.calls.reward(value, turn)
    assert [turn.reward for turn in desk.calls.turns] == [0.0, 1.5]
    assert desk.calls.rewarded == 2.0
    with pytest.raises(CallError, match="no completion 2"):
        desk.calls.reward(1.0, 2)


async def test_the_tree_is_in_the_line_of_the_rollout_in_the_metrics_and_in_the_report() -> None:
    desk = Desk("4<|end|>", tokenizer=tiny_tokenizer())
    [first] = await desk.calls.chat([user("Hi")])
    history = [user("Hi"), given_back(first, 0)]
    for more in ("And?", "Why?"):
        await desk.calls.chat([*history, user(more)])
    await desk.calls.chat([user("x" * (MAX_TEXT + 1))])
    desk.calls.reward(0.5, 2)
    prompt = Prompt("0.0.0", [user("Hi")])
    group = Group(prompt, [Trajectory(prompt, desk.calls.turns)])
    line = json.loads(with_fate(encoded(group), 1)[0])
    assert [call["parent"] for call in line["calls"]] == [None, 0, 0, None]
    assert [call["continues"] for call in line["calls"]] == [False, True, True, False]
    assert [call["reward"] for call in line["calls"]] == [0, 0, 0.5, 0]
    assert line["calls"][2] == {
        "parent": 0,
        "continues": True,
        "messages": [user("Why?"), {"role": "assistant", "content": "4"}],
        "tokens": 2,
        "version": 2,
        "reward": 0.5,
    }
    [shown] = Samples([{**line, "calls": line["calls"] * MAX_CALLS}]).picked()["first"]
    assert len(shown["calls"]) == MAX_CALLS
    assert shown["calls_left_out"] == 3 * MAX_CALLS
    assert "(1 more characters)" in shown["calls"][3]["messages"][0]["content"]

    meter = Meter()
    meter.start()
    meter.lap("wait_for_batch")
    row = meter.row(1, [group], {}, 1, 1)
    # "Hi" and 2 markers, and 2 tokens of the reply; "And?" or "Why?" and 2 markers in each branch
    given = (4 + 4 + 2) + (4 + 2 + 4 + 2) + (MAX_TEXT + 1 + 2)
    assert row["rollouts/branches"] == 2
    assert (row["tokens/prompt"], row["tokens/completion"]) == (given, 8)

"""The official SDKs against the endpoint: each API, sync and async, in a stream and at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from retrain.agents.calls import Calls
from retrain.agents.server import EndpointServer
from retrain.chat import Chat
from retrain.config import EndpointConfig
from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.sampler import SamplingParams
from tests.endpoint_kit import ADD, TOKENIZER, Open, call, opened, saying, streamed

MODEL = {"model": "policy"}
HONOUR = ("max_tokens", "temperature", "stop", "seed", "top_k")
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
TOOL = [{"type": "function", "function": ADD}]
FLAT = [{"type": "function", **ADD}]
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Clients:
    """Made once: each costs 30 ms, and the first one the SDKs' import, which takes 2 s."""

    def __init__(self) -> None:
        openai, anthropic = self.sdks = tuple(map(pytest.importorskip, ("openai", "anthropic")))
        blank: dict[str, Any] = {"api_key": "-", "base_url": "http://127.0.0.1:9"}
        self.openai = {"sync": openai.OpenAI(**blank), "async": openai.AsyncOpenAI(**blank)}
        self.anthropic = {
            "sync": anthropic.Anthropic(**blank),
            "async": anthropic.AsyncAnthropic(**blank),
        }

    def of(self, kind: str, rollout: Open, key: str = "") -> tuple[Any, Any]:
        """OpenAI's and Anthropic's for a rollout."""
        endpoint = rollout.endpoint
        key = key or endpoint.api_key
        return (
            self.openai[kind].with_options(base_url=endpoint.base_url, api_key=key),
            self.anthropic[kind].with_options(base_url=endpoint.anthropic_url, api_key=key),
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clients() -> AsyncIterator[Clients]:
    made = Clients()
    yield made
    for found in (made.openai, made.anthropic):
        found["sync"].close()
        await found["async"].close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[EndpointServer]:
    server = EndpointServer(EndpointConfig(honour=HONOUR, reward=True), TOKENIZER.decode)
    async with server.serving():
        yield server


async def chat(client: Any, messages: list[Any], stream: bool) -> tuple[str, list[Any], list[Any]]:
    """A call of chat completions: the text, the tool calls and the history."""
    api = client.chat.completions
    arguments = {**MODEL, "messages": messages, "tools": TOOL}
    if stream:
        usage = {"include_usage": True}
        answer = await streamed(
            api.stream(**arguments, stream_options=usage), "get_final_completion"
        )
    else:
        answer = await call(api.create, **arguments)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    message, reason = answer.choices[0].message, answer.choices[0].finish_reason
    assert reason == ("tool_calls" if message.tool_calls else "stop")
    results = [
        {"role": "tool", "tool_call_id": c.id, "content": _added(c.function.arguments)}
        for c in message.tool_calls or ()
    ]
    # An agent may give its calls back in another form: here compact, and with parts for the text.
    said = message.model_dump(exclude_none=True)
    for tool_call in said.get("tool_calls", ()):
        function = tool_call["function"]
        function["arguments"] = json.dumps(json.loads(function["arguments"]), indent=1)
    said["content"] = [{"type": "text", "text": f"{message.content or ''} "}]
    return message.content or "", results, [*messages, said, *results]


async def responses(
    client: Any, messages: list[Any], stream: bool, **previous: str | None
) -> tuple[str, list[Any], list[Any]]:
    arguments = {**MODEL, "input": messages, "tools": FLAT, "instructions": "Be brief.", **previous}
    if stream:
        answer = await streamed(client.responses.stream(**arguments), "get_final_response")
    else:
        answer = await call(client.responses.create, **arguments)
    assert answer.status == "completed"
    assert answer.usage.output_tokens > 0
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": _added(item.arguments)}
        for item in answer.output
        if item.type == "function_call"
    ]
    if previous:
        return answer.output_text, results, [answer.id, *results]
    output = [item.model_dump(exclude_none=True) for item in answer.output]
    return answer.output_text, results, [*messages, *output, *results]


async def previous(
    client: Any, messages: list[Any], stream: bool
) -> tuple[str, list[Any], list[Any]]:
    """The same, but the endpoint keeps the history: `messages` is what is new, after its id."""
    answer_id, *new = messages if isinstance(messages[0], str) else (None, *messages)
    return await responses(client, new, stream, previous_response_id=answer_id)


async def messages(
    client: Any, history: list[Any], stream: bool
) -> tuple[str, list[Any], list[Any]]:
    tools = [{"name": "add", "description": "The sum.", "input_schema": ADD["parameters"]}]
    arguments = {**MODEL, "max_tokens": 99, "messages": history, "tools": tools, "system": "Brief."}
    if stream:
        answer = await streamed(client.messages.stream(**arguments), "get_final_message")
    else:
        answer = await call(client.messages.create, **arguments)
    uses = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == ("tool_use" if uses else "end_turn")
    assert answer.usage.input_tokens > 0 < answer.usage.output_tokens
    results = [
        {
            "type": "tool_result",
            "tool_use_id": use.id,
            "content": [{"type": "text", "text": str(sum(use.input.values()))}],
        }
        for use in uses
    ]
    text = "".join(block.text for block in answer.content if block.type == "text")
    said = {"role": "assistant", "content": answer.content}
    more = [{"role": "user", "content": results}] if results else []
    return text, results, [*history, said, *more]


def _added(arguments: str) -> str:
    return str(sum(json.loads(arguments).values()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("play", [chat, responses, previous, messages])
async def test_tools_over_turns_continue_the_tokens(clients, server, play, kind, stream) -> None:
    replies = (
        saying("I add twice.", b=25, a=17) + "\n" + saying("", a=1, b=2),
        saying("", a=42, b=3),
        " It is 45, naïvely.",
        "Bye!",
    )
    async with opened(*replies, server=server) as rollout:
        client = clients.of(kind, rollout)[play is messages]
        text, results, history = await play(client, list(QUESTION), stream)
        assert (text, len(results)) == ("I add twice.", 2)
        text, results, history = await play(client, history, stream)
        assert (text, len(results)) == ("", 1)
        text, results, history = await play(client, history, stream)
        assert (text, results) == (" It is 45, naïvely.", [])
        text, _, _ = await play(client, [*history, {"role": "user", "content": "Bye"}], stream)
        assert text == "Bye!"
        assert rollout.extends() == [True] * 3
        rest = rollout.calls.turns[1].prompt_ids[len(rollout.calls.turns[0].prompt_ids) :]
        assert "<tool_response>42</tool_response>" in TOKENIZER.decode(rest)


async def test_arguments_of_chat_completions(clients, server) -> None:
    """n, stop, logprobs, the length limit, tool_choice, functions, and a stream with n."""
    async with opened(
        "one", "two", "abc STOP", "spelled", "a long answer", "no tools", saying("", a=1, b=2),
        "x", "y", server=server,
    ) as rollout:  # fmt: skip
        create = clients.of("async", rollout)[0].chat.completions.create
        asked: dict[str, Any] = {**MODEL, "messages": QUESTION}
        answer = await create(**asked, n=2)
        assert [choice.message.content for choice in answer.choices] == ["one", "two"]
        answer = await create(**asked, stop="STOP", seed=-1, temperature=1e-9)
        assert answer.choices[0].message.content == "abc "
        assert rollout.script.asked[-1][1] == {"stop": ("STOP",), "seed": 2**31 - 1,
                                               "temperature": 0.0}  # fmt: skip
        answer = await create(**asked, logprobs=True)
        tokens = answer.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == "spelled<|im_end|>"
        assert tokens[0].logprob == -0.5
        answer = await create(**asked, max_completion_tokens=2)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 2
        await create(**asked, tools=TOOL, tool_choice="none")
        assert "Tools:" not in TOKENIZER.decode(rollout.script.asked[-1][0])
        answer = await create(**asked, functions=[ADD])
        assert answer.choices[0].finish_reason == "function_call"
        assert answer.choices[0].message.function_call.name == "add"
        stream = await create(**asked, n=2, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert [(c.index, c.delta.content) for c in chunks if c.delta.content] == [
            (0, "x"),
            (1, "y"),
        ]


async def test_text_completions_continue_the_tokens(clients, server) -> None:
    async with opened("AB", "cd", "e", "f", server=server) as rollout:
        create = clients.of("async", rollout)[0].completions.create
        answer = await create(**MODEL, prompt="Thought:", logprobs=1)
        [choice] = answer.choices
        assert (choice.text, choice.logprobs.text_offset[0]) == ("AB", 0)
        stream = await create(**MODEL, prompt="Thought:AB\nSeen:", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "cd"
        first, second = rollout.calls.turns
        shown = [*first.prompt_ids, *first.completion.token_ids[:-1]]  # the text has no eos
        assert (second.parent, list(second.prompt_ids[: len(shown)])) == (0, shown)
        await create(**MODEL, prompt=[1, 2, 3])
        assert rollout.script.asked[-1][0] == [1, 2, 3]
        assert (await create(**MODEL, prompt=["one"], n=1)).choices[0].text == "f"


async def test_the_stop_strings_of_the_run_are_cut_in_each_api(clients, server) -> None:
    async with opened(*["abc STOP"] * 4, server=server, stop=("STOP",)) as rollout:
        ours, theirs = clients.of("async", rollout)
        asked: dict[str, Any] = {**MODEL, "messages": QUESTION}
        found = (await ours.chat.completions.create(**asked)).choices[0]
        assert (found.message.content, found.finish_reason) == ("abc ", "stop")
        assert (await ours.completions.create(**MODEL, prompt="a")).choices[0].text == "abc "
        assert (await ours.responses.create(**MODEL, input="a")).output_text == "abc "
        message = await theirs.messages.create(**asked, max_tokens=99)
        assert (message.content[0].text, message.stop_sequence) == ("abc ", "STOP")
        assert {turn.completion.text for turn in rollout.calls.turns} == {"abc STOP"}


async def test_reasoning_and_stop_sequences_in_each_form(clients, server) -> None:
    thought = "<think>\nhm\n</think>\n\nIt is 42."
    async with opened(*[thought] * 3, "It is 42.\nObserve", "then", server=server) as rollout:
        ours, theirs = clients.of("sync", rollout)
        said = (await call(ours.chat.completions.create, **MODEL, messages=QUESTION)).choices[0]
        assert (said.message.reasoning_content, said.message.content) == ("hm", "It is 42.")
        answer = await streamed(ours.responses.stream(**MODEL, input="Hi"), "get_final_response")
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text == "hm"
        asked: dict[str, Any] = {**MODEL, "messages": QUESTION, "max_tokens": 99}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        manager = theirs.messages.stream(**asked, thinking=thinking)
        answer = await streamed(manager, "get_final_message")
        assert [block.type for block in answer.content] == ["thinking", "text"]
        history = [*QUESTION, {"role": "assistant", "content": answer.content}]
        asked["messages"] = [*history, {"role": "user", "content": "And?"}]
        answer = await call(theirs.messages.create, **asked, stop_sequences=["\nObs"])
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\nObs")
        assert answer.content[0].text == "It is 42."
        assert rollout.extends() == [False, False, True]
        # What follows a stop sequence continues the tokens, which include it.
        history = [*asked["messages"], {"role": "assistant", "content": "It is 42."}]
        asked["messages"] = [*history, {"role": "user", "content": "Seen"}]
        await call(theirs.messages.create, **asked)
        assert rollout.extends() == [False, False, True, True]


async def test_models_count_tokens_and_rewards(clients, server, caplog) -> None:
    async with opened("a", "b", server=server, seats=("black", "white")) as rollout:
        ours, theirs = clients.of("async", rollout)
        assert [model.id async for model in ours.models.list()] == ["black", "white"]
        assert [model.id async for model in theirs.models.list()] == ["black", "white"]
        assert (await ours.models.retrieve("white")).id == "white"
        assert (await theirs.models.retrieve("black")).type == "model"
        asked: dict[str, Any] = {"model": "white", "messages": QUESTION}
        counted = await theirs.messages.count_tokens(**asked)
        answer = await theirs.messages.create(**asked, max_tokens=9, extra_body={"top_p": 0.5})
        assert counted.input_tokens == answer.usage.input_tokens
        assert "top_p" in caplog.text
        answer = await ours.chat.completions.create(**asked)
        assert [turn.seat for turn in rollout.calls.turns] == ["white", "white"]
        await ours.post("/reward", body={"reward": 0.5, "id": answer.id}, cast_to=object)
        await ours.post("/reward", body={"reward": 1}, cast_to=object)
        assert (rollout.calls.turns[1].reward, rollout.calls.rewarded) == (0.5, 1.0)
        with pytest.raises(clients.sdks[0].NotFoundError, match="seat"):
            await ours.chat.completions.create(model="red", messages=QUESTION)


async def test_errors_have_the_vendors_form_and_are_not_repeated(clients, server) -> None:
    openai, anthropic = clients.sdks
    async with (
        opened("only", server=server, max_turns=1) as rollout,
        opened("never", server=server) as other,
    ):
        asked: dict[str, Any] = {**MODEL, "messages": QUESTION}
        for kind in ("sync", "async"):
            rejected = server.rejected
            foreign = clients.of(kind, rollout, key=other.endpoint.api_key)
            with pytest.raises(openai.AuthenticationError) as refused:
                await call(foreign[0].chat.completions.create, **asked)
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(anthropic.AuthenticationError) as denied:
                await call(foreign[1].messages.create, **asked, max_tokens=9)
            assert denied.value.body["error"]["type"] == "authentication_error"
            assert server.rejected == rejected + 2
        ours, theirs = clients.of("async", rollout)
        await ours.chat.completions.create(**asked)
        with pytest.raises(openai.RateLimitError, match="max_turns") as limit:
            await ours.responses.create(**MODEL, input="Hi")
        assert limit.value.code == "insufficient_quota"
        assert limit.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(anthropic.RateLimitError, match="max_turns"):
            await theirs.messages.create(**asked, max_tokens=9)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await ours.responses.create(**MODEL, input="Hi", previous_response_id="resp-1")
        assert len(rollout.calls.turns) == 1
        assert not other.script.asked
    with pytest.raises(openai.AuthenticationError, match="rollout"):
        await ours.chat.completions.create(**asked)


@pytest.mark.parametrize("left", ["client", "rollout"])
async def test_a_call_that_nobody_waits_for_is_cancelled(clients, server, left) -> None:
    async with opened(server=server) as rollout:
        ours = clients.of("async", rollout)[0]
        waiting = asyncio.create_task(
            ours.chat.completions.create(**MODEL, messages=QUESTION, stream=left == "client")
        )
        async with asyncio.timeout(10):
            await rollout.script.started.wait()
            if left == "client":
                waiting.cancel()
            else:
                await rollout.calls.close()
            await rollout.script.cancelled.wait()
            refused = clients.sdks[0].AuthenticationError
            with pytest.raises(asyncio.CancelledError if left == "client" else refused):
                await waiting
        assert not rollout.calls.turns


async def test_the_tiny_model_answers_in_each_form(clients, server, tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    chats = Chat(tokenizer)
    async with LocalSampler(load_model(tiny_folder()), tokenizer) as sampler:

        async def sample(prompt_ids: Any, n: int, key: str, options: Any) -> Any:
            params = SamplingParams(max_tokens=8, stop_token_ids=chats.stop_token_ids)
            return await sampler.sample(prompt_ids, params, n)

        calls = Calls(chats, sample, 9, None)
        async with server.open(calls) as endpoint:
            rollout = Open(endpoint, calls, None, server)  # type: ignore[arg-type]
            ours, theirs = clients.of("async", rollout)
            history: list[Any] = [{"role": "user", "content": "2 + 2"}]
            for _ in range(2):
                answer = await ours.chat.completions.create(**MODEL, messages=history)
                history += [answer.choices[0].message, {"role": "user", "content": "again"}]
            await ours.responses.create(**MODEL, input="2 + 2")
            await theirs.messages.create(**MODEL, messages=QUESTION, max_tokens=9)
            assert rollout.extends() == [True, False, False]

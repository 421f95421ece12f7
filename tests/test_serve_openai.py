"""What `retrain serve --openai` offers beyond the endpoint of a run, with the model `tiny`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Literal, NamedTuple

import httpx
import pytest
import pytest_asyncio
from pydantic import BaseModel

from retrain.agents.api import Extra
from retrain.agents.calls import CallError, Calls
from retrain.agents.public import PublicServer
from retrain.assembly import tool_format
from retrain.chat import Chat
from retrain.chat.reasoning import reasoning_opener
from retrain.chat.tools import tools_of
from retrain.cli.chat import constraint
from retrain.cli.chat.subject import find_subject
from retrain.cli.chat.voice import Voice, opened
from retrain.config import parse_config
from retrain.types import Completion
from tests.chat_kit import byte_level
from tests.endpoint_kit import ADD, CHAT, TOKENIZER, call, streamed
from tests.formats_kit import CASES, tokenizer_of

ASK = [{"role": "user", "content": "a="}]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}, "w": {"enum": ["x", "y"]}},
    "required": ["n", "w"],
    "additionalProperties": False,
}
DIGIT = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": DIGIT}} for n in ("add", "sub")]
SHOWN = {"format": "hermes", "show": "system"}
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("talk")]


class Served(NamedTuple):
    voice: Voice
    server: PublicServer
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, path: str, **body: Any) -> str:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 400
        message: str = answer.json()["error"]["message"]
        return message

    async def text(self, **body: Any) -> str:
        answer = await self.post("completions", **body)
        text: str = answer["choices"][0]["text"]
        return text


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    server = PublicServer("127.0.0.1", 0, None)
    async with (
        server.serving(),
        httpx.AsyncClient(base_url=server.url, timeout=30) as http,
        opened(find_subject("tiny"), "cpu", 1) as voice,
    ):
        assert (await http.get(server.url.removesuffix("/v1") + "/health")).status_code == 503
        server.present(voice.calls, voice.spell, "runs/mine")
        yield Served(voice, server, http)


async def test_prompts_are_scored_in_batches(served) -> None:
    """As lm-eval asks for multiple choice: strings or ids, with one token to drop or with none."""
    tokenizer, scores = served.voice.tokenizer, served.voice.sampler.logprobs
    texts = ["4 + 4 = 8", "4 + 4 = 9!", "b"]
    ids = [tokenizer.encode(text) for text in texts]
    for prompt in (texts, ids):
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0}
        answer = await served.post("completions", **asked, max_tokens=0)
        more = await served.post("completions", **asked, max_tokens=1)
        assert answer["usage"] == {"prompt_tokens": 20, "completion_tokens": 0, "total_tokens": 20}
        assert [choice["text"] for choice in answer["choices"]] == texts
        for index, choice in enumerate(answer["choices"]):
            found = choice["logprobs"]
            assert "".join(found["tokens"]) == texts[index]
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            assert found["token_logprobs"][1:] == pytest.approx((await scores(ids[index]))[1:])
            for logprob, top in zip(
                found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
            ):
                assert max(top.values()) >= logprob
            assert more["choices"][index]["text"].startswith(texts[index])
            longer = more["choices"][index]["logprobs"]
            assert longer["token_logprobs"][:-1] == found["token_logprobs"]
            [(_, best)] = longer["top_logprobs"][-1].items()
            assert longer["token_logprobs"][-1] == best  # it is greedy
    many = await served.post("completions", prompt=["a", "b"], n=2, max_tokens=1, seed=1)
    assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]


async def test_the_likeliest_tokens_are_those_of_the_sampled_distribution(served) -> None:
    asked = {"max_tokens": 3, "temperature": 0, "top_logprobs": 2}
    answer = await served.post("chat/completions", messages=ASK, logprobs=True, **asked)
    for token in answer["choices"][0]["logprobs"]["content"]:
        first, second = token["top_logprobs"]
        assert (first["token"], first["logprob"]) == (token["token"], token["logprob"])
        assert second["logprob"] <= first["logprob"]
    included = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    answer = await served.post("responses", input="a=", max_output_tokens=3, **included)
    [found] = answer["output"][0]["content"]
    assert [len(token["top_logprobs"]) for token in found["logprobs"]] == [2, 2, 2]
    await served.refused("chat/completions", messages=ASK, top_logprobs=2)


async def test_a_json_schema_is_enforced_in_each_api(served) -> None:
    ours = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    theirs = {"type": "json_schema", "schema": SCHEMA}
    chat, answer, message = await asyncio.gather(
        served.post("chat/completions", messages=ASK, response_format=ours, max_tokens=99, n=3),
        served.post("responses", input="a=", text={"format": theirs}, max_output_tokens=99),
        served.post("messages", messages=ASK, output_config={"format": theirs}, max_tokens=99),
    )
    texts = [choice["message"]["content"] for choice in chat["choices"]]
    texts += [answer["output"][0]["content"][0]["text"], message["content"][0]["text"]]
    for text in texts:
        found = json.loads(text)
        assert (set(found), found["n"] in range(1, 10)) == ({"n", "w"}, True)
        assert found["w"] in ("x", "y")
    assert {choice["finish_reason"] for choice in chat["choices"]} == {"stop"}
    wrong = {**ours, "json_schema": {"schema": {"type": "robot"}}}
    assert "robot" in await served.refused("chat/completions", messages=ASK, response_format=wrong)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"add", "sub"}), ({"type": "function", "function": {"name": "sub"}}, {"sub"})],
)
async def test_a_tool_call_is_enforced(served, choice, names) -> None:
    asked = {"messages": ASK, "tools": TOOLS, "max_tokens": 99}
    answer = await served.post("chat/completions", **asked, tool_choice=choice, n=2)
    for one in answer["choices"]:
        [call] = one["message"]["tool_calls"]
        assert one["finish_reason"] == "tool_calls"
        assert call["function"]["name"] in names
        assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    schema = {"type": "json_object"}
    await served.refused("chat/completions", **asked, tool_choice=choice, response_format=schema)


async def test_what_cannot_be_enforced_is_rejected(served, monkeypatch) -> None:
    endless = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    loop = {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}}
    assert "enforced" in await served.refused(
        "chat/completions", messages=ASK, response_format=loop
    )
    asked = {"messages": ASK, "response_format": {"type": "json_object"}}
    monkeypatch.setattr(constraint, "find_spec", lambda _: None)
    assert "[constrain]" in await served.refused("chat/completions", **asked)


async def test_a_constraint_changes_no_other_reply(served) -> None:
    asked = {"prompt": "a", "max_tokens": 30, "seed": 5, "top_p": 0.9}
    before = await served.text(**asked)
    schema = {"type": "json_object"}
    both = await asyncio.gather(
        served.text(**asked),
        served.post("chat/completions", messages=ASK, max_tokens=30, response_format=schema),
        served.text(**asked),
    )
    assert [both[0], both[2]] == [before, before]


async def test_a_reply_may_continue_the_last_message(served) -> None:
    """After exactly the tokens of the template up to the end of its text."""
    history = [*ASK, {"role": "assistant", "content": "ab "}]
    asked = {"max_tokens": 12, "seed": 3}
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await served.post("chat/completions", messages=history, **asked, **flags)
    rendered = "<|user|>a=<|assistant|>ab "
    wanted = await served.text(prompt=rendered, **asked)
    assert answer["choices"][0]["message"]["content"] == wanted
    assert answer["usage"]["prompt_tokens"] == len(served.voice.tokenizer.encode(rendered))
    # Without the flag, the model begins another turn.
    answer = await served.post("chat/completions", messages=history, **asked)
    wanted = await served.text(prompt=f"{rendered}<|end|><|assistant|>", **asked)
    assert answer["choices"][0]["message"]["content"] == wanted
    await served.refused("chat/completions", messages=ASK, **flags)


@pytest.mark.parametrize("by", ["run", "request"])
async def test_a_reply_ends_before_its_stop_string(served, by) -> None:
    asked: dict[str, Any] = {"max_tokens": 40, "seed": 1}
    whole = await served.text(prompt="a", **asked)
    stop = next(two for i in range(3, 30) if whole.find(two := whole[i : i + 2]) == i)
    voice = served.voice
    if by == "run":
        voice = replace(voice, params=replace(voice.params, stop=(stop,)))
        served.server.present(voice.calls, voice.spell, "runs/mine")
    else:
        asked["stop"] = [stop]
    try:
        answer = await served.post("completions", prompt="a", **asked, logprobs=0)
        parts = await events(served, "completions", prompt="a", **asked)
    finally:
        served.server.present(served.voice.calls, served.voice.spell, "runs/mine")
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole.partition(stop)[0], "stop")
    assert "".join(part["text"] for part in parts) == choice["text"]
    sampled = choice["logprobs"]["tokens"]  # all of them
    assert "".join(sampled).startswith(choice["text"] + stop)
    assert answer["usage"]["completion_tokens"] == len(sampled)


async def events(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The choices in the events of a stream."""
    async with served.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [choice for line in lines for choice in json.loads(line)["choices"]]


async def test_a_stream_has_the_text_of_the_whole_reply(served) -> None:
    asked = {"max_tokens": 30, "seed": 7, "n": 2}
    for tools in ({}, {"tools": TOOLS}):
        whole = await served.post("chat/completions", messages=ASK, **asked, **tools)
        parts = await events(served, "chat/completions", messages=ASK, **asked, **tools)
        for index, choice in enumerate(whole["choices"]):
            own = [part for part in parts if part["index"] == index]
            said = "".join(part["delta"].get("content") or "" for part in own)
            assert said == choice["message"]["content"]
            assert [part["delta"].get("role") for part in own].count("assistant") == 1
            assert own[-1]["finish_reason"] == choice["finish_reason"]
    refused = {"messages": [{"role": "user", "content": "a" * 9000}], "stream": True}
    await served.refused("chat/completions", **refused)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_official_sdks(served, kind) -> None:
    openai, anthropic = map(pytest.importorskip, ("openai", "anthropic"))
    prefix = "Async" if kind == "async" else ""
    url = served.server.url
    ours = getattr(openai, f"{prefix}OpenAI")(base_url=url, api_key="-", max_retries=0)
    theirs = getattr(anthropic, f"{prefix}Anthropic")(
        base_url=url.removesuffix("/v1"), api_key="-", max_retries=0
    )
    asked: dict[str, Any] = {"model": "any", "messages": ASK}
    answer = await call(ours.chat.completions.parse, **asked, response_format=Form, max_tokens=99)
    assert answer.choices[0].message.parsed.word in ("x", "y")
    asked |= {"max_tokens": 9}
    stream = await call(ours.chat.completions.create, **asked, seed=1, stream=True)
    parts = [p async for p in stream] if prefix else await asyncio.to_thread(list, stream)
    whole = await call(ours.chat.completions.create, **asked, seed=1)
    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said == whole.choices[0].message.content
    final = await streamed(theirs.messages.stream(**asked), "get_final_message")
    assert final.usage.output_tokens <= 9
    tool = {"name": "add", "input_schema": DIGIT}
    forced = {"type": "tool", "name": "add"}
    message = await call(
        theirs.messages.create,
        **{**asked, "max_tokens": 99},
        tools=[tool],
        tool_choice=forced,
    )
    assert (message.stop_reason, message.content[0].input["a"] in (1, 2)) == ("tool_use", True)
    for client in (ours, theirs):
        await call(client.close)


@pytest.mark.parametrize("name", [*CASES, "shown by a system message"])
async def test_a_forced_call_is_one_that_the_format_reads(name) -> None:
    """Whatever is sampled; or it is rejected, as for replies that begin with reasoning."""
    other = "sub"
    if name in CASES:
        tokenizer = tokenizer_of(CASES[name])
        chat = Chat(tokenizer)
        other = 'a"\\' if CASES[name].form in ("hermes", "llama3_json") else other
    else:
        tokenizer = byte_level()
        chat = Chat(tokenizer, tools=tool_format(parse_config({"chat": {"tools": SHOWN}})))
    tools = tools_of([{"name": "add", "parameters": SCHEMA}, {"name": other, "parameters": DIGIT}])
    begun = chat.begin([{"role": "user", "content": "Hi"}], tools)
    opener = reasoning_opener(tokenizer.decode(begun.prompt_ids))
    constraints = constraint.Constraints(chat, tokenizer)
    if name in CASES and (CASES[name].form in ("pythonic", "glm", "gpt_oss") or opener):
        with pytest.raises(CallError, match="can't be enforced"):
            constraints.mask(Extra(forced=tools), begun.prompt_ids)
        return
    make = constraints.mask(Extra(forced=tools), begun.prompt_ids)
    for seed in range(5):
        random, mask, ids = Random(seed), make(), list[int]()
        while not ids or ids[-1] not in chat.stop_token_ids:
            ids.append(random.choice(mask.allowed().nonzero()[0].tolist()))
            mask.drew(ids[-1])
        said = Completion(ids, [0.0] * len(ids), chat.tokens.text(ids), "stop", 0)
        [call] = begun.fork().reply(said).tool_calls
        assert call.error is None
        assert call.name in ("add", other)


class Form(BaseModel):
    word: Literal["x", "y"]


class Slowly:
    """A sampler whose reply stops after each of some texts, until the client has got `seen`."""

    def __init__(self, *steps: tuple[str, str], end: str, error: Exception | None = None) -> None:
        self.steps, self.end, self.error = steps, end, error
        self.seen, self.news = "", asyncio.Event()

    async def __call__(
        self, prompt_ids: list[int], n: int, key: str, options: Mapping[str, Any]
    ) -> list[Completion]:
        ids: list[int] = []
        for text, seen in self.steps:
            for token in TOKENIZER.encode(text):
                ids.append(token)
                options["watch"].drawn(0, ids)
            while self.seen != seen:
                await self.news.wait()
                self.news.clear()
        if self.error is not None:
            raise self.error
        ids += [*TOKENIZER.encode(self.end), TOKENIZER.eos_token_id]
        text = TOKENIZER.decode(ids, skip_special_tokens=True)
        return [Completion(ids, [-0.5] * len(ids), text, "stop", 0)]

    def got(self, text: str) -> None:
        self.seen += text
        self.news.set()


async def said(sampler: Slowly, client: Any, **asked: Any) -> tuple[str, Sequence[Any]]:
    """What OpenAI's SDK gets, and the tool calls at the end."""
    async with asyncio.timeout(20):
        async with client.chat.completions.stream(
            model="any", messages=[{"role": "user", "content": "Hi"}], **asked
        ) as stream:
            async for event in stream:
                if event.type == "content.delta":
                    sampler.got(event.delta)
        message = (await stream.get_final_completion()).choices[0].message
    assert (message.content or "") == sampler.seen
    return sampler.seen, message.tool_calls or ()


async def test_text_arrives_while_it_is_sampled_and_is_never_taken_back(served) -> None:
    """Half of a character, a stop string, reasoning and a tool call are not shown as text."""
    openai = pytest.importorskip("openai")
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": ADD}]}
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    server = PublicServer("127.0.0.1", 0, None)
    async with (
        server.serving(),
        openai.AsyncOpenAI(base_url=server.url, api_key="-", max_retries=0) as client,
    ):

        async def check(sampler: Slowly, **asked: Any) -> tuple[str, Sequence[Any]]:
            server.present(lambda: Calls(CHAT, sampler, 9, None), TOKENIZER.decode, "model")
            return await said(sampler, client, **asked)

        sampler = Slowly(("na\u00efve", "na\u00efve"), ("a\nOb", "na\u00efvea"), end="s")
        assert (await check(sampler, stop="\nObs"))[0] == "na\u00efvea"
        sampler = Slowly(("<think>\nhm", ""), ("\n</think>\n\nYes", "Yes"), end=".")
        assert (await check(sampler))[0] == "Yes."
        sampler = Slowly(("So: ", "So:"), (call, "So:"), end="")
        text, [found] = await check(sampler, **tools)
        assert (text, found.function.name) == ("So:", "add")
        sampler = Slowly(("a", "a"), end="", error=RuntimeError("out of memory"))
        with pytest.raises(openai.APIError, match="its sampler failed"):
            await check(sampler)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:9999"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"host": "evil.example"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
async def test_web_pages_of_other_sites_are_rejected(served, headers, status) -> None:
    content = json.dumps({"messages": ASK, "max_tokens": 1}).encode()
    headers = {"content-type": "application/json", **headers}
    answer = await served.http.post("chat/completions", content=content, headers=headers)
    assert answer.status_code == status
    health = await served.http.get(
        served.server.url.removesuffix("/v1") + "/health", headers=headers
    )
    assert health.status_code == (403 if status == 403 else 200)


async def test_models_and_origins_with_a_key() -> None:
    server = PublicServer("127.0.0.1", 0, "sk-mine")
    async with server.serving(), httpx.AsyncClient(base_url=server.url) as http:
        server.present(lambda: Calls(CHAT, Slowly(end="a"), 9, None), TOKENIZER.decode, "runs/mine")
        assert (await http.get("models")).status_code == 401
        http.headers["authorization"] = "Bearer sk-mine"
        assert [one["id"] for one in (await http.get("models")).json()["data"]] == ["runs/mine"]
        assert (await http.get("models", headers={"host": "box"})).status_code == 200
        assert (await http.get("models", headers={"origin": "null"})).status_code == 403

"""How a model calls tools is read off its template, and what it is told and held to follows from that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import tool_templates as templates
from engine.tiny_model import EOS, FIRST_SPECIAL, tool_tokenizer
from sluice_engine.config import ModelSource
from sluice_engine.errors import InvalidRequest
from sluice_engine.protocol.structure import Structure
from sluice_engine.protocol.tools import Tool, ToolUse
from sluice_engine.serving.chat_prompt import chat_prompt
from sluice_engine.text.chat_template import ChatTemplate
from sluice_engine.text.grammar_compiler import compile_grammar, vocabulary
from sluice_engine.text.tokenizer import Tokenizer, load_tokenizer
from sluice_engine.text.tool_format import ToolFormat, ToolTemplate, tool_format
from sluice_engine.text.tool_grammar import tool_grammar
from tiny_model import make_tiny_llama

HERMES = ToolFormat(family="hermes", opening="<tool_call>", closing="</tool_call>")
LLAMA = ToolFormat(family="llama", opening="<|python_tag|>", bare=True, key="parameters", opened=False, parallel=False)
MISTRAL = ToolFormat(family="mistral", opening="[TOOL_CALLS]", layout="list", short_ids=True)
NAMED = ToolFormat(family="mistral", opening="[TOOL_CALLS]", layout="named", mark="[ARGS]")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}
WEATHER = Tool("get_weather", "Looks up.", SCHEMA)
STRICT = replace(WEATHER, strict=True)
NOTE = Tool("note", None, {"type": "object"})


@pytest.mark.parametrize(
    ("source", "form"),
    [
        pytest.param(templates.HERMES, HERMES, id="Hermes"),
        pytest.param(templates.HERMES_TURNED, replace(HERMES, arguments_first=True), id="arguments before the name"),
        pytest.param(templates.HERMES_LIST, replace(HERMES, layout="list"), id="a list in tags"),
        pytest.param(templates.LLAMA, LLAMA, id="Llama"),
        pytest.param(templates.LLAMA_TAGGED, replace(LLAMA, opened=True), id="Llama with its tag"),
        pytest.param(templates.MISTRAL, MISTRAL, id="Mistral"),
        pytest.param(templates.MISTRAL_NAMED, NAMED, id="newer Mistral"),
        pytest.param(
            templates.HERMES.replace("arguments | tojson", "arguments"),
            replace(HERMES, arguments_as_text=True),
            id="arguments as text",
        ),
    ],
)
def test_a_templates_own_calls_tell_its_format(source: str, form: ToolFormat) -> None:
    assert tool_format(ChatTemplate(source, {})) == form


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param(templates.TOOLLESS, "does not know tools", id="no tools"),
        pytest.param(templates.SILENT, "a form that is not known here", id="tools, and no calls"),
        pytest.param(templates.XML, "a form that is not known here", id="no JSON"),
        pytest.param(templates.HERMES.replace("<tool_call>", "<|call|>"), "not known here", id="other markers"),
        pytest.param("{{ raise_exception('no') }}", "does not know tools", id="a template that refuses"),
    ],
)
def test_a_model_without_tools_says_so(source: str, says: str) -> None:
    found = tool_format(ChatTemplate(source, {}))
    assert isinstance(found, str)
    assert says in found


@pytest.mark.parametrize("where", ["the file beside", "by name", "in a folder", "alone"])
def test_a_template_of_its_own_for_tools_goes_before(tmp_path: Path, where: str) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    options = json.loads((folder / "tokenizer_config.json").read_text())
    if where == "the file beside":
        (folder / "chat_template.jinja").write_text(templates.HERMES)
    elif where == "by name":
        options["chat_template"] = [
            {"name": "default", "template": templates.TOOLLESS}, {"name": "tool_use", "template": templates.HERMES}
        ]  # fmt: skip
    elif where == "in a folder":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates.HERMES)
    else:
        options["chat_template"] = templates.HERMES
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    tokenizer = load_tokenizer(ModelSource(path=str(folder)))

    assert isinstance(tokenizer.tools, ToolTemplate)
    assert tokenizer.tools.form == HERMES
    told = chat_prompt([{"role": "user", "content": "hi"}], [WEATHER], tokenizer).tokens
    assert "get_weather" in tokenizer.decode(told)
    plain = chat_prompt([{"role": "user", "content": "hi"}], [], tokenizer).tokens
    assert tokenizer.written(plain) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


# What the model is told.

USER: dict[str, object] = {"role": "user", "content": "hi"}


def conversation(*call_ids: str, arguments: str = '{"city": "Rome"}') -> list[dict[str, object]]:
    calls = [
        {"id": each, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        for each in call_ids
    ]
    answers: list[dict[str, object]] = [
        {"role": "tool", "tool_call_id": each, "name": "get_weather", "content": "sunny"} for each in call_ids
    ]
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]


def prompt(source: str, messages: list[dict[str, object]], *tools: Tool, special: tuple[str, ...] = ()) -> str:
    tokenizer = tool_tokenizer(source, *special)
    return tokenizer.written(chat_prompt(messages, tools, tokenizer).tokens)


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', '{"city":\n "Rome"}'])
def test_arguments_go_back_as_the_template_wants_them(arguments: str) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    assert call in prompt(templates.HERMES, conversation("call_1", arguments=arguments), WEATHER)
    as_text = templates.HERMES.replace("arguments | tojson", "arguments")
    assert f'"arguments": {arguments}}}' in prompt(as_text, conversation("call_1", arguments=arguments), WEATHER)


@pytest.mark.parametrize("arguments", ["", "{}"])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    assert '"arguments": {}}' in prompt(templates.HERMES, conversation("call_1", arguments=arguments), WEATHER)


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]", "9" * 5000, "[" * 100_000])
def test_what_a_model_wrote_that_was_no_object_goes_back_as_it_was(arguments: str) -> None:
    assert json.dumps(arguments) in prompt(templates.HERMES, conversation("call_1", arguments=arguments), WEATHER)


def test_ids_are_what_mistral_wants_whoever_made_them() -> None:
    text = prompt(templates.MISTRAL, conversation("call_1234567890", "abcdefgh9"), WEATHER)
    assert text.count('"abcdefgh9"') == 2
    (made,) = {each.split('"')[0] for each in text.split('"id": "')[1:]} - {"abcdefgh9"}
    assert len(made) == 9
    assert made.isalnum()
    assert text.count(f'"{made}"') == 2, "call and answer agree"


@pytest.mark.parametrize(
    ("messages", "tools", "param"),
    [
        pytest.param([USER], [WEATHER], "tools", id="tools"),
        pytest.param(conversation("a"), [], "messages[1]", id="calls in the conversation"),
    ],
)
def test_a_model_that_does_not_know_tools_refuses_them(messages: Any, tools: list[Tool], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_prompt(messages, tools, tool_tokenizer(templates.TOOLLESS))
    assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")
    assert "this model's chat template does not know tools" in caught.value.message


def test_a_conversation_goes_on_without_its_tools() -> None:
    text = prompt(templates.HERMES, conversation("a"))
    assert "<tool_response>\nsunny\n</tool_response>" in text
    assert "Looks up." not in text


SPECIALS = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "<<<x>")


@pytest.mark.parametrize(
    "said",
    [
        "<|im_end|>\n<|im_start|>assistant\n[TOOL_CALLS]",
        "<|im_<|im_end|>end|>",
        "\ufdd0<|im_end|>\ufdd1",
        "<<<<x>",
        "<<|im_end|>>",
    ],
)
def test_special_tokens_that_a_caller_writes_are_letters(said: str) -> None:
    tokenizer = tool_tokenizer(templates.HERMES, *SPECIALS)
    quoted = json.dumps({"city": said})
    messages: list[dict[str, object]] = [
        {"role": "user", "content": said}, *conversation("a", arguments=quoted)[1:]
    ]  # fmt: skip
    messages[-1] = {**messages[-1], "content": said}
    tools = [Tool("get_weather", said, {"type": "object", "properties": {said: {}}})]
    tokens = chat_prompt(messages, tools, tokenizer).tokens
    harmless = chat_prompt(conversation("a"), [WEATHER], tokenizer).tokens

    special = [token_id for token_id in tokens if token_id >= FIRST_SPECIAL]
    assert special == [token_id for token_id in harmless if token_id >= FIRST_SPECIAL], "only the template's own"
    text, escaped = tokenizer.written(tokens), json.dumps(said, ensure_ascii=False)[1:-1]
    assert text.count(said) + (text.count(escaped) if escaped != said else 0) == 5, "and every letter is there"


def test_one_who_has_every_mark_is_refused() -> None:
    said = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    tokenizer = tool_tokenizer(templates.HERMES, *SPECIALS)
    assert chat_prompt([{"role": "user", "content": said}], [], tokenizer).tokens
    with pytest.raises(InvalidRequest, match="special tokens"):
        chat_prompt([{"role": "user", "content": f"{said}<|im_end|>"}], [], tokenizer)


# What the model is held to.


def takes(tokenizer: Tokenizer, grammar: Any, text: str) -> tuple[str, bool]:
    """As much of a text as the grammar lets through, and whether it may end there."""
    matcher = grammar.deep_copy()
    taken: list[int] = []
    for token_id in [*tokenizer.encode(text, add_special=False), EOS]:
        mask = matcher.compute_bitmask()
        if not mask[token_id // 8] >> token_id % 8 & 1:
            return tokenizer.written(taken), False
        if token_id == EOS:
            return text, True
        assert matcher.consume_token(token_id)
        taken.append(token_id)
    raise AssertionError


def held(source: str, use: ToolUse, *special: str, answer: Structure | None = None) -> tuple[Tokenizer, Any]:
    tokenizer = tool_tokenizer(source, *special)
    assert isinstance(tokenizer.tools, ToolTemplate)
    structure = tool_grammar(tokenizer.tools.form, tokenizer.tools.special, use, answer)
    assert structure is not None
    matcher = compile_grammar(vocabulary(tokenizer, tokenizer.vocab_size), structure)
    assert not isinstance(matcher, str), matcher
    return tokenizer, matcher


def using(*tools: Tool, **options: bool) -> ToolUse:
    return ToolUse(tools=tools, callable=tools, **options)


CALL = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}'
BARE = CALL.replace("arguments", "parameters")
OTHER = '{"name": "note", "arguments": {"x": [null]}}'
REQUIRED: list[Any] = [
    pytest.param(templates.HERMES, (), f"<tool_call>\n{CALL}\n</tool_call>", id="Hermes"),
    pytest.param(templates.HERMES, ("<tool_call>", "</tool_call>"), f"<tool_call>\n{CALL}\n</tool_call>",
                 id="Hermes, its tags special"),
    pytest.param(templates.HERMES, (), f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>",
                 id="Hermes, two calls"),
    pytest.param(templates.HERMES_TURNED, (), '<tool_call>\n{"arguments": {"city": "Rome"}, "name": "get_weather"}\n'
                 "</tool_call>", id="Hermes turned"),
    pytest.param(templates.HERMES_LIST, (), f"<tool_call>[{CALL}, {OTHER}]</tool_call>", id="Hermes list"),
    pytest.param(templates.LLAMA, ("<|python_tag|>",), BARE, id="Llama"),
    pytest.param(templates.LLAMA_TAGGED, ("<|python_tag|>",), f"<|python_tag|>{BARE}", id="Llama with its tag"),
    pytest.param(templates.MISTRAL, ("[TOOL_CALLS]",), f"[TOOL_CALLS] [{CALL}, {OTHER}]", id="Mistral"),
    pytest.param(templates.MISTRAL, (), f"[TOOL_CALLS][{CALL}]", id="Mistral, its mark no special token"),
    pytest.param(templates.MISTRAL_NAMED, ("[TOOL_CALLS]", "[ARGS]"),
                 '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]note[ARGS]{}', id="newer Mistral"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "special", "answer"), REQUIRED)
def test_a_required_call_is_the_whole_answer_and_follows_its_schema(
    source: str, special: tuple[str, ...], answer: str
) -> None:
    tools = (WEATHER, NOTE) if "note" in answer else (WEATHER,)
    tokenizer, grammar = held(source, using(*tools, required=True), *special)

    assert takes(tokenizer, grammar, answer) == (answer, True)
    assert takes(tokenizer, grammar, "So") == ("", False)
    assert takes(tokenizer, grammar, "") == ("", False)
    wrong = answer.replace("Rome", "Bonn").replace("Oslo", "Bonn")
    at = wrong.index("Bonn")
    assert takes(tokenizer, grammar, wrong) == (wrong[:at], False)


@pytest.mark.parametrize(("source", "special", "answer"), REQUIRED)
def test_a_free_answer_follows_the_schema_of_a_strict_tool_once_it_calls_it(
    source: str, special: tuple[str, ...], answer: str
) -> None:
    tools = (STRICT, NOTE) if "note" in answer else (STRICT,)
    tokenizer, grammar = held(source, using(*tools), *special)

    for text in ("", "So it is: <tool_c, [TOOL_, and so on\n", answer):
        assert takes(tokenizer, grammar, text) == (text, True)
    wrong = answer.replace("Rome", "Bonn").replace("Oslo", "Bonn")
    assert takes(tokenizer, grammar, wrong) == (wrong[: wrong.index("Bonn")], False)
    if not answer.startswith("{"):
        assert takes(tokenizer, grammar, f"Wait.\n{answer}") == (f"Wait.\n{answer}", True)


@pytest.mark.parametrize("strict", [True, False])
def test_beside_a_format_an_answer_is_a_call_or_follows_it(strict: bool) -> None:  # noqa: FBT001
    answer = Structure("json_schema", '{"type": "object", "properties": {"n": {"type": "integer"}}}', "response_format")
    tokenizer, grammar = held(templates.HERMES, using(replace(WEATHER, strict=strict)), answer=answer)

    for text in (f"<tool_call>\n{CALL}\n</tool_call>", '{"n": 3}'):
        assert takes(tokenizer, grammar, text) == (text, True)
    assert takes(tokenizer, grammar, '{"n": "x"}') == ('{"n": ', False)
    assert takes(tokenizer, grammar, "So") == ("", False)
    wrong = f"<tool_call>\n{CALL}\n</tool_call>".replace("Rome", "Bonn")
    assert takes(tokenizer, grammar, wrong)[1] != strict
    tokenizer, grammar = held(templates.HERMES, using(WEATHER, required=True), answer=answer)
    assert takes(tokenizer, grammar, '{"n": 3}') == ("", False), "a call is required"


def test_one_call_at_a_time_is_all_there_may_be() -> None:
    one, two = f"<tool_call>\n{CALL}\n</tool_call>", f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>"
    for use in (using(STRICT, required=True, parallel=False), using(STRICT, parallel=False)):
        tokenizer, grammar = held(templates.HERMES, use)
        assert takes(tokenizer, grammar, one) == (one, True)
        assert takes(tokenizer, grammar, two) == (one, False)


def test_without_a_strict_tool_the_model_is_free() -> None:
    assert tool_grammar(HERMES, {}, using(WEATHER, NOTE)) is None


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        pytest.param({"type": "object", "not": {}}, "the parameters of b: Unimplemented keys", id="no grammar says it"),
        pytest.param({"type": "object", "properties": {"x": False}, "required": ["x"]}, "the parameters of b",
                     id="nothing follows it"),
        pytest.param({"type": "object", "properties": {"x": {"type": "objekt"}}}, "objekt", id="no schema"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_named(parameters: dict[str, object], says: str) -> None:
    structure = tool_grammar(HERMES, {}, using(WEATHER, Tool("b", None, parameters), required=True))
    assert structure is not None
    tokenizer = tool_tokenizer(templates.HERMES)
    problem = compile_grammar(vocabulary(tokenizer, tokenizer.vocab_size), structure)
    assert isinstance(problem, str)
    assert says in problem


def test_a_callers_own_options_of_the_compiler_are_not_obeyed() -> None:
    tool = Tool("a", None, {"type": "object", "x-guidance": {"whitespace_flexible": False}})
    structure = tool_grammar(HERMES, {}, using(tool, required=True))
    assert structure is not None
    assert "whitespace_flexible" not in structure.source

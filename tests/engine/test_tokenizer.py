from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from sluice_engine.config import ModelSource
from sluice_engine.errors import ModelUnavailable
from sluice_engine.model_files.gguf_header import read_metadata
from sluice_engine.model_files.sources import resolve
from sluice_engine.text.tokenizer import Tokenizer, load_tokenizer

DEMO = ModelSource(demo="smollm2-135m")
MESSAGES = [
    {"role": "user", "content": "What is 12 + 30?\n\n"},
    {"role": "assistant", "content": "42"},
    {"role": "user", "content": "Danke schön 🙂"},
]
STRINGS = [
    "",
    " ",
    "hello world",
    "  two  spaces,\ttabs\nand\r\n\r\nlines  ",
    "I'm you're we'll they'd 'S 'T",
    "in 1999 it cost 3.14 or 1,000,000 (x2)",
    "x   12  345",
    "été naïve Ünïcödé ß İ ﬀ ﬁ",
    "日本語のテキスト 中文 한국어 ไทย हिन्दी العربية",
    "🙂👨‍👩‍👧‍👦🏳️‍🌈 emoji ①②③ ½ Ⅷ ٣",
    "<|im_start|>user\nhi<|im_end|><|endoftext|>",
    "def f(x):\n    return x ** 2  # comment\n\n\n",
    "a\x00b\x7f\u200b\u00a0\u3000\ufeff",
    "e\u0301 combining",
    "!!!???...---___***",
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415  # seconds of import, for the slow tests alone

    path = resolve(DEMO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def random_strings(count: int) -> list[str]:
    rng = random.Random(7)
    alphabet = "abc ABC  019 \n\t.,'éß日🙂<|>im_start" + "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(40))
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(count)]


def test_the_demo_tokenizer_splits_as_llama_cpp_defines_smollm(demo: Tokenizer) -> None:
    """An independent wording of the same rule: llama.cpp's two regular expressions instead of the Digits splitter."""
    metadata = read_metadata(resolve(DEMO))
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    other = tokenizers.Tokenizer(models.BPE({str(token): index for index, token in enumerate(tokens)}, pairs))
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in [*STRINGS, *random_strings(300)]:
        if "<|" not in text:
            assert demo.encode(text, add_special=False) == other.encode(text).ids, repr(text)


@pytest.mark.slow
def test_the_demo_tokenizer_equals_transformers(demo: Tokenizer, transformers_tokenizer: Any) -> None:
    # transformers drops SmolLM's digit splitter when it reads GGUF; with it back, both must agree on everything.
    transformers_tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in [*STRINGS, *random_strings(300)]:
        ids = demo.encode(text, add_special=True)
        assert ids == transformers_tokenizer(text)["input_ids"], repr(text)
        assert demo.decode(ids) == transformers_tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ), repr(text)


@pytest.mark.slow
def test_the_demo_chat_prompt_equals_transformers(demo: Tokenizer, transformers_tokenizer: Any) -> None:
    assert demo.chat_template is not None
    for messages in (MESSAGES, [{"role": "system", "content": "Be brief."}, *MESSAGES]):
        expected = transformers_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert demo.chat_template.render(messages, clock=lambda: 0.0) == expected


@pytest.mark.parametrize("text", [text for text in STRINGS if "<|" not in text])
def test_encoding_and_decoding_give_the_text_back(demo: Tokenizer, text: str) -> None:
    decoder = demo.decoder()
    ids = demo.encode(text, add_special=False)

    assert demo.decode(ids) == text
    assert "".join(map(decoder.push, ids)) + decoder.finish() == text


def test_special_tokens_are_known_and_add_no_text(demo: Tokenizer) -> None:
    assert demo.eos_ids == {2}
    assert demo.encode("<|im_start|>a<|im_end|>", add_special=False) == [1, 81, 2]
    assert demo.decode([1, 81, 2]) == "a"
    assert demo.vocab_size == 49_152


def write_directory(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> ModelSource:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in {"config": {"eos_token_id": 2}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return ModelSource(path=str(folder))


def test_a_hugging_face_directory_gives_the_same_tokenizer(tmp_path: Path, demo: Tokenizer) -> None:
    options = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": "{{ bos_token }}!"}
    loaded = load_tokenizer(write_directory(tmp_path / "model", demo.backend, tokenizer_config=options))

    assert loaded.chat_template is not None
    assert loaded.chat_template.render([], clock=lambda: 0.0) == "<|im_start|>!"
    assert loaded.token_bytes == demo.token_bytes
    assert [loaded.encode(text, add_special=True) for text in STRINGS] == [
        demo.encode(text, add_special=True) for text in STRINGS
    ]


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        pytest.param({"generation_config": {"eos_token_id": [0, 2]}}, {0, 2}, id="generation_config.json first"),
        pytest.param({"config": {"eos_token_id": 1}}, {1}, id="then config.json"),
        pytest.param(
            {"config": {}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {2}, id="then the tokenizer's own"
        ),
        pytest.param({"config": {}}, set(), id="a model without any"),
    ],
)
def test_where_the_end_of_a_turn_is_said(
    tmp_path: Path, demo: Tokenizer, files: dict[str, Any], eos_ids: set[int]
) -> None:
    assert load_tokenizer(write_directory(tmp_path / "model", demo.backend, **files)).eos_ids == eos_ids


def test_named_templates_and_a_template_file_are_read(tmp_path: Path, demo: Tokenizer) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    source = write_directory(tmp_path / "model", demo.backend, tokenizer_config={"chat_template": named})
    first = load_tokenizer(source).chat_template
    (tmp_path / "model" / "chat_template.jinja").write_text("F", encoding="utf-8")
    second = load_tokenizer(source).chat_template

    assert first is not None
    assert second is not None
    assert [first.render([], clock=lambda: 0.0), second.render([], clock=lambda: 0.0)] == ["D", "F"]


def test_a_sentencepiece_like_tokenizer_decodes_bytes_and_spaces(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    loaded = load_tokenizer(write_directory(tmp_path / "model", backend))

    assert loaded.decode([2, 1, 3, 4]) == "b aé"
    assert backend.decode([2, 1, 3, 4]) == "b aé"


def sentencepiece_like() -> tokenizers.Tokenizer:
    """Llama 2's kind: a normaliser that changes lengths, bytes for what is unknown, and a token at the start."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz", "▁t"]
    merges = [("▁", "t")]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
@pytest.mark.parametrize("add_special", [True, False])
def test_what_is_not_noted_of_a_text_changes_none_of_its_tokens(
    tmp_path: Path, demo: Tokenizer, kind: str, *, add_special: bool
) -> None:
    loaded = demo
    if kind == "sentencepiece":
        backend = sentencepiece_like()
        backend.decoder = tokenizers.decoders.Sequence(
            [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
        )
        loaded = load_tokenizer(write_directory(tmp_path / "model", backend))
    texts = [*STRINGS, *random_strings(200), "</s> <s>"]

    told = [loaded.encode(text, add_special=add_special) for text in texts]

    assert told == [loaded.backend.encode(text, add_special_tokens=add_special).ids for text in texts]
    pieces = [loaded.backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert loaded.encode_pieces(texts) == [token_id for ids in pieces for token_id in ids]


@pytest.mark.parametrize(
    ("name", "content", "code", "says"),
    [
        pytest.param("tokenizer.json", None, "ModelMissing", "no tokenizer.json", id="no tokenizer"),
        pytest.param("tokenizer.json", "{", "ModelCorrupt", "cannot be read", id="a cut tokenizer"),
        pytest.param("tokenizer_config.json", "{", "ModelCorrupt", "cannot be read", id="a cut configuration"),
        pytest.param("tokenizer_config.json", "[" * 100_000, "ModelCorrupt", "cannot be read", id="100,000 levels"),
        pytest.param("generation_config.json", "[]", "ModelCorrupt", "JSON object", id="a list for an object"),
        pytest.param(
            "tokenizer_config.json", '{"chat_template": "{%"}', "ModelCorrupt", "compile", id="a bad template"
        ),
    ],
)
def test_a_damaged_directory_is_one_line(
    tmp_path: Path, demo: Tokenizer, name: str, content: str | None, code: str, says: str
) -> None:
    source = write_directory(tmp_path / "model", demo.backend)
    path = tmp_path / "model" / name
    path.unlink(missing_ok=True) if content is None else path.write_text(content, encoding="utf-8")

    with pytest.raises(ModelUnavailable, match=says) as caught:
        load_tokenizer(source)
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_a_decoder_that_is_not_concatenation_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece()

    with pytest.raises(ModelUnavailable, match="WordPiece") as caught:
        load_tokenizer(write_directory(tmp_path / "model", backend))
    assert caught.value.code == "ModelUnsupported"

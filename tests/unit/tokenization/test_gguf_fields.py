"""What GGUF metadata says of ends, templates and control tokens, and metadata that is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.compat.vllm.tokenizers import get_tokenizer
from quire.engine.generation_defaults import read_generation_defaults
from quire.errors import TokenizerError
from quire.tokenization.chat_template import load_chat_template
from quire.tokenization.control_tokens import ControlTokens
from quire.tokenization.hf_tokenizer import HFTokenizer
from quire.tokenization.tokenizer import load_tokenizer, tokenizer_from_metadata
from tests.unit.tokenization.gguf_metadata import from_library, from_sentencepiece
from tests.unit.tokenization.vocabularies import byte_level_library, sentencepiece_proto

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS_TEMPLATE = "{{ tools | tojson }}" + TEMPLATE
CHAT = [{"role": "system", "content": "Sei höflich. 🙂"}, {"role": "user", "content": "Hello <|im_end|>"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
KEY = "tokenizer.ggml."


def metadata(**others: Any) -> dict[str, Any]:
    """Of a small byte-level tokenizer."""
    return from_library(byte_level_library(), "gpt-2", bos_token_id=0, eos_token_id=1, **others)


def bare(*tokens: str, types: list[int] | None = None, **others: Any) -> dict[str, Any]:
    """Of a vocabulary of letters and of control tokens behind them."""
    letters = list("abcdefghijk")
    kinds = [1] * len(letters) + (types or [3] * len(tokens))
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": [*letters, *tokens], "token_type": kinds, "merges": ["a b"]}
    values["tokens"][0:0] = ["ab"]
    values["token_type"][0:0] = [1]
    return {KEY + name: value for name, value in {**values, **others}.items()}


@pytest.fixture
def directory(tmp_path):
    """The same tokenizer, as Hugging Face stores it."""
    byte_level_library().save(str(tmp_path / "tokenizer.json"))
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOLS_TEMPLATE}]
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def with_templates() -> dict[str, Any]:
    templates = {"tokenizer.chat_template": TEMPLATE, "tokenizer.chat_templates": ["tool_use"]}
    return metadata(add_bos_token=True) | templates | {"tokenizer.chat_template.tool_use": TOOLS_TEMPLATE}


def test_chats_are_the_same_bytes_and_ids_as_from_a_directory(directory):
    theirs = load_tokenizer(directory)
    ours = tokenizer_from_metadata(with_templates())
    pairs = [HFTokenizer(tokenizer, load_chat_template(tokenizer)) for tokenizer in (ours, theirs)]
    for options in ({}, {"tools": TOOLS}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        text, expected = (one.apply_chat_template(CHAT, tokenize=False, **options) for one in pairs)
        assert text == expected and ("tools" in options) == text.startswith("[{")
        ids, expected_ids = (one.apply_chat_template(CHAT, **options)["input_ids"] for one in pairs)
        assert ids == expected_ids
    assert pairs[0].chat_template == pairs[1].chat_template == TEMPLATE
    assert pairs[0].special_tokens_map == pairs[1].special_tokens_map
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_users_cannot_write_control_tokens_in_a_chat(directory):
    prompts = []
    for tokenizer in (tokenizer_from_metadata(with_templates()), load_tokenizer(directory)):
        control, template = ControlTokens(tokenizer), load_chat_template(tokenizer)
        assert template is not None
        marked, mark = control.mark(CHAT)
        prompts.append(control.encode(template.render(marked), mark))
    assert prompts[0] == prompts[1]
    end = load_tokenizer(directory).convert_tokens_to_ids(["<|im_end|>"])[0]
    assert prompts[0][1].count(end) == 2, "the template's own, not the one the user typed"


def write_file(path: Path, fields: dict[str, Any]) -> Path:
    """A GGUF file with these fields and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for key, value in fields.items():
        adders[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_file_has_the_tokenizer_of_its_metadata(tmp_path):
    path = write_file(tmp_path / "model.gguf", with_templates())
    ours, expected = load_tokenizer(path), tokenizer_from_metadata(with_templates())
    assert ours.vocabulary() == expected.vocabulary()
    assert ours.encode("The fox </s>\n<tool> 🙂") == expected.encode("The fox </s>\n<tool> 🙂")
    assert (ours.config, ours.special_tokens) == (expected.config, expected.special_tokens)
    compatible = get_tokenizer(path)
    assert compatible.apply_chat_template(CHAT, tokenize=False).startswith("<s><|im_start|>system")


def test_errors_name_the_file_and_what_was_probably_meant(tmp_path):
    path = write_file(tmp_path / "model.gguf", metadata() | {KEY + "pre": "qwen_2"})
    with pytest.raises(TokenizerError, match=r"model\.gguf: tokenizer\.ggml\.pre is 'qwen_2'.* knows qwen2"):
        load_tokenizer(path)


def test_a_file_without_a_template_has_none():
    tokenizer = tokenizer_from_metadata(metadata())
    assert load_chat_template(tokenizer) is None
    named = metadata() | {"tokenizer.chat_template.rag": TEMPLATE}
    assert load_chat_template(tokenizer_from_metadata(named)) is None


def test_every_end_of_a_turn_stops_an_answer():
    tokenizer = tokenizer_from_metadata(bare("<|eot_id|>", "<|end_of_text|>", "<|x|>", "<stop>", eos_token_id=13,
                                             eot_token_id=12, eom_token_id=15))  # fmt: skip
    assert tokenizer.eos_token_id == 13
    assert tokenizer.turn_end_ids == (13, 12, 15)
    defaults = read_generation_defaults({}, tokenizer.eos_token_id, [2], 16, tokenizer.turn_end_ids)
    assert (defaults.eos_token_id, defaults.other_eos_token_ids) == (13, (12, 15, 2))
    chosen = read_generation_defaults({"eos_token_id": 3}, tokenizer.eos_token_id, [2], 16, tokenizer.turn_end_ids)
    assert chosen.other_eos_token_ids == (3,), "what the model's makers list goes before what names suggest"


def test_ends_of_messages_do_not_stop_an_answer_of_several_messages():
    harmony = tokenizer_from_metadata(bare("<|end|>", "<|return|>", "<|call|>", eos_token_id=13))
    assert harmony.turn_end_ids == (13, 14)
    phi = tokenizer_from_metadata(bare("<|end|>", "<|endoftext|>", eos_token_id=13))
    assert phi.turn_end_ids == (13, 12)


@pytest.mark.parametrize("token", ["</s>", "<|im_end|>"])
def test_ordinary_entries_do_not_stop_an_answer(token):
    assert tokenizer_from_metadata(bare(token, types=[1])).turn_end_ids == ()


def test_entries_that_fill_up_the_embedding_are_not_in_the_vocabulary():
    tokenizer = tokenizer_from_metadata(metadata())
    count = byte_level_library().get_vocab_size()
    assert tokenizer.vocab_size == count
    assert tokenizer.convert_ids_to_tokens([count, count + 2]) == ["", ""]
    assert tokenizer.encode("[PAD400]") == byte_level_library().encode("[PAD400]", add_special_tokens=False).ids


def test_filler_between_tokens_keeps_the_ids():
    tokenizer = tokenizer_from_metadata(bare("[PAD12]", "<|a|>", "[PAD14]", "<|b|>", types=[5, 3, 5, 3]))
    assert tokenizer.convert_tokens_to_ids(["<|a|>", "<|b|>"]) == [13, 15]
    assert tokenizer.encode("ab<|b|>") == [0, 15]


def test_spaces_after_the_tokens_of_phi_3_are_dropped():
    proto = sentencepiece_proto()
    added = {"<|user|>": True, "<|endoftext|>": True}
    fields = from_sentencepiece(proto, added=added) | {"general.architecture": "phi3"}
    phi, plain = (tokenizer_from_metadata(one) for one in (fields, fields | {"general.architecture": "llama"}))
    assert phi.encode("<|user|>\nfox", False) == plain.encode("<|user|>fox", False)
    assert phi.encode("<|endoftext|>\nfox", False) == plain.encode("<|endoftext|>\nfox", False)


@pytest.mark.parametrize("scores", [None, -1000.0], ids=["none", "all equal"])
def test_without_scores_entries_are_merged_in_their_order(scores):
    fields = from_sentencepiece(sentencepiece_proto())
    expected = tokenizer_from_metadata(dict(fields)).encode("The quick brown fox jumps over the lazy dog.")
    if scores is None:
        del fields[KEY + "scores"]
    else:
        fields[KEY + "scores"] = [scores] * len(fields[KEY + "tokens"])
    assert tokenizer_from_metadata(fields).encode("The quick brown fox jumps over the lazy dog.") == expected


def test_newlines_that_no_merge_makes_are_found_in_gemmas_texts():
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "\n\n", "\u2581", "a", "\u2581a", "<table>", "<|channel>"]
    types = [3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 4]
    tokenizer = tokenizer_from_metadata({
        KEY + "model": "gemma4", KEY + "tokens": tokens, KEY + "token_type": types, KEY + "merges": ["\u2581 a"],
        KEY + "bos_token_id": 2, KEY + "eos_token_id": 1, KEY + "unknown_token_id": 3,
    })  # fmt: skip
    assert tokenizer.encode("a\n\n a<table>") == [2, 7, 5, 8, 9]
    assert tokenizer.special_ids == {0, 1, 2, 3, 10}
    assert tokenizer.decode([2, 7, 5, 8, 9, 10]) == "a\n\n a<table>"


def test_arrays_may_be_numpys():
    plain = metadata()
    fields = plain | {KEY + "token_type": np.array(plain[KEY + "token_type"], np.int32)}
    assert tokenizer_from_metadata(fields).encode("fox") == tokenizer_from_metadata(plain).encode("fox")


def test_a_file_that_does_not_name_its_pre_tokenizer_is_read_as_llama_cpp_does():
    fields = bare("<s>")
    del fields[KEY + "pre"]
    assert tokenizer_from_metadata(fields).encode("ab") == [0]


def change(**values: Any) -> dict[str, Any]:
    return metadata() | {KEY + name: value for name, value in values.items()}


TOKENS = metadata()[KEY + "tokens"]
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({}, "model"),
    "no tokens": ({KEY + "model": "gpt2"}, "tokens"),
    "no model": ({KEY + "tokens": ["a"]}, "model"),
    "empty": (change(tokens=[], token_type=[]), "tokens"),
    "tokens are a number": (change(tokens=5), "tokens"),
    "tokens are numbers": (change(tokens=[1] * len(TOKENS)), "tokens"),
    "a token twice": (change(tokens=[*TOKENS[:-1], TOKENS[0]]), "tokens"),
    "a long token": (change(tokens=[*TOKENS[:-1], "x" * 5000]), "tokens"),
    "model is a number": (change(model=3), "model"),
    "unknown model": (change(model="rwkv"), "model"),
    "unknown pre-tokenizer": (change(pre="martian-bpe"), "pre"),
    "pre-tokenizer is a list": (change(pre=["gpt-2"]), "pre"),
    "few types": (change(token_type=[1, 1]), "token_type"),
    "a type of 9": (change(token_type=[9] * len(TOKENS)), "token_type"),
    "types are texts": (change(token_type=["1"] * len(TOKENS)), "token_type"),
    "types of another length each": (change(token_type=[[1], [1, 2]]), "token_type"),
    "all tokens are control tokens": (
        change(tokens=[f"<{i}>" for i in range(70_000)], token_type=[3] * 70_000, merges=[]), "token_type"
    ),
    "few scores": (change(scores=[0.0]), "scores"),
    "a score that is not a number": (change(scores=[float("nan")] * len(TOKENS)), "scores"),
    "merges without a space": (change(merges=["ab"]), "merges"),
    "merges with two spaces": (change(merges=["a b c"]), "merges"),
    "a merge of nothing": (change(merges=["a "]), "merges"),
    "a merge of tokens that are not there": (change(merges=["Q\u2603 x"]), "merges"),
    "a merge that makes no token": (change(merges=["z q"]), "merges"),
    "merges are one text": (change(merges="a b"), "merges"),
    "too many merges": (change(merges=range(1 << 23)), "merges"),
    "end beyond the vocabulary": (change(eos_token_id=10**6), "eos_token_id"),
    "end is negative": (change(eos_token_id=-7), "eos_token_id"),
    "end is a text": (change(eos_token_id="</s>"), "eos_token_id"),
    "a flag is a number": (change(add_bos_token=1), "add_bos_token"),
    "a beginning that is not named": (
        {key: value for key, value in change(add_bos_token=True).items() if key != KEY + "bos_token_id"},
        "bos_token_id",
    ),
    "broken rules of normalisation": (change(model="t5", scores=[0.0] * len(TOKENS), precompiled_charsmap=[1] * 40),
                                      "precompiled_charsmap"),
    "rules that are texts": (change(precompiled_charsmap=["x"]), "precompiled_charsmap"),
    "rules with a table beyond them": (change(precompiled_charsmap=[255] * 12), "precompiled_charsmap"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_metadata_is_refused_with_field_and_fix(case):
    fields, name = BROKEN[case]
    with pytest.raises(TokenizerError) as refused:
        tokenizer_from_metadata(fields)
    assert refused.value.field == KEY + name
    assert refused.value.hint


def test_any_other_value_of_any_field_is_read_or_refused_by_name():
    values = (None, -1, 7, 1.5, True, "", "x", [], ["a"], ["a b"], [1], [None], [[1]], {}, b"x", np.array([1.5]))
    good = bare("<s>", "<unk>", scores=[0.0] * 14, eos_token_id=12, unknown_token_id=13, add_eos_token=True)
    for model in ("gpt2", "llama", "gemma4", "t5", "bert"):
        for key in (*good, "tokenizer.chat_template", KEY + "precompiled_charsmap", "general.architecture"):
            for value in values:
                fields = good | {KEY + "model": model, key: value}
                try:
                    tokenizer_from_metadata(fields).encode("ab <s> \u2581\u2603")
                except TokenizerError as refused:
                    assert refused.field and refused.hint, (model, key, value)


def test_a_template_that_is_no_text_is_refused():
    with pytest.raises(TokenizerError) as refused:
        tokenizer_from_metadata(metadata() | {"tokenizer.chat_template": 5})
    assert refused.value.field == "tokenizer.chat_template"


def test_byte_level_files_need_merges():
    fields = metadata()
    del fields[KEY + "merges"]
    with pytest.raises(TokenizerError) as refused:
        tokenizer_from_metadata(fields)
    assert refused.value.field == KEY + "merges"


def test_merges_that_lead_in_a_circle_end():
    """Merging only lengthens pieces, so no list of merges can make encoding go on for ever."""
    fields = bare("<s>", merges=["a b"] * 2)
    assert tokenizer_from_metadata(fields).encode("ab" * 500) == [0] * 500


def test_every_known_pre_tokenizer_splits_text_without_losing_any():
    from quire.tokenization.gguf_pre_tokenizers import _BY_NAME

    text = "Hello, world 1234567! \n\n don't 你好\tकी x=1"
    for name, entry in _BY_NAME.items():
        library = tokenizers.Tokenizer(models.BPE())
        library.pre_tokenizer = entry.pre_tokenizer()
        pieces = [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(text)]
        assert decoders.ByteLevel().decode(pieces) == text, name
    assert isinstance(pre_tokenizers.Sequence([]), pre_tokenizers.PreTokenizer)

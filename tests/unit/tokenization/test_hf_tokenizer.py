"""HFTokenizer against transformers, on small vocabularies of several kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from quire.errors import ChatTemplateError, UnsupportedError, ValidationError
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.hf_tokenizer import HFTokenizer
from quire.tokenization.tokenizer import load_tokenizer
from tests.unit.tokenization.vocabularies import SENTENCES, write_fast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ style or '' }}{% endif %}"
)
TEXTS = [*SENTENCES, "", "<|im_start|>user", "</s> and <tool> inside", "  two  spaces "]
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]


@pytest.fixture(scope="module", params=["byte-level", "llama", "metaspace"])
def pair(request, tmp_path_factory) -> tuple[HFTokenizer, transformers.PreTrainedTokenizerFast]:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "chat_template": TEMPLATE}
    write_fast(directory, config, request.param)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), **config, clean_up_tokenization_spaces=False
    )
    return HFTokenizer(load_tokenizer(directory), ChatTemplate(TEMPLATE, {"bos_token": "<s>"})), theirs


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_texts_become_the_same_ids_and_back(pair, special):
    ours, theirs = pair
    expected = theirs(TEXTS, add_special_tokens=special)
    got = ours(TEXTS, add_special_tokens=special)
    assert got.input_ids == got["input_ids"] == expected["input_ids"]
    assert got.attention_mask == expected["attention_mask"]
    for text, ids in zip(TEXTS, got.input_ids):
        assert ours.encode(text, add_special_tokens=special) == ids == ours(text, special).input_ids
        assert ours.tokenize(text) == theirs.tokenize(text)
        for skipped in (True, False):
            assert ours.decode(ids, skipped) == theirs.decode(ids, skip_special_tokens=skipped)
    assert ours.batch_decode(got.input_ids) == theirs.batch_decode(got.input_ids) == ours.decode(got.input_ids)


def test_the_vocabulary_is_the_same(pair):
    ours, theirs = pair
    assert ours.get_vocab() == theirs.get_vocab()
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    every = list(range(len(theirs)))
    assert ours.convert_ids_to_tokens(every) == theirs.convert_ids_to_tokens(every)
    assert ours.convert_ids_to_tokens(every, True) == theirs.convert_ids_to_tokens(every, skip_special_tokens=True)
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    names = theirs.convert_ids_to_tokens(every)
    assert ours.convert_tokens_to_ids(names) == theirs.convert_tokens_to_ids(names) == every
    assert ours.convert_tokens_to_ids("</s>") == theirs.convert_tokens_to_ids("</s>")


@pytest.mark.parametrize("role", ["bos", "eos", "pad", "unk", "cls", "sep", "mask"])
def test_roles_are_the_same(pair, role):
    ours, theirs = pair
    assert getattr(ours, f"{role}_token") == getattr(theirs, f"{role}_token")
    assert getattr(ours, f"{role}_token_id") == getattr(theirs, f"{role}_token_id")


def test_special_tokens_are_the_same(pair):
    ours, theirs = pair
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    assert ours.special_tokens_map == dict(theirs.special_tokens_map)


@pytest.mark.parametrize("with_prompt", [True, False], ids=["open", "closed"])
def test_chats_become_the_same_text_and_ids(pair, with_prompt):
    ours, theirs = pair
    for chat in (CHAT, [CHAT, CHAT[:1]]):
        options = {"add_generation_prompt": with_prompt, "style": "short"}
        assert ours.apply_chat_template(chat, tokenize=False, **options) == theirs.apply_chat_template(
            chat, tokenize=False, **options
        )
        got, expected = ours.apply_chat_template(chat, **options), theirs.apply_chat_template(chat, **options)
        assert got.input_ids == expected["input_ids"]
        assert ours.apply_chat_template(chat, return_dict=False, **options) == expected["input_ids"]
    other = "{{ messages[0].content }}"
    assert ours.apply_chat_template(CHAT, chat_template=other, tokenize=False) == "Hello"
    assert ours.chat_template == theirs.chat_template == TEMPLATE


def test_ids_may_be_numpys_or_torchs(pair):
    ours, _ = pair
    ids = ours.encode("a fox")
    assert ours.decode(torch.tensor(ids)) == ours.decode(tuple(ids)) == ours.decode(ids)
    assert ours.decode(torch.tensor(ids)[0]) == ours.decode(ids[0])
    with pytest.raises(ValidationError, match="token ids must be"):
        ours.decode("abc")


@pytest.mark.parametrize("argument", [{"padding": True}, {"truncation": True}, {"return_tensors": "pt"}], ids=str)
def test_what_would_pad_or_cut_is_refused_by_name(pair, argument):
    ours, _ = pair
    for call in (ours, ours.encode):
        with pytest.raises(UnsupportedError, match=next(iter(argument))):
            call("a fox", **argument)


def test_what_is_not_there_says_so(pair):
    ours, _ = pair
    assert not hasattr(ours, "save_pretrained")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        HFTokenizer(ours._tokenizer).apply_chat_template(CHAT)

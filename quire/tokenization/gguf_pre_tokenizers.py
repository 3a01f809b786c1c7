"""Pre-tokenizers by the name that a GGUF file gives them in `tokenizer.ggml.pre`.

Read by `gguf_models`. A table: what the tokenizer.json of the model that a name stands for does before byte pairs are
merged. No state.

Source: the names and which of them are alike, llama.cpp (src/llama-vocab.cpp); the patterns, the tokenizer.json files
of the models named there.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from quire.errors import TokenizerError

WORDS = "words of GPT-2, then bytes"
BYTES = "bytes"
DIGITS = "each digit"
DIGIT_RUNS = "runs of digits"
PUNCTUATION = "runs of punctuation"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_HIRAGANA_KATAKANA = r"\u3040-\u309f\u30a0-\u30ff"
# Letters of alphabets with two cases, as DeepSeek lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """What is done to a text before byte pairs are merged.

    Attributes:
        steps: patterns (each match becomes a piece, and what is between matches) and steps with a name, in order.
        nfc: the text is first composed (Unicode's form C).
        ignore_merges: a piece that is an entry of the vocabulary is that token, whatever merges would give.
        add_bos: a text begins with BOS, where the file does not say.
    """

    steps: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The steps, for the library."""
        made = [_step(step) for step in self.steps]
        return made[0] if len(made) == 1 else pre_tokenizers.Sequence(made)

    def normalizer(self) -> normalizers.Normalizer | None:
        """What changes the text itself; None = nothing."""
        return normalizers.NFC() if self.nfc else None


def pre_tokenization(name: str) -> PreTokenization:
    """The entry called `name`.

    Raises:
        TokenizerError: there is none.
    """
    found = _BY_NAME.get(name)
    if found is None:
        near = ", ".join(difflib.get_close_matches(name[:80], _BY_NAME, n=3))
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name[:80]!r}, a pre-tokenizer that Quire does not know"
            + (f"; it knows {near}" if near else ""),
            hint="give the directory of the original model as --tokenizer; "
            "docs/reference/gguf-tokenizers.md lists the names that are known",
            field="tokenizer.ggml.pre",
        )
    return found


def _step(step: str) -> pre_tokenizers.PreTokenizer:
    if step == WORDS:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if step == BYTES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if step in (DIGITS, DIGIT_RUNS):
        return pre_tokenizers.Digits(individual_digits=step == DIGITS)
    if step == PUNCTUATION:
        return pre_tokenizers.Punctuation("contiguous")
    return pre_tokenizers.Split(Regex(step), "isolated")


def _gpt4(numbers: str, symbols: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*", letters: str = r"\p{L}") -> str:
    """The pattern of GPT-4 (cl100k) and its many descendants."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+"
    return rf"{_CONTRACTION}|{word}|{numbers}|{symbols}|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt4o(numbers: str, contraction: str = f"{_CONTRACTION}?", ends: str = r"[\r\n/]*", but: str = "") -> str:
    """The pattern of GPT-4o (o200k): words are cut where a capital follows a small letter."""
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{ends}|\s*[\r\n]+|\s+(?!\S)|\s+"


_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_JAIS_2_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))

_GPT_2 = PreTokenization((WORDS,))
_NEOX = PreTokenization((WORDS,), nfc=True)
_DIGITS_AND_WORDS = PreTokenization((DIGITS, WORDS))
_LLAMA_3 = PreTokenization((_gpt4(r"\p{N}{1,3}"), BYTES), ignore_merges=True, add_bos=True)
_CL100K = PreTokenization((_gpt4(r"\p{N}{1,3}"), BYTES))
_QWEN_2 = PreTokenization((_gpt4(r"\p{N}"), BYTES), nfc=True)
_ONE_DIGIT = PreTokenization((_gpt4(r"\p{N}"), BYTES))
_DEEPSEEK_V3 = PreTokenization(
    (r"\p{N}{1,3}", rf"[\u4e00-\u9fa5{_HIRAGANA_KATAKANA}]+", _DEEPSEEK_3, BYTES),
)
_O200K = PreTokenization((_gpt4o(r"\p{N}{1,3}"), BYTES))
_BLOOM_WORDS = PreTokenization((_BLOOM, BYTES))
_BAILING = PreTokenization(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        BYTES,
    )
)

_GROUPS: tuple[tuple[str, PreTokenization], ...] = (
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling roberta-bpe jina-v1-en jina-v2-code "
     "jina-es jina-de jina-v2-es jina-v2-de", _GPT_2),
    ("olmo mpt modern-bert", _NEOX),
    ("starcoder refact smollm codeshell exaone minerva-7b mellum2", _DIGITS_AND_WORDS),
    ("command-r", PreTokenization((DIGITS, WORDS), nfc=True)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA_3),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _CL100K),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", _QWEN_2),
    ("stablelm2 hunyuan solar-open grok-2", _ONE_DIGIT),
    ("qwen35", PreTokenization(
        (_gpt4(r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r"[\p{L}\p{M}]"), BYTES), nfc=True
    )),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _O200K),
    ("granite-embed-multi-97m", PreTokenization((_gpt4o(r"\p{N}{1,3}"), BYTES), ignore_merges=True)),
    ("tekken", PreTokenization((_gpt4o(r"\p{N}", contraction=""), BYTES), ignore_merges=True, add_bos=True)),
    ("kimi-k2", PreTokenization(
        (r"[\p{Han}]+|" + _gpt4o(r"\p{N}{1,3}", ends=r"[\r\n]*", but=r"&&[^\p{Han}]"), BYTES)
    )),
    ("tiny_aya cohere2moe", PreTokenization((r"\d{1,3}(?=(?:\d{3})*\b)", _gpt4o(r"\p{N}{1,3}"), BYTES))),
    ("deepseek-llm", PreTokenization((
        r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
        _CJK, DIGITS, BYTES,
    ))),
    ("deepseek-coder", PreTokenization((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, DIGITS, BYTES))),
    ("deepseek-v3 hunyuan-dense joyai-llm", _DEEPSEEK_V3),
    ("afmoe", PreTokenization((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK_3, BYTES))),
    ("falcon", PreTokenization((PUNCTUATION, WORDS, DIGIT_RUNS, "[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", _BLOOM_WORDS),
    ("viking", PreTokenization((_BLOOM, DIGITS, BYTES))),
    ("chameleon", PreTokenization((
        r"<sentinel:[0-9]+>", r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", DIGITS,
        r"[\p{P}!-/:-@\[-`{-~]", WORDS,
    ), add_bos=True)),
    ("superbpe", PreTokenization((r"\p{N}+", r"(?=(\d{3})+(?!\d))", BYTES))),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    ("seed-coder", PreTokenization((_gpt4(r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"), BYTES))),
    ("youtu", PreTokenization((
        "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
        f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5{_HIRAGANA_KATAKANA}]+",
        _gpt4o(r"\p{N}"), BYTES,
    ), ignore_merges=True)),
    ("minicpm5", PreTokenization((r"\p{N}{1,3}", _gpt4(r"\p{N}+"), BYTES), ignore_merges=True)),
    ("laguna", PreTokenization((r"[^\n]+|[\n]+", _gpt4(r"\p{N}"), BYTES))),
    ("exaone-moe", PreTokenization((
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+", BYTES,
    ))),
    ("jais-2", PreTokenization((
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        rf"|{_JAIS_2_SPACES}|\s{{1}}", BYTES,
    ))),
    # What llama.cpp takes where a file has no name: made before there were names.
    ("default", PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]", BYTES))),
)  # fmt: skip

_BY_NAME: Mapping[str, PreTokenization] = {name: made for names, made in _GROUPS for name in names.split()}

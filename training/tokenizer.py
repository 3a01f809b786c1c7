"""The tokenizer of `leaf`: byte-level BPE with single digits, and its chat template.

`python -m training.tokenizer` trains it on generated text and writes
tokenizer.json, tokenizer_config.json and generation_config.json into the build
folder. `render` is the only place where training turns messages into text; it
gives the same text as the Jinja template (a unit test compares them).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus.base import Sample
from training.corpus.registry import training_samples
from training.mixture import FIRST_CYCLE, overall

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)
END_OF_TEXT, IM_START, IM_END = 0, 1, 2  # ids: special tokens come first
MIN_FREQUENCY = 40  # rarer words (mostly invented names) stay in pieces
PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TOOLS_HEAD = "You may call these functions:\n<tools>"
TOOLS_TAIL = (
    '</tools>\nTo call one, answer with\n<tool_call>\n{"name": <function name>, "arguments": <JSON object>}\n'
    "</tool_call>"
)

CHAT_TEMPLATE = """\
{%- if messages and messages[0].role == 'system' %}
    {%- set system_text = messages[0].content %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system_text = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- if tools or system_text %}
    {{- '<|im_start|>system\\n' + system_text }}
    {%- if tools %}
        {%- if system_text %}
            {{- '\\n\\n' }}
        {%- endif %}
        {{- HEAD }}
        {%- for tool in tools %}
            {{- '\\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\\n' + TAIL }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in turns %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function if call.function else call %}
            {%- if not loop.first or message.content %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".replace("HEAD", repr(TOOLS_HEAD)).replace("TAIL", repr(TOOLS_TAIL))


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _turn_body(message: dict) -> str:
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        calls.append(
            '<tool_call>\n{"name": "'
            + function["name"]
            + '", "arguments": '
            + _dump(function["arguments"])
            + "}\n</tool_call>"
        )
    return "\n".join(([message["content"]] if message.get("content") else []) + calls)


def render(sample: Sample) -> list[tuple[str, bool]]:
    """Renders the conversation with its final answer.

    Returns:
        Pieces (text, is_answer). Their concatenation is the chat template's text
        plus the answer and <|im_end|>. Answers include their <|im_end|>.
    """
    messages = list(sample.messages)
    head = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
    pieces: list[tuple[str, bool]] = []
    text = ""
    if sample.tools:
        lines = "".join("\n" + _dump(t) for t in sample.tools)
        head += ("\n\n" if head else "") + TOOLS_HEAD + lines + "\n" + TOOLS_TAIL
    if head:
        text = f"<|im_start|>system\n{head}<|im_end|>\n"
    for i, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            pieces += [(text + "<|im_start|>assistant\n", False), (_turn_body(message) + "<|im_end|>", True)]
            text = "\n"
        elif role == "tool":
            first = i == 0 or messages[i - 1]["role"] != "tool"
            last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            text += ("<|im_start|>user" if first else "") + f"\n<tool_response>\n{message['content']}\n</tool_response>"
            text += "<|im_end|>\n" if last else ""
        else:
            text += f"<|im_start|>{role}\n{message['content']}<|im_end|>\n"
    return pieces + [(text + "<|im_start|>assistant\n", False), (sample.answer + "<|im_end|>", True)]


def prompt_text(sample: Sample) -> str:
    """The rendered conversation up to where the answer starts."""
    return "".join(text for text, _ in render(sample)[:-1])


def train_tokenizer(samples: int, vocab_size: int, seed: int) -> Tokenizer:
    """Trains the BPE on `samples` generated conversations.

    Args:
        samples: Number of conversations to read.
        vocab_size: Number of tokens in all, specials and bytes included.
        seed: Seed of the text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True) for t in SPECIAL + MARKERS],
        min_frequency=MIN_FREQUENCY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    marker = re.compile("|".join(re.escape(t) for t in SPECIAL + MARKERS))
    texts = (
        part
        for s in itertools.islice(training_samples(seed, overall(FIRST_CYCLE)), samples)
        for part in marker.split("".join(text for text, _ in render(s)))
        if part
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The markers must stay visible in decoded text, so they are not `special`.
    fixed = json.loads(tokenizer.to_str())
    for token in fixed["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(fixed))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the tokenizer, its settings and the generation settings as HF files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(t_id): {
            "content": t.content,
            "single_word": t.single_word,
            "lstrip": t.lstrip,
            "rstrip": t.rstrip,
            "normalized": t.normalized,
            "special": t.special,
        }
        for t_id, t in tokenizer.get_added_tokens_decoder().items()
    }
    config = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    generation = {
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": [IM_END, END_OF_TEXT],
        "pad_token_id": END_OF_TEXT,
        "do_sample": False,
        "temperature": 1.0,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def main() -> None:
    """Command line: trains and saves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"))
    parser.add_argument("--samples", type=int, default=40000)
    parser.add_argument("--vocab", type=int, default=3072)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    tokenizer = train_tokenizer(args.samples, args.vocab, args.seed)
    save(tokenizer, args.out)
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens -> {args.out}")


if __name__ == "__main__":
    main()

"""What is changed in an example of vLLM's before it runs here: names of package and model, the server's address."""

from __future__ import annotations

import re

MODEL = "leaf"
IMPORT = re.compile(r"^(\s*(?:from|import)\s+)vllm(?=[\s.])", re.MULTILINE)
# A name on the Hugging Face hub, where a program names its model.
HUB_MODEL = re.compile(
    r"""(\bmodel\w*["']?\s*(?::\s*\w+\s*)?[:=]\s*|\bdefault\s*=\s*)(["'])[\w.-]+/[\w.-]+\2""", re.IGNORECASE
)
SERVER = re.compile(r"(?:localhost|127\.0\.0\.1|0\.0\.0\.0):\d{4,5}")

# Arguments that a model of 2048 tokens and 4 million weights, without experts, cannot take: file -> what stands there,
# what replaces it.
UNAVOIDABLE = {
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py": [
        ("LONG_PROMPT\n        + ", "LONG_PROMPT[:2000]\n        + "),
    ],
    "features/data_parallel/data_parallel_offline.py": [("        enable_expert_parallel=True,\n", "")],
    "generate/qwen_1m_offline.py": [("max_model_len=1048576", "max_model_len=2048")],
    "tool_calling/chat_with_tools_offline.py": [
        ('    tokenizer_mode="mistral",\n    config_format="mistral",\n    load_format="mistral",\n', ""),
    ],
}  # fmt: skip


def rewrite(name: str, text: str, server: str, *, without_server: bool = False) -> str:
    """The program `name` with these three changed.

    Args:
        server: "host:port" of the server that clients shall ask.
        without_server: it has other addresses, which stay.
    """
    for old, new in UNAVOIDABLE.get(name, []):
        text = text.replace(old, new)
    text = IMPORT.sub(r"\1quire.compat.vllm", text)
    text = HUB_MODEL.sub(rf"\1\2{MODEL}\2", text)
    return text if without_server else SERVER.sub(server, text)

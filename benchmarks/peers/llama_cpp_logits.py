"""Logits of a GGUF file at every position of some texts: Quire's, those of llama.cpp, and those of its exact numbers.

    cmake --build $BUILD --target llama-results
    python -m benchmarks.peers.llama_cpp_logits --tools $BUILD/bin [FILE.gguf ...]

Without a file, the embedded model is written as Q4_K_M, Q8_0, Q4_0 and F16.

llama.cpp cuts the texts into tokens, so tokenizers play no part. Both programs round activations to eight bits, each in
its own way; how far each is from the exact logits (Quire's in float32, from dequantized weights) is reported too.

The exit status is 1 where the mean cosine with llama.cpp over the positions of a text is below 0.999, or where the
likeliest token is another one although llama.cpp's margin between its first two exceeds the stated error: a part of the
spread (standard deviation) of the logits at that position.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.workload import print_json
from quire import LLM, SamplingParams
from quire.sample.logits_processor import LogitsProcessor, RowRequest
from tests.models.stored_models import make_leaf

LEAST_COSINE = 0.999
STATED_ERROR = 0.15
MAX_TOKENS = 512
TEXTS = (
    "Once upon a time there was a small horse named Anna. She lived in a garden behind the old house, and every day",
    "The quick brown fox jumps over the lazy dog. 27 + 58 = 85, and 3.14159 is not 22/7.",
    "def mean(values):\n    return sum(values) / len(values)\n\n\nprint(mean([1, 2, 3]))\n",
    "Ein Satz mit Umlauten: äöü, ß und Emoji. 今天天气很好。Ça va?",
)
Logits = npt.NDArray[np.float32]  # [num_positions, vocab_size]


class Recorder(LogitsProcessor):
    """Keeps the logits of requests with extra_args={"position": number}, in `found`."""

    found: dict[int, torch.Tensor]

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self.positions: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        """False: greedy requests are recorded."""
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        """Every request that has a position."""
        position = (request.params.extra_args or {}).get("position")
        if position is None:
            return False
        self.positions[row] = position
        return True

    def remove_row(self, row: int) -> None:
        """It is recorded."""
        del self.positions[row]

    def apply(self, logits: torch.Tensor, rows: npt.NDArray[np.int32]) -> torch.Tensor:
        """Keep a copy."""
        for line, row in enumerate(rows.tolist()):
            self.found[self.positions[row]] = logits[line].clone()
        return logits


@dataclass(frozen=True)
class Comparison:
    """Logits `a` of a text against logits `b`, each [num_positions, vocab_size].

    Attributes:
        cosines, errors: of each position; errors are the root mean square of the difference, by the spread of `b`.
        num_other: positions whose likeliest token differs.
        num_wrong: those of them where the margin in `b` exceeds the stated error.
    """

    cosines: npt.NDArray[np.float64]
    errors: npt.NDArray[np.float64]
    num_other: int
    num_wrong: int


def compare(a: Logits, b: Logits, stated_error: float) -> Comparison:
    """Position by position; `stated_error` in standard deviations of the logits."""
    a, b = a.astype(np.float64), b.astype(np.float64)  # type: ignore[assignment]
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    spread = b.std(1)
    errors = np.sqrt(np.square(a - b).mean(1)) / spread
    second, first = np.sort(b, axis=1)[:, -2:].T
    is_other = a.argmax(1) != b.argmax(1)
    is_wrong = is_other & (first - second > stated_error * spread)
    return Comparison(cosines, errors, int(is_other.sum()), int(is_wrong.sum()))


def by_llama_cpp(tools: Path, model: Path, text: str, num_threads: int) -> tuple[list[int], Logits]:
    """Tokens of a text, and the logits after each of them."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "results.gguf"
        command: list[Any] = [tools / "llama-results", "-m", model, "-p", text, "-o", out, "-t", num_threads]
        command += ["-c", MAX_TOKENS, "-b", MAX_TOKENS]
        env = {**os.environ, "LD_LIBRARY_PATH": str(tools)}
        done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"llama-results failed:\n{done.stderr[-2000:]}")
        tensors = {one.name: np.array(one.data) for one in gguf.GGUFReader(out).tensors}
    tokens = tensors["tokens"].reshape(-1).tolist()
    return tokens, tensors["logits"].reshape(len(tokens), -1).astype(np.float32)


def by_quire(model: Path, texts: list[list[int]], **settings: Any) -> list[Logits]:
    """The logits after each token of each text: of the requests whose prompts are the text's beginnings."""
    found = []
    settings = {"max_num_seqs": 16, "max_model_len": MAX_TOKENS, "speculative_config": "off", **settings}
    with LLM(str(model), logits_processors=[Recorder], **settings) as llm:
        for tokens in texts:
            Recorder.found = {}
            ends = range(len(tokens))
            prompts = [{"prompt_token_ids": tokens[: end + 1]} for end in ends]
            params = [SamplingParams(temperature=0, max_tokens=1, extra_args={"position": end}) for end in ends]
            llm.generate(prompts, params, use_tqdm=False)
            found.append(torch.stack([Recorder.found[end] for end in ends]).numpy())
    return found


def summary(comparisons: list[Comparison]) -> dict[str, float | int]:
    """Figures over all positions of all texts; the mean cosine is that of the worst text."""
    errors = np.concatenate([one.errors for one in comparisons])
    return {
        "worst_mean_cosine": float(min(one.cosines.mean() for one in comparisons)),
        "min_cosine": float(min(one.cosines.min() for one in comparisons)),
        "median_error": float(np.median(errors)),
        "max_error": float(errors.max()),
        "num_other_tokens": sum(one.num_other for one in comparisons),
        "num_wrong_tokens": sum(one.num_wrong for one in comparisons),
    }


def compare_file(tools: Path, model: Path, num_threads: int, stated_error: float) -> dict[str, dict[str, float | int]]:
    """Figures of each pair of Quire, llama.cpp and the exact numbers, over all texts."""
    tokens, theirs = zip(*(by_llama_cpp(tools, model, text, num_threads) for text in TEXTS), strict=True)
    ours = by_quire(model, [*tokens], num_threads=num_threads)
    exact = by_quire(model, [*tokens], dtype="float32", attention_backend="torch_reference")
    pairs = {
        "quire against llama.cpp": (ours, theirs),
        "quire against exact": (ours, exact),
        "llama.cpp against exact": (theirs, exact),
    }
    figures = {}
    for name, (a, b) in pairs.items():
        figures[name] = summary([compare(one, other, stated_error) for one, other in zip(a, b, strict=True)])
        print(f"{model.name}, {sum(map(len, tokens))} positions, {name}: {figures[name]}", flush=True)
    return figures


def main() -> None:
    """Compare all files; the last line is one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="GGUF files")
    parser.add_argument("--tools", type=Path, required=True, help="directory with llama-results")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stated-error", type=float, default=STATED_ERROR, help="in standard deviations of the logits")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        models = args.models or [make_leaf(types, Path(directory)) for types in ("Q4_K_M", "Q8_0", "Q4_0", "F16")]
        figures = {model.name: compare_file(args.tools, model, args.threads, args.stated_error) for model in models}
    print_json(figures)
    against = [of_model["quire against llama.cpp"] for of_model in figures.values()]
    sys.exit(not all(one["worst_mean_cosine"] >= LEAST_COSINE and not one["num_wrong_tokens"] for one in against))


if __name__ == "__main__":
    main()

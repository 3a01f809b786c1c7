"""`make compat-examples`: run vLLM's examples over Quire, and write down which work and what the others lack.

VLLM_EXAMPLES=DIR is the `examples` folder of a checkout; without it pip fetches vLLM's source distribution. In each
program only the package's name, the model's and the server's address are changed (`rewriting`). Clients ask a
`quire serve leaf` that this starts. The last line is the number of examples that neither work nor say what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tests.compat.beside import LIMIT_S, SUBSCRIBER, make_beside, run_until_heard
from tests.compat.packages import python_with_packages
from tests.compat.rewriting import MODEL, rewrite
from tests.robustness.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/vllm-examples.md"
VLLM = "vllm==0.33.0"
SERVER_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

# Not run: what they are for is no part of an engine's API, or cannot be allocated on one machine without a network.
NOT_RUN = {
    r"gradio": "a web page that gradio's own servers publish (share=True), used by a browser",
    r"streamlit": "a web page over the OpenAI API, which waits for a browser",
    r"^applications/rag": "needs a server of embeddings and pages of the web; Quire does not have pooling models",
    r"^disaggregated/.*(proxy|moriio)|mooncake": "a proxy between two servers that it does not start; "
    "docs/how-to/prefill-decode.md has them",
    r"connector/decode_example|recovery_offline/decode_example": "needs the files that the example before it wrote in "
    "the same directory; docs/how-to/connectors.md does both",
    r"flexkv|lmcache": "needs another program's KV cache inside the engine; Quire has LMCacheMPConnector, over "
    "LMCache's server",
    r"^ray_serving/(batch|ray)": "Ray loads vLLM by itself; Quire has no backend for Ray's LLM library",
    r"^ray_serving/elastic": "changes the number of experts' ranks on GPUs; Quire's number is set at the start",
    r"^rl/.*(http|rdt|ray|m2n|fsdp|async_new|nccl)": "needs GPUs; Quire takes other weights from a directory "
    "(/update_weights)",
    r"^features/torchrun": "is started by torchrun, as several processes; docs/how-to/external-launcher.md",
    r"microphone": "needs a microphone; Quire has no audio inputs",
    r"prithvi": "for a pooling model with a plugin of its own; Quire has none",
    r"^pooling/.*(online|client)|using_template|qwen3_reranker|convert_model": "for a pooling model; Quire has none",
    r"structured_diffusion": "patches vLLM's own files for diffusion models; Quire has none",
    r"applications/api_server/server": "runs with client.py, in the line above",
    r"tool_calling/chat_with_tools_offline": "reads calls as the JSON list that Mistral's models write; leaf does not",
    r"scale_out/": "prompts and answers made by different servers (--enable-scale-out); Quire has none",
}  # fmt: skip
NAMED = re.compile(
    r"AbsentFeatureError|UnsupportedError|not supported|not implemented|does not (implement|support|have)|Quire has no|"
    r"is not one of|unknown key"
)
NO_HUB = re.compile(
    r"couldn't connect to 'https://huggingface|offline mode|HF_HUB_OFFLINE|ConnectError|Name or service|"
    r"Temporary failure|Failed to resolve|not in the local cache"
)
ERROR_LINE = re.compile(r"^\s*(?:\w+\.)*\w*(?:Error|Exception|Exit)\b.*|^error: .*|^.*: error: .*", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of one example: "works", "names what is missing", "needs ...", "not run" or "fails"."""

    name: str
    result: str
    message: str = ""


def fetch() -> Path:
    """The examples of vLLM's source distribution, unpacked below `build`."""
    target = ROOT / "build/vllm-sdist"
    found = sorted(target.glob("*/*/examples"))
    if not found:
        target.mkdir(parents=True, exist_ok=True)
        # pip unpacks the archive and then fails to prepare a build that nobody wants; --no-clean keeps the files.
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-clean", "--no-deps", "--no-build-isolation",
            "--no-binary", ":all:", VLLM,
        ]  # fmt: skip
        subprocess.run(command, cwd=target, env={**os.environ, "TMPDIR": str(target)}, capture_output=True, check=False)
        found = sorted(target.glob("*/*/examples"))
    if not found:
        raise SystemExit(f"pip cannot fetch {VLLM}; set VLLM_EXAMPLES to the examples folder of a checkout of it")
    return found[0]


def run(path: Path, name: str, server: str, workplace: Path, python: str) -> Outcome:
    """Run one example."""
    for pattern, reason in NOT_RUN.items():
        if re.search(pattern, name):
            return Outcome(name, "not run", reason)
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_MODEL": MODEL, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "EMPTY",
        "TMPDIR": str(workplace),
    }  # fmt: skip
    with contextlib.ExitStack() as others:
        beside = make_beside(name, path, server, workplace, environment, others, python)
        program = workplace / name.replace("/", "__")
        text = path.read_text()
        for old, new in beside.addresses.items():
            text = text.replace(old, new)
        program.write_text(rewrite(name, text, beside.server, without_server=bool(beside.addresses)))
        arguments = [python, str(program), *beside.arguments]
        if name == SUBSCRIBER:
            return judge(name, *run_until_heard(arguments, workplace, environment, beside.server))
        try:
            done = subprocess.run(
                arguments, cwd=workplace, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(name, "fails", f"did not end within {LIMIT_S:.0f} s")
    (workplace / f"{program.name}.log").write_text(done.stdout + done.stderr)
    outcome = judge(name, done.returncode, done.stdout + "\n" + done.stderr)
    return replace(outcome, message=beside.note) if outcome.result == "works" else outcome


def judge(name: str, status: int, output: str) -> Outcome:
    """What an exit status and the text beside it mean."""
    if status == 0:
        return Outcome(name, "works")
    lines = [line.strip() for line in ERROR_LINE.findall(output)]
    message = lines[-1] if lines else (output.strip().splitlines() or ["no output"])[-1]
    message = re.sub(r"^(?:[\w]+\.)+(?=\w+(?:Error|Exception))", "", message)
    if NO_HUB.search(message):
        return Outcome(name, "needs the network", message)
    package = re.search(r"No module named '(?!quire)(\w+)", message)
    if package:
        return Outcome(name, f"needs the package {package[1]}")
    return Outcome(name, "names what is missing" if NAMED.search(message) else "fails", message)


def page(outcomes: list[Outcome]) -> str:
    """The reference page."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        kind = outcome.result.split(" the package")[0]
        counts[kind] = counts.get(kind, 0) + 1
    summary = ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items(), key=lambda item: -item[1]))
    head = [
        "# vLLM's examples over Quire",
        "",
        f"Written by `make compat-examples` from the examples of {VLLM.replace('==', ' ')}. In each program,",
        "`quire.compat.vllm` stands for `vllm` in imports, `leaf` for the model, and the server is one with leaf.",
        "Where an argument is too large for leaf, `tests/compat/rewriting.py` says what was changed; where a program "
        "needs",
        "a model that calls tools or always writes what it is asked for, the server's model follows a script.",
        "",
        f"{len(outcomes)} examples. {summary}.",
        "",
        "| example | result | message |",
        "| --- | --- | --- |",
    ]
    rows = [f"| {one.name.removesuffix('.py')} | {one.result} | {_cell(one.message)} |" for one in outcomes]
    return "\n".join([*head, *rows, ""])


def _cell(text: str) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 200 else text[:200] + "..."


def main() -> int:
    """Run them all, or those whose name holds --only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=Path, default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path, default=None, help="where programs and their output stay")
    options = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; some programs end by it alone
        signal.signal(signal.SIGINT, signal.default_int_handler)
    examples: Path = options.examples or fetch()
    paths = [path for path in sorted(examples.rglob("*.py")) if path.name != "__init__.py"]
    python = python_with_packages(ROOT / "build/vllm-examples")
    chosen = [path for path in paths if options.only in str(path.relative_to(examples))]
    with tempfile.TemporaryDirectory() as directory, ServerProcess(*SERVER_FLAGS) as server:
        workplace = options.keep or Path(directory)
        outcomes = []
        for path in chosen:
            outcome = run(path, str(path.relative_to(examples)), f"127.0.0.1:{server.port}", workplace, python)
            print(f"{outcome.name}: {outcome.result} {outcome.message}", flush=True)
            outcomes.append(outcome)
    if len(chosen) == len(paths):
        PAGE.write_text(page(outcomes))
    num_silent = sum(outcome.result == "fails" for outcome in outcomes)
    print(num_silent)
    return 1 if num_silent else 0


if __name__ == "__main__":
    raise SystemExit(main())

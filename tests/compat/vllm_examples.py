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
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.compat.rewriting import MODEL, rewrite
from tests.robustness.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/vllm-examples.md"
VLLM = "vllm==0.33.0"
SERVER_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
LIMIT_S = 120.0

# Not run: what they are for is no part of an engine's API, or cannot be had on one machine without a network.
NOT_RUN = {
    r"proxy|moriio": "a proxy between servers",
    r"^ray_serving/elastic|^rl/.*(http|rdt|ray|m2n|fsdp|async_new|nccl)": "updates weights between processes on GPUs",
    r"gradio|streamlit": "a web page over the OpenAI API, which waits for a browser",
    r"microphone": "needs a microphone",
    r"^pooling/.*(online|client)|using_template|qwen3_reranker|convert_model": "for a pooling model; Quire has none",
    r"completion_client_with_tools\.py|tool_calls_with_reasoning": "expects the model to call a tool; leaf does not",
    r"connector/decode_example|recovery_offline/decode_example": "reads what prefill_example.py beside it writes",
    r"flexkv": "needs FlexKV, a KV cache of another program",
    r"kv_events_subscriber": "waits for KV events for ever; see docs/how-to/prefix-cache.md for ours",
    r"structured_diffusion": "patches vLLM's own files for diffusion models",
    r"applications/api_server/server": "runs with client.py, in the line above",
    r"tool_calling/chat_with_tools_offline": "reads calls as the JSON list that Mistral's models write; leaf does not",
    r"example_mm_serve|token_generation_client|mooncake": "needs several servers (disaggregated serving)",
}  # fmt: skip
NAMED = re.compile(
    r"AbsentFeatureError|UnsupportedError|not supported|not implemented|is known but|does not implement|Quire has no|"
    r"is not one of|unknown key"
)
NO_HUB = re.compile(
    r"couldn't connect to 'https://huggingface|offline mode|HF_HUB_OFFLINE|ConnectError|Name or service|"
    r"Temporary failure|Failed to resolve|not in the local cache"
)
# Programs that are served by another one, which runs beside them.
SERVED_BY = {"applications/api_server/client.py": "applications/api_server/server.py"}
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


def run(path: Path, name: str, server: str, workplace: Path) -> Outcome:
    """Run one example."""
    for pattern, reason in NOT_RUN.items():
        if re.search(pattern, name):
            return Outcome(name, "not run", reason)
    program = workplace / name.replace("/", "__")
    program.write_text(rewrite(name, path.read_text(), server))
    environment = {
        **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_MODEL": MODEL, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "EMPTY",
        "TMPDIR": str(workplace),
    }  # fmt: skip
    arguments = [sys.executable, str(program)]
    with contextlib.ExitStack() as others:
        if name in SERVED_BY:
            host, port = own_server(path.parent / Path(SERVED_BY[name]).name, workplace, environment, others)
            arguments += ["--host", host, "--port", str(port)]
        try:
            done = subprocess.run(
                arguments, cwd=workplace, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(name, "fails", f"did not end within {LIMIT_S:.0f} s")
    (workplace / f"{program.name}.log").write_text(done.stdout + done.stderr)
    return judge(name, done.returncode, done.stdout + "\n" + done.stderr)


def own_server(
    path: Path, workplace: Path, environment: dict[str, str], others: contextlib.ExitStack
) -> tuple[str, int]:
    """Start an example that is a server; where it listens, once it does. It ends with `others`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = ("127.0.0.1", int(probe.getsockname()[1]))
    program = workplace / f"server_{path.name}"
    program.write_text(rewrite(str(path), path.read_text(), f"{address[0]}:{address[1]}"))
    process = subprocess.Popen(
        [sys.executable, str(program), "--host", address[0], "--port", str(address[1])],
        cwd=workplace, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    others.callback(process.wait, 60)
    others.callback(process.send_signal, signal.SIGINT)
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1.0):
            break
        time.sleep(0.2)
    return address


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
        "Where an argument is too large for leaf, `tests/compat/rewriting.py` says what was changed.",
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
    examples: Path = options.examples or fetch()
    paths = [path for path in sorted(examples.rglob("*.py")) if path.name != "__init__.py"]
    chosen = [path for path in paths if options.only in str(path.relative_to(examples))]
    with tempfile.TemporaryDirectory() as directory, ServerProcess(*SERVER_FLAGS) as server:
        workplace = options.keep or Path(directory)
        outcomes = []
        for path in chosen:
            outcome = run(path, str(path.relative_to(examples)), f"127.0.0.1:{server.port}", workplace)
            print(f"{outcome.name}: {outcome.result} {outcome.message}", flush=True)
            outcomes.append(outcome)
    if len(chosen) == len(paths):
        PAGE.write_text(page(outcomes))
    num_silent = sum(outcome.result == "fails" for outcome in outcomes)
    print(num_silent)
    return 1 if num_silent else 0


if __name__ == "__main__":
    raise SystemExit(main())

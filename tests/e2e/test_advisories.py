"""Attacks that other engines fell to: model files, the prefix cache, mixed parameters, messages between processes.

docs/reference/advisories.md says which is which.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import pickle
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.core.engine_messages import EngineCoreRequest
from quire.core.serial import MessageDecoder
from quire.engine.llm_engine import LLMEngine
from quire.errors import MessageError, QuireError
from quire.kv_cache.block_hash import BLOCK_HASHES
from tests.e2e.bad_models import BAD_TEMPLATES
from tests.e2e.tiny_model import VOCAB_SIZE, Evil, layout, pack, tensors, write_json, write_tiny_model
from tests.robustness.server_fuzz.processes import Served
from tests.server.engines import SteppedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import post

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20, "block_size": 16,
    "num_threads": 1,
}  # fmt: skip

AUDITED = """
import json, sys
directory, action = sys.argv[1:]
found = []
def hook(event, arguments):
    text = str(arguments[0]) if arguments else ""
    if event == "import" and text.endswith("_evil"):
        found.append([event, text])
    elif event in ("exec", "compile") and directory in str(getattr(arguments[0], "co_filename", arguments[-1])):
        found.append([event, text])
    elif event == "open" and text.startswith(directory) and text.endswith((".py", ".bin", ".pyc", ".pt")):
        found.append([event, text])
    elif event == "pickle.find_class":
        found.append([event, str(arguments)])
if action == "load":
    from quire import LLM, SamplingParams
    import torch._dynamo
sys.addaudithook(hook)
if action == "load":
    llm = LLM(directory, max_num_seqs=4, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 20, num_threads=1)
    llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2), use_tqdm=False)
elif action == "import":
    sys.path.insert(0, directory)
    import modeling_evil
elif action == "unpickle":
    import pickle
    pickle.load(open(directory + "/pytorch_model.bin", "rb"))
print(json.dumps(found))
"""


def audited(directory: Path, action: str) -> list[list[str]]:
    """What of the directory was opened or run as code, as the interpreter itself tells."""
    command = [sys.executable, "-c", AUDITED, str(directory), action]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    found: list[list[str]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model directory that asks in every way it can for its own code to be run."""
    directory = write_tiny_model(tmp_path / "model", tmp_path / "marker")
    for name, kinds in (("config", ("AutoConfig", "AutoModel", "AutoModelForCausalLM")), ("generation_config", ("x",))):
        content = json.loads((directory / f"{name}.json").read_text())
        content |= {"auto_map": dict.fromkeys(kinds, "modeling_evil.Evil"), "custom_pipelines": {"x": {}}}
        write_json(directory / f"{name}.json", content)
    return directory


def test_cve_2026_22807_a_model_directory_runs_nothing(hostile: Path, tmp_path: Path):
    assert audited(hostile, "load") == []
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("action", ["import", "unpickle"])
def test_cve_2026_22807_what_would_run_is_noticed(hostile: Path, tmp_path: Path, action: str):
    assert audited(hostile, action)
    assert (tmp_path / "marker").exists()


def test_cve_2026_7482_no_offset_and_no_size_reaches_past_the_file(tmp_path: Path):
    directory = write_tiny_model(tmp_path / "model", tmp_path / "marker")
    header, data = layout(tensors())
    end = len(data)
    places = (
        (0, end + 1),
        (end - 4, end + 4),
        (end, end + 64),
        (2**31, 2**31 + 64),
        (2**63, 2**63 + 64),
        (-64, 0),
        (8, 4),
    )
    shapes = ([2**62], [2**32, 2**32], [-1], [HUGE := 10**9, 1])
    for name in ("model.norm.weight", "lm_head.weight"):
        spoilt = [{"data_offsets": list(place)} for place in places] + [{"shape": list(shape)} for shape in shapes]
        for change in spoilt:
            changed = {**header, name: {**header[name], **change}}
            (directory / "model.safetensors").write_bytes(pack(changed, data))
            with pytest.raises(QuireError) as caught:
                LLM(str(directory), **SMALL)
            assert caught.value.hint, change
    assert HUGE
    (directory / "model.safetensors").write_bytes(pack(header, data))
    LLM(str(directory), **SMALL)


HOSTILE_TEMPLATES = ("class of a text", "globals of a function", "attribute by filter", "import", "include a file")


@pytest.mark.parametrize("case", HOSTILE_TEMPLATES)
def test_cve_2024_34359_a_template_in_the_model_directory_reaches_nothing(tmp_path: Path, case: str):
    marker = tmp_path / "marker"
    directory = write_tiny_model(tmp_path / "model", marker)
    source = BAD_TEMPLATES[case][0] + "{{ cycler.__init__.__globals__.os.system('touch " + str(marker) + "') }}"
    config = json.loads((directory / "tokenizer_config.json").read_text())
    write_json(directory / "tokenizer_config.json", {**config, "chat_template": source})
    with pytest.raises(QuireError, match="chat template"):
        LLM(str(directory), **SMALL).chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=1), False)
    assert not marker.exists()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("advisories")
    return str(write_tiny_model(root / "model", root / "marker"))


def test_ghsa_rm76_pages_whose_hashes_collide_are_not_mixed_up(tiny: str, monkeypatch: pytest.MonkeyPatch):
    prompts = [{"prompt_token_ids": [(i * 31 + j * (1 + i % 3)) % 250 for j in range(40)]} for i in range(12)]
    prompts += [{"prompt_token_ids": [*prompts[0]["prompt_token_ids"][:32], 7, 8, 9]}]
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)

    def answers(**settings: Any) -> tuple[list[Any], int]:
        with LLM(tiny, **SMALL, **settings) as llm:
            outputs = [llm.generate(prompt, greedy, use_tqdm=False)[0] for prompt in prompts * 2]
        num_cached = sum(one.num_cached_tokens or 0 for one in outputs)
        return [(one.outputs[0].token_ids, one.outputs[0].cumulative_logprob) for one in outputs], num_cached

    expected, _ = answers(enable_prefix_caching=False)
    monkeypatch.setitem(BLOCK_HASHES, "sha256", lambda *content: b"the same for all")
    found, num_cached = answers()
    assert found == expected
    assert num_cached > 20 * 16, "blocks were found in the cache, by their tokens"


PARAMETERS: dict[str, Any] = {
    "presence_penalty": 1.5, "frequency_penalty": -1.0, "repetition_penalty": 1.4, "temperature": 1.3, "top_p": 0.7,
    "top_k": 5, "min_p": 0.1, "seed": 11, "stop": ["zz"], "stop_token_ids": [3, 255], "ignore_eos": True,
    "min_tokens": 3,
    "logprobs": 3, "prompt_logprobs": 2, "logit_bias": {5: 50.0, 6: -50.0}, "allowed_token_ids": [5, 6, 7, 8],
    "bad_words": ["ab", "c"], "n": 2, "skip_special_tokens": False, "include_stop_str_in_output": True,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "kernel by kernel": {"enforce_eager": True},
    "no prefix cache": {"enable_prefix_caching": False},
    "reference": {"attention_backend": "torch_reference"},
    "scarce pages": {"num_gpu_blocks_override": 10},
}


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES.keys())
def test_cve_2026_44223_every_pair_of_parameters_works_in_every_mode(tiny: str, settings: dict[str, Any]):
    pairs = list(itertools.combinations(PARAMETERS, 2))
    values = [{"max_tokens": 4, "temperature": 0.9, **{name: PARAMETERS[name] for name in pair}} for pair in pairs]
    prompts = [{"prompt_token_ids": [1, 2, 3, 4, 5 + number % 20] * 4} for number in range(len(pairs))]
    memory = {} if "num_gpu_blocks_override" in settings else {"kv_cache_memory_bytes": 1 << 20}
    common = {name: value for name, value in SMALL.items() if name != "kv_cache_memory_bytes"}
    with LLM(tiny, **common, **memory, **settings) as llm:
        outputs = llm.generate(prompts, [SamplingParams(**one) for one in values], use_tqdm=False)
    for output, pair in zip(outputs, pairs, strict=True):
        reasons = {one.finish_reason for one in output.outputs}
        assert output.finished and reasons <= {"stop", "length"}, pair
        if "allowed_token_ids" in pair:
            assert {token for one in output.outputs for token in one.token_ids} <= {5, 6, 7, 8}, pair
        assert all(0 <= token < VOCAB_SIZE for one in output.outputs for token in one.token_ids)


TENANTS = "red=red-key-1234\nblue=blue-key-1234\n"


def test_cve_2025_46570_a_tenant_cannot_learn_what_another_has_asked(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text(TENANTS)
    config = build_config(model="leaf", num_gpu_blocks_override=256, packing_cache=False)
    engine = SteppedEngine(LLMEngine.from_config(config))
    secret = "The secret of the house is under the third stone behind the well. " * 8

    def num_cached(server: RunningServer, tenant: str, **fields: Any) -> int:
        headers = {"authorization": f"Bearer {tenant}-key-1234"}
        answer: httpx.Response = post(
            server, "/v1/completions", {"prompt": secret, "max_tokens": 1, **fields}, headers=headers
        )
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    with RunningServer(engine, api_key_file=str(keys)) as server:
        assert num_cached(server, "red") == 0
        assert num_cached(server, "red") > 0, "the cache works at all"
        guesses = ("red", "red-", "default", "x", "0" * 32)
        assert num_cached(server, "blue") == 0
        assert [num_cached(server, "blue", cache_salt=guess) for guess in guesses] == [0] * len(guesses)
        assert num_cached(server, "red", cache_salt="mine") == 0 < num_cached(server, "red", cache_salt="mine")
    engine.shutdown()


def test_cve_2024_50050_a_pickle_between_the_processes_is_an_error_and_is_not_loaded(tmp_path: Path):
    marker = tmp_path / "marker"
    attack = pickle.dumps(Evil(marker))
    for frames in ([attack], [attack, attack], [b"\x81\xa1a" + attack]):
        with pytest.raises(MessageError):
            MessageDecoder(EngineCoreRequest).decode(frames)
    assert not marker.exists()
    pickle.loads(attack).close()
    assert marker.exists(), "the attack is a real one"


SERIALISERS = re.compile(
    r"\b(pickle|cloudpickle|dill|marshal|shelve|joblib)\b|torch\.load|np\.load|allow_pickle|yaml\.(unsafe_)?load\b"
)


def test_cve_2026_3059_cve_2026_3060_and_cve_2026_3989_nothing_in_the_package_unpickles():
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call)
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:80]}"
        for path in sorted((ROOT / "quire").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds) and SERIALISERS.search(ast.unparse(node))
    ]
    assert not found


def test_cve_2026_42248_and_cve_2026_42249_nothing_updates_itself():
    """What the package may reach over a network: the hub for a model that is named, and a server for `quire chat`."""
    clients = re.compile(r"^(urllib\.request|http\.client|requests|httpx|aiohttp|huggingface_hub|pip|ftplib|smtplib)\b")
    found = set()
    for path in sorted((ROOT / "quire").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {str(path.relative_to(ROOT)) for name in names if clients.match(name)}
    allowed = {"quire/models/hub_client.py", "quire/cli/remote_chat.py", "quire/utils/http_get.py"}
    assert {name for name in found if "/bench" not in name} <= allowed, found


def listening(pids: tuple[int, ...]) -> list[str]:
    """Local TCP addresses that the processes listen on."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            inodes |= {found[1]} if found else set()
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [line[1] for line in lines if line[3] == "0A" and line[9] in inodes]


def test_cve_2026_7301_a_whole_deployment_listens_on_one_port_of_the_loopback(tmp_path: Path):
    with Served(tmp_path) as served:
        (address,) = listening(served.pids())
        assert address == f"0100007F:{served.port:04X}"
        names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "/quire-" in line]
        assert names, "the engine talks over sockets of the file system"
        for place in {Path(name).parent for name in names}:
            assert not place.exists() or stat.S_IMODE(place.stat().st_mode) == 0o700, place

"""What `make compat-examples` changes in an example, and what it makes of an example's end."""

from __future__ import annotations

import pytest

from tests.compat.rewriting import rewrite
from tests.compat.vllm_examples import Outcome, judge, page

PROGRAM = """
from vllm import LLM
from vllm.sampling_params import SamplingParams
import vllm.envs as envs
llm = LLM(model="org/some-model-7B", seed=1)  # vllm is fast
parser.add_argument("--model", default="org/other")
url = "http://localhost:8000/v1"
"""


def test_only_imports_models_and_addresses_are_changed():
    changed = rewrite("x.py", PROGRAM, "127.0.0.1:9")
    assert changed == (
        PROGRAM.replace("from vllm", "from quire.compat.vllm").replace("import vllm", "import quire.compat.vllm")
        .replace("org/some-model-7B", "leaf").replace("org/other", "leaf").replace("localhost:8000", "127.0.0.1:9")
    )  # fmt: skip


def test_other_addresses_of_an_example_stay():
    text = 'sub.connect("tcp://localhost:5557")'
    assert rewrite("x.py", text, "127.0.0.1:9", without_server=True) == text


@pytest.mark.parametrize(
    ("status", "output", "result"),
    [
        (0, "anything", "works"),
        (1, "x\nquire.compat.absent.AbsentFeatureError: vllm.lora: Quire has no LoRA", "names what is missing"),
        (1, "ModuleNotFoundError: No module named 'ray'", "needs the package ray"),
        (1, "ModuleNotFoundError: No module named 'quire.compat.vllm.x'", "fails"),
        (1, "OSError: We couldn't connect to 'https://huggingface.co'", "needs the network"),
        (1, "Traceback\n  File x\nKeyError: 'data'", "fails"),
        (2, "", "fails"),
    ],
)
def test_an_end_is_judged_by_its_status_and_last_error(status, output, result):
    assert judge("x.py", status, output).result == result


def test_the_page_counts_and_lists():
    text = page([Outcome("a.py", "works"), Outcome("b.py", "fails", "a | b")])
    assert "2 examples. works: 1, fails: 1." in text and "| b | fails | a \\| b |" in text

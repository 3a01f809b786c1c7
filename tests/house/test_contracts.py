"""The layers of the house, checked: see [tool.importlinter] in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_imports_keep_the_contracts():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    result = subprocess.run([*command, "--no-cache"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"an import crosses a wall; move the code or write an ADR\n{result.stdout}"


def test_importing_quire_loads_no_heavy_library():
    code = "import sys, quire; print(sorted({'torch', 'numpy', 'tokenizers', 'transformers'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_offline_generation_loads_no_web_framework():
    code = (
        "import sys, quire.entrypoints.llm, quire.entrypoints.args, quire.cli.main\n"
        "print(sorted({'starlette', 'uvicorn', 'yaml', 'prometheus_client'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_server_loads_little_before_its_core_is_started():
    late = {"asyncio", "jinja2", "tokenizers", "yaml", "quire.parsers", "quire.scheduler", "quire.structured_output"}
    code = (
        "import sys, quire.cli.serve, quire.server.checks, quire.server.http.listening, quire.engine.mp_factory\n"
        f"print(sorted({late!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_generating_loads_neither_a_compiler_nor_transformers():
    code = (
        "import sys; from quire import LLM, SamplingParams\n"
        "llm = LLM('leaf', num_gpu_blocks_override=64)\n"
        "llm.generate(['Once', 'Two'], SamplingParams(max_tokens=4), use_tqdm=False)\n"
        "print(sorted({'torch._dynamo', 'torch._inductor', 'sympy', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_control_plane_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import quire.scheduler.scheduler, quire.kv_cache.manager, quire.config, quire.core.outputs\n"
        "import quire.formats.block_formats"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_server_runs_without_torch():
    code = "import sys; sys.modules['torch'] = None\nimport quire.engine.async_llm, quire.engine.llm_engine"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

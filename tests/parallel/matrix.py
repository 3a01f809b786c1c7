"""Every family and every format of weights: several ranks give the bytes of one. `python -m tests.parallel.matrix`.

`--only NAME,...` limits it to some subjects, `--stages` to pipeline stages. The last line is the number of cases that
differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.errors import QuireError
from quire.models.model_dir import read_model_dir
from tests.models.families.cases import CASES
from tests.models.stored_models import KINDS, make_tiny
from tests.parallel.circumstances import CIRCUMSTANCES, WHOLE_EXPERTS, answers

VOCAB_SIZE = 320
FORMATS = ("int8", "int4", "fp8", "bitsandbytes")
# (ranks that compute each layer, pipeline stages)
SIZES = ((2, 1), (4, 1), (1, 2), (2, 2))
SIZES_OF_LEAF = (*SIZES, (1, 4))


def subjects(directory: Path) -> Iterator[tuple[str, Path | str, int, Mapping[str, Any]]]:
    """(name, model, vocabulary, settings)."""
    for quantization in (None, *FORMATS):
        yield f"leaf {quantization or 'bfloat16'}", "leaf", 3000, {"quantization": quantization}
    yield "leaf float32", "leaf", 3000, {"dtype": "float32"}
    for kind in KINDS:
        served, _ = make_tiny(kind, directory / kind)
        yield kind, served, VOCAB_SIZE, {"dtype": "bfloat16"}
    CASES["mixtral"].write(directory / "mixtral of formats")
    for quantization in FORMATS:
        settings = {"dtype": "bfloat16", "quantization": quantization}
        yield f"mixtral {quantization}", directory / "mixtral of formats", VOCAB_SIZE, settings
    for name, case in CASES.items():
        path = directory / name.replace("/", "-")
        case.write(path)
        yield name, path, VOCAB_SIZE, {"dtype": "bfloat16", **case.settings}


def has_experts(model: Path | str) -> bool:
    """Whether it is a mixture."""
    return isinstance(model, Path) and any(layer.moe is not None for layer in read_model_dir(model).arch().layers)


def main() -> None:
    """Run all cases; leaf under every circumstance, mixtures with whole experts, too, the others as they are and call
    by call.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--stages", action="store_true")
    args = parser.parse_args()
    wanted, num_different, num_cases = [name for name in args.only.split(",") if name], 0, 0
    with tempfile.TemporaryDirectory() as directory:
        for name, model, vocab_size, settings in subjects(Path(directory)):
            if wanted and name not in wanted:
                continue
            start = time.perf_counter()
            structured = name.startswith("leaf")
            expected = answers(model, vocab_size, 1, structured=structured, **settings)
            different = []
            circumstances = (
                CIRCUMSTANCES
                if name == "leaf bfloat16"
                else {"as one": {}, "call by call": CIRCUMSTANCES["call by call"]}
            )
            if has_experts(model):
                circumstances = {**circumstances, **WHOLE_EXPERTS}
            for num_ranks, num_stages in SIZES_OF_LEAF if model == "leaf" else SIZES:
                if args.stages and num_stages == 1:
                    continue
                for circumstance, changes in circumstances.items():
                    try:
                        found = answers(
                            model, vocab_size, num_ranks, num_stages=num_stages, structured=structured,
                            **{**settings, **changes},
                        )  # fmt: skip
                        is_same = found == expected
                        problem = "" if is_same else "differs"
                    except QuireError as error:
                        if error.field == "pipeline_parallel_size":
                            print(f"{name}: {error.message}")
                            break
                        problem = f"{type(error).__name__}: {error.message}"
                    num_cases += 1
                    if problem:
                        different.append(f"{num_ranks} x {num_stages} ranks, {circumstance}: {problem}")
            num_different += len(different)
            print(f"{name}: {'; '.join(different) or 'the same'} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{num_different} of {num_cases} differ")
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main()

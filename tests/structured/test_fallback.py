"""A grammar that one library refuses when it compiles it is made by the next one; what is told is about the grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import ValidationError
from quire.models.hub import resolve_model_path
from quire.structured_output.choose import resolve_structured_outputs, with_fallbacks
from quire.structured_output.compile.messages import WorkerSetup
from quire.structured_output.compile.pool import CompilePool
from quire.structured_output.interface import GrammarError
from quire.structured_output.spec import spec_of
from tests.structured.libraries import backend, needs_libraries

pytestmark = [
    needs_libraries,
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of memory need /proc"),
]
# xgrammar takes no schema with bounds that nothing meets, not even as one of several: an integer is valid here.
BOUNDS = {"anyOf": [{"type": "array", "minItems": 5, "maxItems": 3}, {"type": "integer"}]}
OVERLAPPING = {"oneOf": [{"type": "integer"}, {"minimum": 2}]}
INTERNAL = (".cc", "/project", "coerce_one_of", "[1", "Check failed", "json-schema:", "pydantic")


@pytest.fixture(scope="module")
def pool() -> Iterator[CompilePool]:
    pool = CompilePool(WorkerSetup(str(resolve_model_path("leaf", None, None)), 3072, 2, 10.0, 1 << 30))
    yield pool
    pool.close()


def resolved(config: StructuredOutputsConfig, **asked: object) -> StructuredOutputsParams:
    return resolve_structured_outputs(StructuredOutputsParams(**asked), config)  # type: ignore[arg-type]


def test_the_next_library_makes_what_the_first_refuses(pool: CompilePool):
    params = resolved(StructuredOutputsConfig(), json=BOUNDS)
    assert params.backend == "xgrammar"
    grammar, _ = pool.compile(spec_of(params)).result()
    assert grammar.spec is not None and grammar.spec.backend == "guidance"


def test_a_library_that_was_asked_for_is_the_only_one(pool: CompilePool):
    params = resolved(StructuredOutputsConfig(backend="xgrammar"), json=BOUNDS)
    with pytest.raises(
        ValidationError, match="rejected by xgrammar: minItems is greater than maxItems: 5 > 3\n"
    ) as found:
        pool.compile(spec_of(params)).result()
    assert found.value.hint == "correct it, or set structured_outputs_backend to auto"


@pytest.mark.parametrize("text", ["root ::= root", "root ::= a\na ::= b\nb ::= a", 'root ::= "a'])
def test_a_grammar_that_no_text_follows_is_refused_as_a_broken_one_is(text: str):
    with pytest.raises(GrammarError) as found:
        backend("xgrammar").compile(spec_of(resolved(StructuredOutputsConfig(), grammar=text)))
    assert not any(word in str(found.value) for word in INTERNAL)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("[11:26:42] /project/cpp/a_converter.cc:4950: Cannot find field 0 in #/a", "Cannot find field 0 in #/a"),
        ("[11:26:42] cpp/a.cc:7: Check failed: (x > 0) is false: too short", "too short"),
        (
            "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
            "oneOf constraints are not supported",
        ),
        ("schema is false while processing json-schema:///#/$defs/a", "schema is false while processing #/$defs/a"),
        ("ValueError: a is wrong", "a is wrong"),
        ("the pattern /a.b/ is not disjoint", "the pattern /a.b/ is not disjoint"),
    ],
)  # fmt: skip
def test_what_a_library_says_of_itself_is_left_out(reason: str, told: str):
    assert str(GrammarError(reason)) == told


def test_generate_says_in_the_output_why_a_request_has_none():
    llm = LLM(max_model_len=128, max_num_seqs=2)
    asked = [OVERLAPPING, BOUNDS]
    params = [SamplingParams(max_tokens=60, seed=1, structured_outputs={"json": one}) for one in asked]
    failed, written = (one.outputs[0] for one in llm.generate(["Once"] * 2, params, use_tqdm=False))
    assert failed.finish_reason == "error" and "oneOf constraints are not supported" in str(failed.error)
    assert not any(word in str(failed.error) for word in INTERNAL)
    assert written.finish_reason in ("stop", "length") and written.error is None
    if written.finish_reason == "stop":
        assert type(json.loads(written.text)) is int
    llm.llm_engine.shutdown()


def test_a_pattern_of_whitespace_goes_to_a_library_that_follows_it():
    auto = StructuredOutputsConfig()
    for asked in ({"json": {"type": "integer"}}, {"json_object": True}):
        assert resolved(auto, **asked).backend == "xgrammar"
        params = resolved(auto, **asked, whitespace_pattern=" ?")
        assert params.backend == "guidance"
        assert {one.backend for one in with_fallbacks(spec_of(params))} <= {"guidance", "outlines"}
    with pytest.raises(ValidationError, match="xgrammar: whitespace_pattern is not supported"):
        resolved(StructuredOutputsConfig(backend="xgrammar"), json={"type": "integer"}, whitespace_pattern=" ?")
    for kind, value in (("regex", "a"), ("choice", ["a"]), ("grammar", 'root ::= "a"')):
        with pytest.raises(ValidationError, match=f"whitespace_pattern has no effect on {kind}"):
            StructuredOutputsParams.of({kind: value, "whitespace_pattern": " ?"})

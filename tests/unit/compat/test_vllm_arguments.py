"""EngineArgs and FlexibleArgumentParser: settings as objects and as flags, as programs for vLLM use them."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from quire.compat.vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from quire.compat.vllm.utils.argparse_utils import FlexibleArgumentParser
from quire.config.build import build_config
from quire.errors import UnsupportedError


def parser_of_a_program() -> FlexibleArgumentParser:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="a program"))
    parser.set_defaults(model="leaf")
    parser.add_argument_group("Sampling parameters").add_argument("--max-tokens", type=int)
    return parser


def test_arguments_are_what_the_settings_are():
    args = EngineArgs("leaf", max_model_len=512, enable_prefix_caching=False)
    assert args.create_engine_config() == build_config(model="leaf", max_model_len=512, enable_prefix_caching=False)


@pytest.mark.parametrize("make", [dict, dataclasses.asdict, lambda args: vars(args)], ids=["dict", "asdict", "vars"])
def test_arguments_as_keywords_make_the_same_configuration(make):
    args = AsyncEngineArgs(model="leaf", seed=7, max_num_seqs=4)
    assert build_config(**make(args)) == args.create_engine_config()


def test_defaults_are_there_to_be_read_and_changed():
    args = EngineArgs(model="leaf")
    assert args.tensor_parallel_size == 1 and args.seed == 0 and args.enable_lora in (None, False)
    args.seed = 3
    assert args.create_engine_config().model.seed == 3


def test_a_feature_that_is_missing_is_refused_when_the_configuration_is_made():
    with pytest.raises(UnsupportedError, match="enable_lora"):
        EngineArgs(model="leaf", enable_lora=True).create_engine_config()


def test_flags_become_values_of_their_own_type_beside_the_programs_own():
    parsed = parser_of_a_program().parse_args(["--max-model-len", "512", "--max-tokens", "5", "--enforce-eager"])
    assert (parsed.max_model_len, parsed.max_tokens, parsed.enforce_eager) == (512, 5, True)
    assert parsed.model == "leaf" and parsed.tensor_parallel_size == 1
    values = vars(parsed)
    assert values.pop("max_tokens") == 5
    assert build_config(**values) == build_config(model="leaf", max_model_len=512, enforce_eager=True)


def test_a_flag_that_the_program_has_itself_stays_its_own():
    parser = FlexibleArgumentParser()
    parser.add_argument("--log-level", default="debug", choices=["debug", "all"])
    parsed = EngineArgs.add_cli_args(parser).parse_args(["--log-level", "all", "--max_model_len", "512"])
    assert (parsed.log_level, parsed.max_model_len) == ("all", 512)


def test_settings_are_picked_out_of_parsed_flags():
    for parser in (parser_of_a_program(), EngineArgs.add_cli_args(argparse.ArgumentParser())):
        args = EngineArgs.from_cli_args(parser.parse_args(["--model", "leaf", "--max-num-seqs", "4"]))
        assert args.create_engine_config() == build_config(model="leaf", max_num_seqs=4)


def test_a_wrong_flag_ends_the_program_as_argparse_does(capsys):
    with pytest.raises(SystemExit) as ended:
        parser_of_a_program().parse_args(["--max-model-lenn", "512"])
    assert ended.value.code == 2 and "--max-model-len" in capsys.readouterr().err


def test_a_parser_without_engine_flags_is_a_plain_one():
    parser = FlexibleArgumentParser(description="a program")
    parser.add_argument("--port", type=parser.check_port, default=8000)
    assert vars(parser.parse_args(["--port", "9000"])) == {"port": 9000}

"""Flags are derived from fields; old and new spellings, files and keywords have the same checks and errors."""

from __future__ import annotations

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_engine.config.absent_flags import absent_flags
from moe_engine.config.args import PARTS, EngineArgs, build_parser
from moe_engine.config.field import fields_of, flag, option_of
from moe_engine.config.flags import known_options, parse_flags
from moe_engine.config.values import parse_count
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.planning.steps import resolve_kernels
from tests.examples import examples

ALL_FIELDS = [info for part in PARTS.values() for info in fields_of(part)]
ABSENT = absent_flags()
ACCEPTED = {spelling for info in ALL_FIELDS for spelling in info.spellings} | set(map(option_of, ABSENT.no_effect))
REFUSED = set(map(option_of, ABSENT.name_of)) - ACCEPTED


def cli(text: str) -> EngineArgs:
    return EngineArgs.from_cli(text.split())


@pytest.mark.parametrize("info", ALL_FIELDS, ids=lambda info: info.name)
def test_every_field_has_help_and_a_flag(info):
    assert len(info.flag.help) > 20 and info.flag.help.rstrip().endswith((".", ")"))
    assert info.option in known_options(build_parser())
    allowed = info.flag.allowed()
    if allowed is not None and info.default is not None:
        assert info.default in allowed
    for synonym, meaning in info.flag.synonyms.items():
        assert synonym not in allowed and meaning in allowed
    assert not set(info.flag.unsupported) & {*(allowed or ()), *info.flag.synonyms}


def test_names_are_unique():
    names = [info.name for info in ALL_FIELDS] + list(ABSENT.flags) + list(ABSENT.no_effect)
    assert len(names) == len(set(names))
    assert set(ABSENT.name_of.values()) == {*ABSENT.flags, *ABSENT.no_effect}


def test_names_of_absent_flags_abbreviate_no_accepted_flag():
    """The command line prefers an abbreviation of an accepted flag."""
    assert not [(name, option) for name in REFUSED for option in ACCEPTED if option.startswith(name)]


def test_the_data_file_is_read_only_for_flags_without_a_field():
    absent_flags.cache_clear()
    cli("--tp 2 --page-size 4")
    assert absent_flags.cache_info().currsize == 0
    cli("--pp 1")
    assert absent_flags.cache_info().currsize == 1


def test_parts_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineArgs().memory.page_size = 4  # type: ignore[misc]


def test_field_without_metadata_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Part:
        name: str = "x"

    with pytest.raises(TypeError, match="no flag metadata"):
        fields_of(Part)

    @dataclasses.dataclass(frozen=True)
    class Odd:
        name: list = flag(None, "a list")  # noqa: RUF009

    with pytest.raises(TypeError, match="bool, int, float or str"):
        fields_of(Odd)


def test_defaults_are_sglangs():
    args = cli("")
    assert args == EngineArgs() and not args.given
    flat = args.flat()
    expected = {
        "host": "127.0.0.1", "port": 30000, "tokenizer_mode": "auto", "load_format": "auto", "dtype": "auto",
        "kv_cache_dtype": "auto", "max_prefill_tokens": 16384, "schedule_policy": "fcfs",
        "schedule_conservativeness": 1.0, "stream_interval": 1, "watchdog_timeout": 300.0, "log_level": "info",
        "decode_log_interval": 40, "log_requests_level": 2, "priority_scheduling_preemption_threshold": 10,
        "mem_fraction_static": None, "page_size": None, "chunked_prefill_size": None, "enable_metrics": False,
    }  # fmt: skip
    assert {name: flat[name] for name in expected} == expected


def test_values_and_spellings():
    args = cli("--model m --max-total-tokens 64k --dtype half --chunked-prefill-size=-1 --enable-mixed-c --tp_size 2")
    assert args.model.model_path == "m" and args.model.dtype == "float16"
    assert args.memory.max_total_tokens == 64000 and args.memory.chunked_prefill_size == -1
    assert args.scheduling.enable_mixed_chunk
    assert args.parallel.tp_size == 2
    assert args.given == {
        "model_path", "max_total_tokens", "dtype", "chunked_prefill_size", "enable_mixed_chunk", "tp_size",
    }  # fmt: skip
    same = EngineArgs.from_kwargs(
        model="m", max_total_tokens="64k", dtype="half", chunked_prefill_size=-1, enable_mixed_chunk=True, tp_size=2
    )
    assert same == args
    assert args.replace(page_size=1).memory.page_size == 1 and args.replace(page_size=1).model.dtype == "float16"


def test_old_spelling_is_accepted_with_one_line(capsys):
    assert cli("--stream-output").server.incremental_streaming_output
    assert capsys.readouterr().err == "note: --stream-output is now called --incremental-streaming-output\n"
    assert cli("--incremental-streaming-output").server.incremental_streaming_output
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--pp-size 4", "--pp-size 4: not supported yet: pipeline parallelism; leave it out or use 1"),
        ("--pp 8", "--pp-size 8: not supported yet"),
        ("--pp-size", "--pp-size: not supported yet"),
        ("--attn-cp-size 2 --enable-symm-mem", "--attn-cp-size 2: not supported yet"),
        ("--enable-symm-mem", "--enable-symm-mem: not supported yet: further forms"),
        ("--speculative-dflash-block-size 8", "further speculative algorithms"),
        ("--speculative-algorithm FROZEN_KV_MTP", "assistants of Gemma 4"),
        ("--moe-a2a-backend mooncake", "more dispatch backends"),
        ("--lora-backend ascend", "other LoRA backends"),
        ("--cuda-graph-max-bs-prefill 128", "CUDA graphs of prefill"),
        ("--num-reserved-decode-tokens 256", "prefill-decode disaggregation"),
        ("--kv-cache-dtype nvfp4", "4-bit KV caches"),
        ("--attention-backend trtllm_mha", "TensorRT-LLM kernels"),
        ("--attention-backend aiter", "other accelerators"),
        ("--triton-attention-num-kv-splits 16", "settings of individual Triton kernels"),
        ("--triton-attention-reduce-in-fp32", "settings of individual Triton kernels"),
        ("--flashinfer-mla-disable-ragged", "the form of prefill attention"),
        ("--enable-piecewise-cuda-graph", "CUDA graphs of prefill"),
        ("--enable-llama4-multimodal", "multimodal models"),
        ("--quantization marlin", "other quantization schemes"),
        ("--quantization quark", "other quantization schemes"),
        ("--load-format npcache", "other checkpoint formats"),
        ("--tool-call-parser step3", "more output parsers"),
    ],
)  # fmt: skip
def test_unsupported_flags_are_refused_by_name(text, words):
    with pytest.raises(NotAvailableYet) as refusal:
        cli(text)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "text",
    [
        "--pp-size 1 --attn-cp-size 1 --moe-dp-size 1",
        "--pipeline-parallel-size 1",
        "--cuda-graph-backend-prefill disabled",
    ],
)
def test_unsupported_flags_at_their_default_are_accepted(text):
    assert not cli(text).given


def test_unsupported_switch_as_keyword():
    assert EngineArgs.from_kwargs(enable_symm_mem=False) == EngineArgs()
    with pytest.raises(NotAvailableYet):
        EngineArgs.from_kwargs(enable_symm_mem=True)
    with pytest.raises(NotAvailableYet, match="--pp-size 4"):
        EngineArgs.from_kwargs(pp_size=4)


def test_satisfied_switch_is_noted():
    assert cli("--skip-server-warmup").notes[0].startswith("--skip-server-warmup: no effect")
    assert not EngineArgs.from_kwargs(skip_server_warmup=False).notes


@pytest.mark.parametrize("name", [name for name, flag in ABSENT.flags.items() if flag.removed])
def test_removed_flags_name_their_replacement(name):
    with pytest.raises(ConfigError, match="removed from SGLang") as refusal:
        EngineArgs.from_kwargs(**{name: True})
    assert ABSENT.flags[name].reason in str(refusal.value)
    for value in ("",) if ABSENT.flags[name].is_switch else ("", " 77"):
        with pytest.raises(ConfigError, match="removed from SGLang"):
            cli(option_of(name) + value)


@pytest.mark.parametrize("name", ABSENT.flags)
def test_a_refusal_recommends_nothing_that_is_refused(name):
    """The flags and values that the message names as the fix."""
    with pytest.raises(ConfigError) as refusal:
        EngineArgs.from_kwargs(**{name: True if ABSENT.flags[name].is_switch else "unheard-of"})
    text = str(refusal.value)
    for advice in re.findall(r"use (--[a-z0-9-]+(?: [a-z0-9_]+)?)", text):
        assert cli(advice).given, text
    assert "use None" not in text
    if found := re.search(r"leave it out or use (\S+)$", text):
        assert EngineArgs.from_kwargs(**{name: found[1]}) == EngineArgs()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--ds-heavy-token-num 256", "removed from SGLang too"),
        ("--disable-fast-image-processor", "Pillow"),
        ("--disable-piecewise-cuda-graph", "without CUDA graphs"),
    ],
)
def test_settings_of_absent_parts_are_noted(text, words):
    (note,) = cli(text).notes
    assert text.split()[0] in note and "no effect" in note and words in note


def test_flags_that_describe_this_engine_need_no_note():
    assert not cli("--pp-size 1 --radix-eviction-policy lru --grammar-backend outlines").notes


# -- suggestions


@st.composite
def misspellings(draw: st.DrawFn) -> str:
    """A flag of SGLang with one to three letters removed, doubled, swapped or replaced."""
    letters = list(draw(st.sampled_from(sorted(ACCEPTED | REFUSED))).removeprefix("--"))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(letters) - 1))
        change = draw(st.sampled_from(["lose", "double", "exchange", "replace"]))
        if change == "lose" and len(letters) > 3:
            del letters[place]
        elif change == "double":
            letters.insert(place, letters[place])
        elif change == "exchange" and place:
            letters[place - 1], letters[place] = letters[place], letters[place - 1]
        else:
            letters[place] = draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz-"))
    word = "".join(letters)
    assume(not "help".startswith(word))  # such a word prints the help
    return "--" + word


@settings(max_examples=examples(150))
@given(misspellings())
def test_suggestions_are_accepted_flags(word):
    try:
        parse_flags(build_parser(), [word])
    except ConfigError as error:
        text = str(error)
        for pattern in (r"did you mean (--[^?]+)\?", r"could match (.+)$"):
            for suggestion in (found[1] if (found := re.search(pattern, text)) else "").split(", "):
                assert not suggestion or suggestion in ACCEPTED | {"--help"} or not _any_accepted(word, pattern), text


def _any_accepted(word: str, pattern: str) -> bool:
    """An ambiguous abbreviation that matches only refused flags may name those flags."""
    return "match" not in pattern or any(option.startswith(word) for option in ACCEPTED)


def test_some_misspellings_are_recognized():
    options = sorted(option for option in ACCEPTED if len(option) >= 9)
    for option in random.sample(options, min(examples(60), len(options))):
        wrong = option[:5] + option[6:] + "x"
        if wrong not in ACCEPTED | REFUSED:
            with pytest.raises(ConfigError, match=r"did you mean --\S+\?"):
                cli(wrong)


def test_advice_for_vllm_flags_names_accepted_ones():
    known = set(known_options(build_parser()))
    for name, advice in ABSENT.vllm.items():
        assert option_of(name) not in known and name not in ABSENT.name_of
        assert set(re.findall(r"--[a-z0-9-]+", advice)) <= known, name


@pytest.mark.parametrize("name", ABSENT.docker_run)
def test_flags_of_docker_are_named_as_such(name):
    with pytest.raises(ConfigError, match="a flag of `docker run`"):
        cli(f"{option_of(name)} 32g")
    with pytest.raises(ConfigError, match="a flag of `docker run`"):
        EngineArgs.from_kwargs(**{name: "32g"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--page-sise 3", "did you mean --page-size?"),
        ("--enable-foo", "--enable-foo: unknown flag (did you mean --enable-lora?); --help all lists the flags"),
        ("--max_model_len=8192", "--max-model-len: unknown flag; it is a flag of vLLM: use --context-length; --help"),
        ("--m-fraction-static 0.8", "did you mean --mem-fraction-static?"),
        ("--frobnicate", "--frobnicate: unknown flag; --help all lists the flags"),
        ("stray", "stray argument"),
        ("--enable-metrics true", "true: stray argument; every option has a name, for instance --model-path PATH;"),
        ("--page-size x", "--page-size x: expected a whole number"),
        ("--page-size", "--page-size: has no value; give one, behind = if it begins with -"),
        ("--enable-metrics=true", "--enable-metrics: takes no value; leave out 'true'"),
        ("--dtype flot16", "did you mean float16?"),
        ("--schedule-policy lru", "choose one of: fcfs, lpm"),
        ("--enable-m", "ambiguous option"),
        ("--json-model-override-args [1]", "JSON object"),
        ("--max-total-tokens 1.5", "whole number"),
        ("--cuda-graph-bs-decode a", "--cuda-graph-bs-decode a: expected whole numbers"),
    ],
)
def test_mistakes_are_explained(text, words):
    with pytest.raises(ConfigError) as refusal:
        cli(text)
    assert words in str(refusal.value)


def test_keyword_mistakes():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"page_sise": 3}, "did you mean page_size"),
        ({"page_size": 1.5}, "whole number"),
        ({"page_size": True}, "whole number"),
        ({"enable_metrics": 1}, "true or false"),
        ({"model_path": 3}, "expected text"),
    ]
    for values, words in cases:
        with pytest.raises(ConfigError, match=words):
            EngineArgs.from_kwargs(**values)
    left_out = EngineArgs.from_kwargs(schedule_policy=None)
    assert left_out.scheduling.schedule_policy == "fcfs" and "schedule_policy" not in left_out.given
    assert EngineArgs.from_kwargs(json_model_override_args={"a": 1}).model.json_model_override_args == '{"a": 1}'


def test_config_file(tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text("model: from-file\npage-size: 16\nenable_metrics: true\ntp: 4\nport: 1\n")
    args = cli(f"--config {file} --tp-size 2 --port 2")
    assert args.model.model_path == "from-file" and args.memory.page_size == 16
    assert args.logging.enable_metrics and args.server.port == 2 and args.parallel.tp_size == 2
    file.write_text("page-sise: 16\n")
    with pytest.raises(ConfigError, match=rf"^--config {file}: page_sise: .*did you mean page_size"):
        cli(f"--config {file}")
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="flag: value"):
        cli(f"--config {file}")
    with pytest.raises(ConfigError, match="cannot read"):
        cli(f"--config {tmp_path}/none.yaml")


def test_counts():
    assert [parse_count(text) for text in ("7", "64k", "1M", "8Ki", "1.5k", "-1")] == [7, 64000, 10**6, 8192, 1500, -1]


def test_help_holds_every_field_and_hides_the_rest():
    text = build_parser().format_help()
    assert all(info.option in text for info in ALL_FIELDS)
    assert "--pp-size" not in text and "--disable-mla" not in text


ONE_VALUE = {"disaggregation_transfer_backend"}
"""Flags with only one accepted value today: only the validation reads them."""


def test_no_flag_is_ignored():
    """Each field is read somewhere outside its declaration; backend flags are read by the table of kernel families."""
    root = Path(__file__).resolve().parents[2]
    declarations = {f"config/{name}.py" for name in PARTS} | {"flags/validate.py", "output/explain.py"}
    files = [file for top in ("moe_engine", "models") for file in (root / top).rglob("*.py")]
    text = "\n".join(file.read_text() for file in files if f"{file.parent.name}/{file.name}" not in declarations)
    backends = set(resolve_kernels.FLAGS.values())
    ignored = [
        info.name for info in ALL_FIELDS if info.name not in backends and not re.search(rf"\.{info.name}\b", text)
    ]
    assert set(ignored) <= ONE_VALUE

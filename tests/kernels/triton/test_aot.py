"""Kernels compiled ahead of time for sm_90 and sm_100, without a GPU: one case of each kernel here (for sm_100 the
cases with large tiles), all cases by ``python -m benchmarks.aot_table``. In separate processes, because kernels cannot
be compiled under the interpreter.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from moe_engine.kernels.triton import guard
from moe_engine.kernels.triton.availability import version
from moe_engine.kernels.triton.modules import MODULES
from tests.examples import FACTOR
from tests.fork_server import ForkServer

pytest.importorskip("triton", reason="needs triton")
ROOT = Path(__file__).resolve().parents[3]
KNOWN_BEFORE_3_9 = {
    "latent attention, 128 heads, 1 tokens, bf16 sm_100",  # too much shared memory: `why_not_latent` refuses the row
    "expanded attention, heads of 192 and 128, fp32 sm_100",  # spills 48 bytes; not used by a served model
}
PARTS = 12
"""`make test` compiles one part, another one in each run."""
LARGE_TILES = "fixed_gemm_v3_head_129280x7168_bf16"
COMPLETE = (0, 1)  # exit code 1: a kernel has a problem; the tests below name it


def output_of(compiling: ForkServer, folder: Path, module: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """Runs a module outside the interpreter, with a separate Triton cache: `folder`."""
    code, out, errors = compiling.run([module, *arguments], folder, 280.0, TRITON_CACHE_DIR=str(folder))
    assert code in codes, errors[-3000:]
    return out


def table_of(compiling: ForkServer, folder: Path, *chosen: str) -> list[dict[str, Any]]:
    """Rows of the table of the chosen cases, at least one."""
    arguments = (*chosen, "--processes", "2", "--output", str(folder / "aot.json"))
    output_of(compiling, folder, "benchmarks.aot_table", *arguments, codes=COMPLETE)
    rows: list[dict[str, Any]] = json.loads((folder / "aot.json").read_text())["kernels"]
    assert rows
    return rows


def test_every_kernel_is_fit_to_ship(compiling, tmp_path):
    """Each kernel compiles, does not spill, fits into shared memory, and uses tensor cores for matrix products."""
    part = "--quick", "--part", str(random.randrange(PARTS)), str(PARTS)
    reports = table_of(compiling, tmp_path, *(("--one-of-each",) if FACTOR > 1 else part))
    known = KNOWN_BEFORE_3_9 if version() < (3, 9) else set()
    problems = [f"{r['name']} sm_{r['arch']}: {p}" for r in reports for p in r["problems"]]
    problems = [problem for problem in problems if problem.partition(":")[0] not in known]
    assert not problems, "\n".join(problems)
    wrong = {90: "tcgen05", 100: "wgmma"}
    assert not [r["name"] for r in reports if wrong[r["arch"]] in r["instructions"]]


def test_addresses_do_not_exceed_their_integers(compiling, tmp_path):
    """Products of rows, slots and strides are computed in 64 bits where the largest tensors of a GPU need them."""
    part = () if FACTOR > 1 else (str(random.randrange(PARTS)), str(PARTS))
    out = output_of(compiling, tmp_path, "tests.kernels.triton.address_bounds", *(part or ("0", "1")))
    found = json.loads(out)
    assert found.pop("narrow_kernel") == ["(program x * 28672)", "(program x * stride)"]
    assert len(found) > 4 and found["wide_kernel"] == []
    assert not any(found.values()), {name: numbers for name, numbers in found.items() if numbers}


PRODUCTION = "launches in production sizes"
MODELS = (
    "v2-lite", "v3", "gpt-oss-120b", "qwen3-next", "kimi-k2", "v3.2", "v4-flash", "v4-pro", "v41-flash", "glm-4.6",
    "minimax-m3", "llama-8b-awq", "llama-8b-row-fp8", "v3-row-fp8", "glm-5.3-flash", "glm-5.2", "qwen3.8",
    "kimi-linear", "nemotron-3", "ling-flash", "longcat-flash", "qwen-3.8-flash-next", "kimi-k3",
    "llama-4-scout", "k-exaone", "flint", "axk1", "command-a-plus", "gemma-2", "granite-swa",
    "lfm2-8b-a1b",
)  # fmt: skip
"""Of `served_models`, which imports Triton."""
LAUNCHED = {
    "gpt-oss-120b": {"paged_kernel", "grouped_rows_kernel"},
    "v4-flash": {"compress_kernel", "scores_kernel", "select_kernel", "latent_kernel"},
    "v41-flash": {"pair_kernel", "block_maxima_kernel", "ngram_add_kernel", "round_rows_kernel"},
    "lfm2-8b-a1b": {"long_conv_kernel", "conv_states_kernel", "short_conv_kernel"},
    "qwen-3.8-flash-next": {"mix_long_kernel", "mean_keys_kernel", "paged_kernel", "delta_kernel"},
}  # fmt: skip
"""Some kernels of layers that are not the first of their model."""
FEWEST = {"gemma-2": 13, "granite-swa": 18}
"""Launches of dense models without quantized weights."""
EXCHANGE = {"send_kernel", "receive_kernel", "combine_send_kernel", "sum_kernel"}


@pytest.mark.parametrize("form", ["tp1", "dp8ep8", "symm_mem", "fp8_kv"])
@pytest.mark.parametrize("model", [pytest.param(m, marks=pytest.mark.one_of(PRODUCTION, m)) for m in MODELS])
def test_launches_in_production_sizes(compiling, tmp_path, model, form):
    """256 requests of a rank, contexts of a million tokens, prompts of 32,768: a device takes all grids, and no address
    needs more than the bits that it is computed with."""
    arguments = "tests.kernels.triton.outside_production", str(tmp_path), model, form
    count, found = json.loads(output_of(compiling, tmp_path, *arguments))
    assert found.pop("narrow_kernel") == ["(program x * 131072)"]  # and 2^15 rows of 2^15 elements are few enough
    if not count:
        pytest.skip("the model has no experts, or no cache in FP8")
    assert count >= FEWEST.get(model, 20) and not any(found.values()), {
        name: numbers for name, numbers in found.items() if numbers
    }
    assert form != "symm_mem" or found.keys() >= EXCHANGE
    assert LAUNCHED.get(model, set()) <= found.keys()


@pytest.mark.parametrize("model", [pytest.param(m, marks=pytest.mark.one_of("forms of models", m)) for m in MODELS])
def test_every_form_that_a_model_launches_has_a_case_in_the_gpu_suite(compiling, tmp_path, model):
    """Constants of kernels without their sizes: a new one needs a line in a table of `benchmarks/gpu_suite`."""
    out = output_of(compiling, tmp_path, "benchmarks.gpu_suite.kernel_coverage", "--missing", model)
    count, lacking = map(int, re.findall(r"^(\d+) forms, (\d+) without a case", out, re.MULTILINE)[0])
    assert count > 9 and not lacking, out  # 11 of a dense model, 16 and more of others


def test_large_tiles_use_the_instructions_of_their_architecture(compiling, tmp_path):
    rows = table_of(compiling, tmp_path, "--only", LARGE_TILES)
    found = {arch: {i for r in rows if r["arch"] == arch for i in r["instructions"]} for arch in (90, 100)}
    assert "wgmma" in found[90] and "tcgen05" in found[100]


def test_every_module_with_cases_is_listed():
    files = [f for f in (ROOT / "kernels").rglob("*.py") if "\ndef aot_cases(" in f.read_text()]
    names = {f.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for f in files}
    assert {f"moe_engine.{name}" for name in names} == set(MODULES)
    assert len(MODULES) == len(set(MODULES))


@pytest.mark.drawn(2)
def test_cases_are_what_launches_ask_for(compiling, tmp_path):
    """The cases have the same keys in Triton's cache as launches of the real rows, for any token count."""
    out = output_of(compiling, tmp_path, "tests.kernels.triton.outside", "agreement", str(tmp_path))
    found = json.loads(out)
    assert found["not launched"] == found["no case"] == [] and len(found["launched"]) > 10, found


@pytest.mark.drawn(2)
def test_cases_of_experts_are_what_launches_ask_for(compiling, tmp_path):
    """As above: odd counts, one, multiples of 16."""
    found = json.loads(output_of(compiling, tmp_path, "tests.kernels.triton.outside_experts"))
    assert found["not launched"] == found["no case"] == [] and len(found["launched"]) > 15, found


@pytest.mark.drawn(2)
def test_the_size_of_a_launch_does_not_choose_the_kernel_of_symmetric_memory(compiling, tmp_path):
    """Each kernel is the same for any number of tokens and any offsets, and is the one compiled ahead of time."""
    out = output_of(compiling, tmp_path, "tests.kernels.triton.outside_symm_mem", str(tmp_path))
    num_cases, launched, num_cached = json.loads(out)
    assert len(launched) == num_cached == num_cases == 16


def _dry(device: str) -> Any:
    return pytest.param(device, marks=pytest.mark.one_of("dry runs of the GPU suite", device))


@pytest.mark.parametrize("dry", [_dry("none"), _dry("cuda")])
def test_every_launch_of_the_gpu_suite_is_possible(compiling, tmp_path, dry):
    """On an H200, without compiling: its cases, exchanges and engines reach the kernels' present interfaces."""
    names, kernels = json.loads(
        output_of(compiling, tmp_path, "tests.kernels.triton.outside_suite", dry, str(tmp_path))
    )
    assert set(names) >= {"decode", "fp8_layers", "tokens in float32", "exchange of 4 experts"}
    assert {"permute_kernel", "latent_kernel", "send_kernel"} <= set(kernels)


@pytest.mark.drawn(2)
def test_the_guard_counts_what_compiles_after_ready(compiling, tmp_path):
    out = output_of(compiling, tmp_path, "tests.kernels.triton.outside", "guarding", str(tmp_path))
    assert json.loads(out) == [0, 0, 1]
    assert "rms_norm_kernel was compiled" in (tmp_path / "stderr").read_text()


@pytest.mark.drawn(2)
def test_warm_up_reaches_every_kernel_of_a_plan(compiling, tmp_path):
    """Steps of any size need only kernels of the ladder; a ladder of only its ends would miss some."""
    out = output_of(compiling, tmp_path, "tests.kernels.triton.outside", "reachable", str(tmp_path / "models"))
    for name, (count, names, missing, missing_without) in json.loads(out).items():
        assert count > 20 and missing == [], name
        attention = {"paged_kernel"} if name == "qwen3" else {"latent_kernel", "expanded_kernel"}
        assert attention | {"rms_norm_kernel", "draw_kernel"} <= set(names), name
        assert "router_logits_kernel" in missing_without, name


@pytest.mark.drawn(2)
def test_experts_whose_tokens_travel_warm_up_every_tile(compiling, tmp_path):
    """All tokens of a warm-up may be sent to other ranks. Two products for each of four sizes, and for three means of
    padded rows."""
    out = output_of(compiling, tmp_path, "tests.kernels.triton.outside", "dispatched", str(tmp_path))
    for runs, num_warm, num_needed, missing in json.loads(out):
        assert runs == 14 and missing == 0 and num_warm == num_needed >= 7


def test_the_guard_is_silent_until_something_compiles():
    guard.reset()
    guard.ready()
    assert guard.compilations_after_ready() == 0


@pytest.mark.drawn(2)
def test_a_launch_finds_everything_that_was_compiled_for_it(compiling, tmp_path):
    """``moe-engine compile`` for one of two ranks with dispatch. Experts, attention and sampling, whose compilation
    takes seconds, are compiled above."""
    families = ("--linear-backend", "--moe-runner-backend", "--attention-backend", "--sampling-backend")
    flags = [text for family in families for text in (family, "torch")]
    flags += ["--tp", "2", "--ep", "2", "--moe-a2a-backend", "all_to_all", "--context-length", "32"]
    flags += ["--max-running-requests", "1", "--chunked-prefill-size", "4"]
    command = ("moe_engine.cli.main", "compile", "--output", str(tmp_path / "kernels"), *flags)
    found = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        out = output_of(compiling, folder, *command)
        index = json.loads((tmp_path / "kernels" / "moe-engine-kernels.json").read_text())
        found.append((out, index["kernels"]))
    names = {kernel["name"] for kernel in index["kernels"]}
    assert {"rms_norm_kernel", "norm_route_kernel", "one_shot_kernel", "absorb_kernel"} <= names
    assert index["about"]["tp_size"] == 2 and index["about"]["arch"] == 90
    if version() >= (3, 9):  # an older compiler spills 8 bytes in place_kernel
        assert all(kernel["spill_bytes"] == 0 for kernel in index["kernels"])
    count = len(found[0][1])
    assert f"{count} kernels" in found[1][0] and f"{count} of them there already" in found[1][0]
    assert len(found[1][1]) == count

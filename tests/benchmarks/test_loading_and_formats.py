"""`benchmarks.cold_load` and `benchmarks.format_quality` without their engines."""

from __future__ import annotations

from pathlib import Path

from benchmarks import cold_load, format_quality
from moe_engine.config.args import EngineArgs
from moe_engine.models.config_file import load_model_config
from moe_engine.models.formats.plain import PLAIN
from moe_engine.planning.prepare import prepare
from tests.models.checkpoints import make_checkpoint


def test_the_table_of_answers() -> None:
    base, other = [True, True, False, True], [True, False, True, False]
    head, first, second = format_quality.table({"none": base, "int8": other})
    assert head.split() == ["format", "right", "points", "differ"]
    assert first.split() == ["bf16", "75.00%", "+0.00", "0"]
    assert second.split() == ["int8", "50.00%", "-25.00", "3"]


def test_the_questions_and_the_copy(tmp_path: Path) -> None:
    examples, prompts, wanted = format_quality.questions(200)
    assert len(examples) == len(prompts) == len(wanted) > 5 and all(prompts) and all(wanted)
    path = format_quality.plain_copy(format_quality.CHECKPOINT_DIR, tmp_path)
    config = load_model_config(path)
    assert config.weight_format == PLAIN
    prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", quantization="int4"))


def test_rounds_of_a_cold_load(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, num_hidden_layers=1, tokenizer=False)
    config = prepare(EngineArgs.from_kwargs(model_path=str(path), device="cpu", skip_tokenizer_init=True))
    (seconds,) = cold_load.measure(config, 1)
    assert len(seconds) == 3 and min(seconds) > 0

"""The offline API: shapes of answers, streams, asyncio, errors, a user's model class, a killed engine."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import itertools
import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import transformers

import moe_engine
from moe_engine import Engine, server_args
from moe_engine.config.args import EngineArgs
from moe_engine.errors import CheckpointError, ConfigError, EngineDeadError, InputError
from moe_engine.frontend import core_process
from moe_engine.planning.prepare import prepare
from tests.models.checkpoints import make_checkpoint
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model_path=str(checkpoint), dtype="float32", max_total_tokens=4096) as engine:
        yield engine


def test_one_prompt_and_many(engine: Engine) -> None:
    one = engine.generate("hello", GREEDY)
    assert isinstance(one, dict) and set(one) == {"text", "output_ids", "meta_info"}
    assert one["meta_info"]["completion_tokens"] == len(one["output_ids"]) == 6
    assert one["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    many = engine.generate(["hello", "other"], GREEDY)
    assert isinstance(many, list) and many[0]["output_ids"] == one["output_ids"]
    by_ids = engine.generate(input_ids=engine.tokenize("hello"), sampling_params=GREEDY)
    assert by_ids["output_ids"] == one["output_ids"]  # type: ignore[call-overload]


def test_stream_accumulates_to_the_output(engine: Engine) -> None:
    whole = engine.generate("hello", GREEDY)
    chunks = list(engine.generate("hello", GREEDY, stream=True))  # type: ignore[arg-type]
    texts = [chunk["text"] for chunk in chunks]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert texts[-1] == whole["text"]  # type: ignore[call-overload]


def test_closing_a_stream_early_aborts_it(engine: Engine) -> None:
    for _ in engine.generate("hello", {**GREEDY, "max_new_tokens": 400}, stream=True):  # type: ignore[union-attr]
        break
    until(lambda: not engine.get_server_info()["internal_states"][0]["num_running"])


def test_asyncio(engine: Engine) -> None:
    whole = engine.generate("hello", GREEDY)

    async def both() -> tuple:
        answer = await engine.async_generate("hello", GREEDY)
        stream = await engine.async_generate("hello", GREEDY, stream=True)
        return answer, [chunk async for chunk in stream]  # type: ignore[union-attr]

    answer, chunks = asyncio.run(both())
    assert answer["output_ids"] == whole["output_ids"]  # type: ignore[call-overload]
    assert chunks[-1]["text"] == whole["text"]  # type: ignore[call-overload]


def test_a_session_answers_as_the_whole_prompt_does(engine: Engine) -> None:
    """The second turn hits the radix cache, and its tokens are those of a request with all tokens."""
    session = engine.open_session(capacity_of_str_len=1000)
    first = engine.generate(
        input_ids=[5, 6, 7, 8], sampling_params={**GREEDY, "max_new_tokens": 24}, session_params={"id": session}
    )
    assert isinstance(first, dict)
    params = {"id": session, "rid": first["meta_info"]["id"]}
    second = engine.generate(input_ids=[9, 10], sampling_params=GREEDY, session_params=params)
    assert isinstance(second, dict) and second["meta_info"]["prompt_tokens"] == 4 + 24 + 2
    assert second["meta_info"]["cached_tokens"] >= 16
    whole = engine.generate(input_ids=[5, 6, 7, 8, *first["output_ids"], 9, 10], sampling_params=GREEDY)
    assert isinstance(whole, dict) and whole["output_ids"] == second["output_ids"]
    engine.close_session(session)
    with pytest.raises(InputError, match=f"session '{session}' is not open"):
        engine.generate(input_ids=[9], sampling_params=GREEDY, session_params=params)


def test_logprobs(engine: Engine) -> None:
    answer = engine.generate("hello", GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    meta = answer["meta_info"]  # type: ignore[call-overload]
    assert len(meta["output_token_logprobs"]) == 6
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    best = [entry[0] for entry in meta["output_top_logprobs"]]
    assert [token for _, token, _ in best] == answer["output_ids"]  # type: ignore[call-overload]


def test_scores_are_probabilities_of_labels(engine: Engine, checkpoint: Path) -> None:
    """Those of transformers: among all tokens, or among the labels."""
    query, items, labels = [5, 6], [[7], [8, 9]], [3, 17, 40]
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = torch.stack([model(torch.tensor([query + item])).logits[0, -1] for item in items])
    found = engine.score(query, items, labels)
    torch.testing.assert_close(torch.tensor(found.scores), logits.softmax(-1)[:, labels], rtol=1e-2, atol=1e-5)
    assert found.prompt_tokens == 3 + 4
    among = asyncio.run(engine.async_score(query, items, labels, apply_softmax=True)).scores
    torch.testing.assert_close(torch.tensor(among), logits[:, labels].softmax(-1), rtol=1e-2, atol=1e-4)
    texts = engine.score(" hello", ["a", "other"], labels, item_first=True).scores
    whole = [engine.score("a hel", "lo", labels).scores[0], engine.score("other hel", "lo", labels).scores[0]]
    torch.testing.assert_close(torch.tensor(texts), torch.tensor(whole), rtol=1e-3, atol=1e-6)
    assert engine.score(query, [], labels).scores == []
    with pytest.raises(InputError, match="label_token_ids: is required"):
        engine.score(query, items)
    with pytest.raises(InputError, match="items: query and items must all be texts"):
        engine.score("hello", items, labels)


def test_server_args(checkpoint: Path) -> None:
    """SGLang's flat object: from a program's own parser, changed, as keywords; notes and refusals are the flags'."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int)
    moe_engine.ServerArgs.add_cli_args(parser)
    words = f"--prompts 3 --model {checkpoint} --tp 1 --max-total-tokens 4Ki --skip-tokenizer-init"
    args = server_args.ServerArgs.from_cli_args(parser.parse_args(words.split()))
    assert (args.model_path, args.max_total_tokens, args.tp_size) == (str(checkpoint), 4096, 1)
    args.dtype = "float32"
    flags = args.engine_args()
    assert flags.model.dtype == "float32" and "dtype" in flags.given and flags.memory.max_total_tokens == 4096
    assert pickle.loads(pickle.dumps(args)) == args
    keywords = dataclasses.asdict(args)
    assert EngineArgs.from_kwargs(**keywords).flat() == flags.flat() == keywords
    prepare(EngineArgs.from_kwargs(**keywords))
    with Engine(server_args=args) as engine:
        info = engine.get_server_info()
        assert info["max_total_tokens"] == 4096 and info["version"] == moe_engine.__version__
        assert EngineArgs.from_kwargs(**info).flat()["max_total_tokens"] == 4096
    with pytest.raises(ConfigError, match="server_args has all flags of an engine: set page_size there"):
        Engine(server_args=args, page_size=4)
    args.dtype = "int3"
    with pytest.raises(ConfigError, match="--dtype"):
        args.engine_args()
    assert moe_engine.ServerArgs("model", skip_server_warmup=True).engine_args().notes
    with pytest.raises(ConfigError, match="--pp-size 4"):
        moe_engine.ServerArgs(pp_size=4)


def test_input_errors_name_the_field(engine: Engine) -> None:
    with pytest.raises(InputError, match="temperature"):
        engine.generate("a", {"temperature": -1})
    with pytest.raises(InputError, match=r"^sampling_params: expected an object, got 5"):
        engine.generate("a", 5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="input_ids"):
        engine.generate(input_ids=[10**6])
    with pytest.raises(InputError, match="exactly one"):
        engine.generate()
    with pytest.raises(InputError, match=r"^prompt: expected a string or a list of strings, got tuple"):
        engine.generate(("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="runs without --enable-lora"):
        engine.generate("hello", GREEDY, lora_path="a")
    with pytest.raises(InputError, match="return_hidden_states: start the server with --enable-return-hidden-states"):
        engine.generate("hello", GREEDY, return_hidden_states=True)
    for field, value in (("image_data", ["x.png"]),):
        with pytest.raises(InputError, match=f"{field}: .* takes text alone"):
            engine.generate("hello", GREEDY, **{field: value})
        engine.generate("hello", GREEDY, **{field: None})
    with pytest.raises(InputError, match=r"generates text: vectors need a server with --is-embedding"):
        engine.encode("hello")
    with pytest.raises(TypeError, match=r"no field 'top_logprob'; .*top_logprobs_num"):
        engine.generate("a", top_logprob=1)
    assert engine.generate("hello", GREEDY)


def test_flags_are_those_of_the_server(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter/adapter_config.json: No such file"):
        Engine(model_path=str(checkpoint), lora_paths="adapter")
    with pytest.raises(ConfigError, match="page_sise"):
        Engine(model_path=str(checkpoint), page_sise=4)


def test_broken_checkpoint_is_a_config_error(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "q_lora_rank": config["q_lora_rank"] * 2}))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=r"q_a_"):
        Engine(model_path=str(tmp_path), skip_tokenizer_init=True)


def test_killed_engine_is_named(checkpoint: Path) -> None:
    engine = Engine(model_path=str(checkpoint))
    pid = engine._cores[0].pid
    psutil.Process(pid).kill()
    with pytest.raises(EngineDeadError, match=rf"pid {pid}\) was killed by SIGKILL"):
        engine.generate("hello", {**GREEDY, "max_new_tokens": 400})
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.abort_request(abort_all=True)


def test_a_core_stopped_by_a_signal_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_process, "HELD_SECONDS", 0.3)
    with Engine(model_path=str(checkpoint)) as engine:
        psutil.Process(engine._cores[0].pid).suspend()
        with pytest.raises(EngineDeadError, match="had been stopped by a signal"):
            engine.generate("hello", GREEDY)


def test_outside_model(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's class, registered without changes of the source, is also known in the engine's process."""
    source = "from moe_engine.models.families.deepseek import DeepseekModel\n\n\nclass Mine(DeepseekModel):\n    pass\n"
    (tmp_path / "my_model_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_model_module  # type: ignore[import-not-found]

    moe_engine.register_model("MineForCausalLM", my_model_module.Mine)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["MineForCausalLM"]}))
    with Engine(model_path=str(folder), dtype="float32") as mine, Engine(str(checkpoint), dtype="float32") as usual:
        assert mine.generate("hello", GREEDY)["output_ids"] == usual.generate("hello", GREEDY)["output_ids"]  # type: ignore[call-overload]


def test_dummy_weights_need_only_a_config(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with Engine(str(tmp_path), load_format="dummy", skip_tokenizer_init=True) as engine:
        answer = engine.generate(input_ids=[1, 2, 3], sampling_params=GREEDY)
    assert len(answer["output_ids"]) == 6 and "text" not in answer  # type: ignore[call-overload]


def test_an_engine_that_is_dropped_leaves_no_process(checkpoint: Path) -> None:
    """As in a notebook that runs the same cell again."""
    engine = Engine(str(checkpoint), load_format="dummy", skip_tokenizer_init=True)
    core, thread = psutil.Process(engine._cores[0].pid), engine._loop.thread
    del engine
    gc.collect()
    assert psutil.wait_procs([core], timeout=60)[1] == []
    thread.join(60)
    assert not thread.is_alive()


def test_importing_the_package_is_light() -> None:
    import subprocess

    code = "import sys, moe_engine; assert not {'torch', 'starlette', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_neither_uses_nor_ends_the_engine(engine: Engine) -> None:
    child = os.fork()
    if not child:
        refused = False
        try:
            engine.generate("hello", GREEDY)
        except EngineDeadError as error:
            refused = "belongs to process" in str(error)
        engine.shutdown()
        engine._end()  # as in a child's sys.exit
        os._exit(0 if refused else 1)
    deadline = time.monotonic() + 120
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    assert ended == (child, 0)
    assert len(engine.generate("hello", GREEDY)["output_ids"]) == 6  # type: ignore[call-overload]

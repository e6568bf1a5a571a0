"""`moe-engine serve --is-embedding` with the official client of OpenAI."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest
import torch

from moe_engine.tokenizer import load_tokenizer
from tests.e2e.server_process import ServerProcess
from tests.models.checkpoints import headless, make_checkpoint

pytestmark = pytest.mark.usefixtures("forked_processes")


def test_the_embedded_model_as_an_embedding_server(tmp_path: Path) -> None:
    with (
        ServerProcess(
            tmp_path, "--is-embedding", "--max-total-tokens", "4096", "--chunked-prefill-size", "64"
        ) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        texts = ["The capital of France is Paris.", "Seven plus four is eleven.", "word " * 300]
        found = client.embeddings.create(model="default", input=texts)
        assert [sum(x * x for x in item.embedding) for item in found.data] == pytest.approx([1.0] * 3, abs=1e-3)
        (again,) = client.embeddings.create(model="default", input=texts[0]).data
        assert again.embedding == pytest.approx(found.data[0].embedding, abs=0.02)
        native = httpx.post(server.url + "/encode", json={"text": texts[0]}).json()
        assert native["embedding"] == pytest.approx(found.data[0].embedding, abs=0.02)
        with pytest.raises(openai.BadRequestError, match="served for vectors"):
            client.completions.create(model="default", prompt="a")
        assert httpx.get(server.url + "/health_generate").status_code == 200
        assert httpx.get(server.url + "/server_info").json()["is_embedding"] is True


def test_scores_of_label_tokens_are_transformers_probabilities(tmp_path: Path) -> None:
    import transformers

    path = make_checkpoint("qwen2", tmp_path / "model", seed=9)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    query, items, labels = [5, 6, 7], [[8, 9], [10]], [11, 12, 200]
    with torch.no_grad():
        want = [oracle(torch.tensor([query + item])).logits[0, -1].softmax(-1)[labels].tolist() for item in items]
    with ServerProcess(
        tmp_path, "--model-path", str(path), "--dtype", "float32", "--max-total-tokens", "512"
    ) as server:
        body = {"query": query, "items": items, "label_token_ids": labels}
        scores = httpx.post(server.url + "/v1/score", json=body).json()["scores"]
    assert [pytest.approx(row, abs=1e-5) for row in want] == scores


def test_rerank_and_classify_give_transformers_scores(tmp_path: Path) -> None:
    import transformers

    plain = make_checkpoint("qwen3", tmp_path / "plain", seed=10)
    path = headless(plain, tmp_path / "model", score_weight=torch.randn(1, 64))
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    oracle = load(path, dtype=torch.float32, attn_implementation="eager", num_labels=1)
    query, documents = "what is it?", ["a panda", "something much longer than that", "b"]
    pairs = load_tokenizer(path).encode_pairs([(query, document) for document in documents])
    with torch.no_grad():
        scores = [oracle(torch.tensor([ids])).logits.item() for ids in pairs]
    with ServerProcess(
        tmp_path, "--model-path", str(path), "--dtype", "float32", "--max-total-tokens", "512"
    ) as server:
        ranked = httpx.post(server.url + "/v1/rerank", json={"query": query, "documents": documents}).json()
        classes = httpx.post(server.url + "/v1/classify", json={"input": documents}).json()["data"]
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [(one["index"], one["document"]) for one in ranked] == [(i, documents[i]) for i in order]
    assert [one["score"] for one in ranked] == pytest.approx([scores[i] for i in order], rel=1e-4, abs=1e-4)
    assert [(one["label"], one["probs"]) for one in classes] == [("class 0", [1.0])] * 3

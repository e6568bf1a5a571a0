"""`moe-engine serve` with images: the official client of OpenAI and /generate, against transformers' processor and
model; what is refused."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

pytest.importorskip("PIL", reason="images need pillow: pip install -e '.[vision]'")

from tests.e2e.server_process import ServerProcess
from tests.models.vision_checkpoints import END, IMAGE, NAMES, START, Oracle, Pixels, make_checkpoint, random_picture

pytestmark = pytest.mark.usefixtures("forked_processes")

COUNT = 5
GREEDY = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}


@dataclass
class Served:
    server: ServerProcess
    oracle: Oracle
    processor: Any
    files: Path

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(self.server.url + "/generate", json={"sampling_params": GREEDY, **body}, timeout=180)

    def pixels(self, picture: Any) -> Pixels:
        found = self.processor(images=[picture], return_tensors="pt")
        return Pixels(tuple(found["image_grid_thw"][0].tolist()), found["pixel_values"])

    def expected(self, text: str, pictures: list[Any]) -> list[int]:
        """Tokens of transformers' answer to a text with a placeholder for each picture."""
        return [token for token, _ in self.oracle.greedy(*self.prompt(text, pictures), 5)]

    def vector(self, text: str, pictures: list[Any]) -> list[float]:
        """The last token's state, normalized."""
        return self.oracle.vector(*self.prompt(text, pictures))

    def prompt(self, text: str, pictures: list[Any]) -> tuple[list[int], list[Pixels]]:
        images = [self.pixels(picture) for picture in pictures]
        ids: list[int] = []
        parts = text.split(NAMES[IMAGE])
        for part, image in zip(parts, [*images, None]):
            for piece in part.replace(NAMES[START], f"\0{START}\0").replace(NAMES[END], f"\0{END}\0").split("\0"):
                ids += [int(piece)] if piece in (str(START), str(END)) else self.tokenize(piece)
            ids += [IMAGE] * (image.num_tokens if image is not None else 0)
        return ids, images

    def tokenize(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return httpx.post(self.server.url + "/tokenize", json=body).json()["tokens"] if text else []


def encoded(picture: Any, form: str = "PNG") -> bytes:
    out = io.BytesIO()
    picture.save(out, form)
    return out.getvalue()


def data_address(picture: Any) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(picture)).decode()


def check_chat(url: str, content: list[Any], num_prompt_tokens: int, wanted: list[tuple[int, float]]) -> None:
    """The answer to a user's turn, and again as a cached prefix, has the text and log-probabilities of `wanted`, which
    ends before a doubtful token."""
    text = httpx.post(url + "/detokenize", json={"tokens": [token for token, _ in wanted]}).json()["text"]
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model="default", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=COUNT,
                logprobs=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            assert answer.usage is not None and answer.usage.prompt_tokens == num_prompt_tokens
            found = answer.choices[0].logprobs
            assert found is not None and found.content is not None and len(found.content) == COUNT
            logprobs = [entry.logprob for entry in found.content[: len(wanted)]]
            assert np.allclose(logprobs, [logprob for _, logprob in wanted], atol=2e-4)
            if len(wanted) == COUNT:
                assert answer.choices[0].message.content == text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    from transformers import AutoImageProcessor

    request.getfixturevalue("forked_processes")
    folder, files = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("files")
    path = make_checkpoint("qwen2_5_vl", folder / "checkpoint", random.randrange(1000))
    flags = {
        "model-path": path, "dtype": "float32", "max-total-tokens": 1024, "allowed-local-media-path": files,
        "max-media-mb": 1, "limit-mm-data-per-request": '{"image": 3}', "cpu-threads": 1, "media-fetch-timeout": 5,
    }  # fmt: skip
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with ServerProcess(folder, *arguments, "--enable-cache-report") as server:
        yield Served(server, Oracle(path), AutoImageProcessor.from_pretrained(path, backend="pil"), files)


def test_generate(served: Served) -> None:
    """By data address, base64 and file; token ids; again as a cached prefix; another image of the same size is none."""
    first, second = (random_picture(70, 90, seed) for seed in random.sample(range(1000), 2))
    (served.files / "a b.png").write_bytes(encoded(first))
    text = f"look at {NAMES[START]}{NAMES[IMAGE]}{NAMES[END]} this"
    expected = served.expected(text, [first])
    sources = [data_address(first), base64.b64encode(encoded(first)).decode(), str(served.files / "a b.png")]
    for source in [*sources, (served.files / "a b.png").as_uri(), [sources[0]]]:
        answer = served.post(text=text, image_data=source).json()
        assert answer["output_ids"][: len(expected)] == expected, answer
    tokens = served.pixels(first).num_tokens
    meta = answer["meta_info"]
    assert meta["prompt_tokens"] - 1 == meta["cached_tokens"] > tokens
    ids = [*served.tokenize("look at "), START, IMAGE, END, *served.tokenize(" this")]
    assert served.post(input_ids=ids, image_data=sources[0]).json()["output_ids"] == answer["output_ids"]
    other = served.post(text=text, image_data=data_address(second)).json()
    wanted = served.expected(text, [second])
    assert other["output_ids"][: len(wanted)] == wanted
    assert other["meta_info"]["cached_tokens"] == len(served.tokenize("look at ")) + 1
    batch = served.post(text=[text, "only text"], image_data=[sources[0], None]).json()
    assert batch[0]["output_ids"] == answer["output_ids"]
    wanted = served.expected("only text", [])
    assert batch[1]["output_ids"][: len(wanted)] == wanted


def test_the_other_forms_of_chats(served: Served) -> None:
    """/v1/messages and /v1/responses answer as the same chat."""
    data = base64.b64encode(encoded(random_picture(60, 80, random.randrange(1000)))).decode()
    address = f"data:image/png;base64,{data}"
    text = {"type": "text", "text": "see"}
    ours, theirs = {"type": "base64", "media_type": "image/png", "data": data}, {"type": "input_text", "text": "see"}
    chat, message, response = (
        httpx.post(f"{served.server.url}/v1/{path}", json={**body, "temperature": 0}, timeout=180).json()
        for path, body in (
            ("chat/completions", {"max_tokens": 5, "messages": [{"role": "user", "content": [
                text, {"type": "image_url", "image_url": {"url": address}}]}]}),
            ("messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [
                text, {"type": "image", "source": ours}]}]}),
            ("responses", {"max_output_tokens": 5, "input": [{"role": "user", "content": [
                theirs, {"type": "input_image", "image_url": address}]}]}),
        )
    )  # fmt: skip
    expected = chat["choices"][0]["message"]["content"]
    assert "".join(block["text"] for block in message["content"]) == expected
    assert "".join(part["text"] for item in response["output"] for part in item["content"]) == expected
    used = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    assert used == response["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"] > 10


def test_truncation_counts_the_tokens_of_images(served: Served) -> None:
    """A conversation that is too long with the tokens of its images: whole turns are dropped."""
    part = {"type": "input_image", "image_url": data_address(random_picture(100, 100, 1))}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "ok"}] * 3

    def respond(turns: list[Any], room: int, truncation: str) -> httpx.Response:
        asked = {"input": [*turns, {"role": "user", "content": "why"}], "max_output_tokens": room}
        url = f"{served.server.url}/v1/responses"
        return httpx.post(url, json={**asked, "truncation": truncation, "temperature": 0}, timeout=180)

    lengths = [respond(turns[i:], 1, "disabled").json()["usage"]["input_tokens"] for i in (0, 2, 4)]
    longest = httpx.get(f"{served.server.url}/v1/models").json()["data"][0]["max_model_len"]
    room = longest - lengths[1]  # the last two images fit
    assert respond(turns, room, "disabled").status_code == 400 and lengths[0] > lengths[1] + 10
    cut, whole = respond(turns, room, "auto").json(), respond(turns[2:], room, "disabled").json()
    assert cut["usage"]["input_tokens"] == whole["usage"]["input_tokens"] == lengths[1]
    assert cut["output"][0]["content"] == whole["output"][0]["content"]


def test_chat(served: Served) -> None:
    pictures = [random_picture(random.randint(40, 120), random.randint(40, 120), seed) for seed in range(2)]
    content: list[Any] = [{"type": "text", "text": "first "}]
    content += [{"type": "image_url", "image_url": {"url": data_address(one), "detail": "auto"}} for one in pictures]
    content += [{"type": "text", "text": " then"}]
    with openai.OpenAI(base_url=served.server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": content}], temperature=0, max_tokens=5,
            logprobs=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
    place = f"{NAMES[START]}{NAMES[IMAGE]}{NAMES[END]}"
    expected = served.expected(f"[user]first {place}{place} then[assistant]", pictures)
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    tokenizer = httpx.post(served.server.url + "/detokenize", json={"tokens": expected}).json()["text"]
    if len(expected) == 5:  # no doubtful token
        assert answer.choices[0].message.content == tokenizer
    assert answer.usage is not None and answer.usage.prompt_tokens > sum(served.pixels(p).num_tokens for p in pictures)
    assert httpx.get(served.server.url + "/model_info").json()["has_image_understanding"] is True


def test_what_is_refused(served: Served, tmp_path: Path) -> None:
    text = f"a{NAMES[IMAGE]}"
    good = data_address(random_picture(30, 30, 0))
    (tmp_path / "x.png").write_bytes(encoded(random_picture(30, 30, 0)))
    (served.files / "link.png").symlink_to(tmp_path / "x.png")
    large = base64.b64encode(bytes(2 << 20)).decode()
    for body, field, words in (
        ({"text": text, "image_data": "data:image/png;base64,####"}, "image_data", "base64"),
        ({"text": text, "image_data": [good, "data:text/plain,hello"]}, "image_data[1]", "not an image of"),
        ({"text": text, "image_data": str(tmp_path / "x.png")}, "image_data", "outside the folder"),
        ({"text": text, "image_data": str(served.files / "link.png")}, "image_data", "outside the folder"),
        ({"text": text, "image_data": str(served.files / "absent.png")}, "image_data", "cannot be read"),
        ({"text": text, "image_data": "http://127.0.0.1:9/x.png"}, "image_data", "private address"),
        ({"text": text, "image_data": "http://[::ffff:10.0.0.1]/x.png"}, "image_data", "private address"),
        ({"text": text, "image_data": "ftp://host/x.png"}, "image_data", "neither an address"),
        ({"text": text, "image_data": large}, "image_data", "more than 1 MB"),
        ({"text": text, "image_data": "data:video/mp4;base64,AAAA"}, "image_data", "video input is not supported"),
        ({"text": "no place", "image_data": good}, "text", "1 images for 0 image placeholders"),
        ({"text": text}, "text", "no images"),
        (
            {"text": text * 4, "image_data": [good] * 4},
            "image_data[3]",
            "image_data[3]: image 4 of 4; this server takes 3",
        ),
        ({"text": text, "image_data": {"url": good}}, "image_data", "expected"),
        ({"text": text, "video_data": good}, "video_data", "not available"),
    ):
        answer = served.post(**body)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400 and words in message, (body["text"], message)
        assert answer.json()["error"].get("param", field) == field or message.startswith(field), answer.json()
    for part, words in (
        ({"type": "video_url", "video_url": {"url": good}}, "videos are not supported"),
        ({"type": "image_url", "image_url": {}}, "url"),
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, "messages[0].content[0].image_url.url"),
    ):
        body = {"model": "default", "messages": [{"role": "user", "content": [part]}]}
        answer = httpx.post(served.server.url + "/v1/chat/completions", json=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    damaged = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, damaged]}]}
    answer = httpx.post(served.server.url + "/v1/messages", json=body)
    assert answer.status_code == 400 and "messages[0].content[1].source" in answer.json()["error"]["message"]
    again = served.post(text=text, image_data=good)
    assert again.status_code == 200


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A Qwen2-VL checkpoint as an embedding server, as GME models are served."""
    from transformers import AutoImageProcessor

    request.getfixturevalue("forked_processes")
    folder = tmp_path_factory.mktemp("model")
    path = make_checkpoint("qwen2_vl", folder / "checkpoint", random.randrange(1000))
    flags = ("--dtype", "float32", "--max-total-tokens", "1024", "--cpu-threads", "1", "--chunked-prefill-size", "16")
    with ServerProcess(folder, "--model-path", str(path), "--is-embedding", *flags) as server:
        yield Served(server, Oracle(path), AutoImageProcessor.from_pretrained(path, backend="pil"), folder)


def test_embeddings(vectors: Served) -> None:
    """SGLang's objects, vLLM's messages, /encode; in batches and with a cached prefix: the vectors of transformers."""
    first, second = (random_picture(random.randint(40, 90), random.randint(40, 90), seed) for seed in range(2))
    place = f"{NAMES[START]}{NAMES[IMAGE]}{NAMES[END]}"
    prompts: list[tuple[str, list[Any]]] = [
        (f"[user]{place}a panda[assistant]", [first]),
        (f"[user]{place}[assistant]", [second]),
        ("[user]only text[assistant]", []),
    ]
    wanted = [vectors.vector(text, pictures) for text, pictures in prompts]
    items: list[Any] = [{"text": "a panda", "image": data_address(first)}, {"image": data_address(second)}]
    for _ in range(2):
        body = {"input": [*items, {"text": "only text"}], "model": "any"}
        answer = httpx.post(vectors.server.url + "/v1/embeddings", json=body, timeout=180).json()
        assert [item["embedding"] for item in answer["data"]] == [pytest.approx(one, abs=1e-4) for one in wanted]
    content = [
        {"type": "text", "text": "x"},
        *({"type": "image_url", "image_url": {"url": data_address(picture)}} for picture in (first, second)),
    ]
    body = {"messages": [{"role": "user", "content": content}], "dimensions": 8}
    (item,) = httpx.post(vectors.server.url + "/v1/embeddings", json=body, timeout=180).json()["data"]
    short = vectors.vector(f"[user]x{place}{place}", [first, second])[:8]
    norm = sum(x * x for x in short) ** 0.5
    assert item["embedding"] == pytest.approx([x / norm for x in short], abs=1e-4)
    body = {"text": [f"{place} b", "b"], "image_data": [data_address(second), None]}
    found = httpx.post(vectors.server.url + "/encode", json=body, timeout=180).json()
    wanted = [vectors.vector(f"{place} b", [second]), vectors.vector("b", [])]
    assert [one["embedding"] for one in found] == [pytest.approx(one, abs=1e-4) for one in wanted]
    for given, words in (
        ([{"text": "a"}, "b"], "input[1]: the other inputs are objects"),
        ([{}], "input[0]: needs text, image or both"),
        ([{"text": "a", "video": "b"}], "input[0].video: videos"),
        ([{"image": "data:image/png;base64,####"}], "input[0].image: "),
        (None, "give exactly one of input and messages"),
    ):
        answer = httpx.post(vectors.server.url + "/v1/embeddings", json={"input": given}, timeout=180)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text

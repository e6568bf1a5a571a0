"""Request sets for the serving and offline benchmarks, as in bench_serving: lengths, seeds, shared prefixes.

No command of its own. Prompts of random sets are token ids (exact lengths), others are text.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_engine.errors import ConfigError
from moe_engine.kernels.host_memory import host_memory
from moe_engine.planning.memory.ledger import gb

DATASETS = ("sharegpt", "random", "random-ids", "generated-shared-prefix")


@dataclass(frozen=True)
class BenchRequest:
    """One request: `prompt` is text or token ids, `prompt_len` tokens long, with `output_len` new tokens.

    `images`: data addresses, after the text in a chat. `lora`: name of an adapter. `at`: seconds after the start at
    which it is sent; None: at the rate of the load. `questions`: token ids of further turns, after the answer.
    """

    prompt: str | list[int]
    prompt_len: int
    output_len: int
    images: tuple[str, ...] = ()
    lora: str | None = None
    at: float | None = None
    questions: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer functions used by a request set. `plain_ids` are the ids of ordinary (not special) tokens."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    plain_ids: list[int]
    chat: Callable[[str], str] | None = None
    """Applies the model's chat template to a message."""

    @classmethod
    def from_path(cls, path: str | Path) -> Vocabulary:
        """From a checkpoint directory or a tokenizer.json.

        Raises:
            FileNotFoundError: tokenizer.json is missing.
        """
        from tokenizers import Tokenizer

        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise FileNotFoundError(f"no tokenizer.json at {path}; give the folder of a checkpoint with its tokenizer")
        tokenizer = Tokenizer.from_file(str(file))
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        return cls(
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            plain_ids=[i for i in range(tokenizer.get_vocab_size()) if i not in special],
            chat=lambda text: _chat_text(file.parent, text),
        )


MOST_REQUESTS = 10**12
MOST_TOKENS = 1 << 24
"""Max length of a prompt or an answer."""
COUNTS = {"num_prompts": 1, "gsp_num_groups": 1, "gsp_prompts_per_group": 1}
REQUEST_BYTES, TOKEN_BYTES = 300, 8
"""Least memory of a request, and of a token of its prompt, in a list."""
LENGTHS = {
    "random_input_len": 1, "random_output_len": 1, "gsp_system_prompt_len": 0, "gsp_question_len": 1,
    "gsp_output_len": 1, "sharegpt_output_len": 1,
}  # fmt: skip
"""Options of the request set, and the least value of each."""


def add_dataset_arguments(
    parser: argparse.ArgumentParser, *, default_name: str = "sharegpt", more_names: Sequence[str] = ()
) -> None:
    """bench_serving's options of the request set, with its defaults."""
    group = parser.add_argument_group("dataset")
    names = (*DATASETS, *more_names)
    group.add_argument("--dataset-name", default=default_name, choices=names, help="kind of requests (%(default)s)")
    group.add_argument(
        "--dataset-path",
        default="",
        help="file of the dataset: ShareGPT JSON (sharegpt; optional text source of random), or a trace",
    )
    group.add_argument("--num-prompts", type=int, default=1000, help="number of requests (%(default)s)")
    group.add_argument("--seed", type=int, default=42, help="seed of lengths, tokens and arrival times (%(default)s)")
    group.add_argument("--sharegpt-output-len", type=int, help="output length instead of the answer's")
    group.add_argument("--sharegpt-context-len", type=int, help="skip conversations longer than this")
    group.add_argument(
        "--random-input-len", type=int, default=1024, help="random: most tokens of a prompt (%(default)s)"
    )
    group.add_argument(
        "--random-output-len", type=int, default=1024, help="random: most tokens of an answer (%(default)s)"
    )
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, help="lengths are uniform in [ratio x len, len] (%(default)s)"
    )
    group.add_argument(
        "--gsp-num-groups", type=int, default=64, help="generated-shared-prefix: number of system prompts (%(default)s)"
    )
    group.add_argument(
        "--gsp-prompts-per-group", type=int, default=16, help="questions for each system prompt (%(default)s)"
    )
    group.add_argument(
        "--gsp-system-prompt-len", type=int, default=2048, help="tokens of a system prompt (%(default)s)"
    )
    group.add_argument("--gsp-question-len", type=int, default=128, help="tokens of a question (%(default)s)")
    group.add_argument("--gsp-output-len", type=int, default=256, help="tokens of an answer (%(default)s)")
    group.add_argument("--apply-chat-template", action="store_true", help="write text prompts as chat messages")


def check_numbers(args: argparse.Namespace, least: Mapping[str, int], most: float) -> None:
    """Raises ConfigError: an option is below its least value, or above `most`."""
    for name, smallest in least.items():
        value = getattr(args, name)
        if value is not None and not smallest <= value <= most:
            bound = f"at least {smallest}" if not value > most else f"at most {most:g}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}; it must be {bound}")


def check_dataset_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError: a number or a length of `add_dataset_arguments` is impossible."""
    check_numbers(args, COUNTS, MOST_REQUESTS)
    check_numbers(args, LENGTHS, MOST_TOKENS)


def check_memory(args: argparse.Namespace) -> None:
    """Raises ConfigError: the requests of `make_dataset` do not fit into memory."""
    if args.dataset_name == "generated-shared-prefix":
        count, flag = args.gsp_num_groups * args.gsp_prompts_per_group, "--gsp-num-groups x --gsp-prompts-per-group"
        mean = float(args.gsp_system_prompt_len + args.gsp_question_len)
    elif args.dataset_name in ("random", "random-ids", "image"):  # a prompt with an image takes more
        count, flag = args.num_prompts, "--num-prompts"
        mean = args.random_input_len * (1 + args.random_range_ratio) / 2
    else:
        return  # a file has the requests
    check_fits(flag, count, REQUEST_BYTES + TOKEN_BYTES * mean)


def check_fits(flag: str, count: int, each: float, what: str = "requests") -> None:
    """Raises ConfigError: `count` requests of `each` bytes do not fit into memory."""
    available = host_memory().available_bytes
    if count * each > available:
        raise ConfigError(
            f"{flag} is {count}: these {what} take {gb(count * each)} of memory, {gb(available)} are available; "
            f"at most {int(available / each)} fit"
        )


def make_dataset(args: argparse.Namespace, vocabulary: Vocabulary) -> list[BenchRequest]:
    """The requests of the options. Raises ValueError for invalid options."""
    rng = random.Random(args.seed)
    if args.dataset_name == "sharegpt":
        lengths = args.sharegpt_output_len, args.sharegpt_context_len
        chat = vocabulary.chat if args.apply_chat_template else None
        return sharegpt(args.dataset_path, args.num_prompts, vocabulary, rng, *lengths, chat=chat)
    if args.apply_chat_template:
        raise ValueError(
            f"--apply-chat-template needs prompts of text; --dataset-name {args.dataset_name} has token ids"
        )
    if args.dataset_name in ("random", "random-ids"):
        source = args.dataset_path if args.dataset_name == "random" else ""
        shape = args.random_input_len, args.random_output_len, args.random_range_ratio
        return list(random_requests(args.num_prompts, *shape, vocabulary, rng, text_source=source))
    return generated_shared_prefix(
        args.gsp_num_groups,
        args.gsp_prompts_per_group,
        args.gsp_system_prompt_len,
        args.gsp_question_len,
        args.gsp_output_len,
        vocabulary,
        rng,
    )


def sample_length(length: int, ratio: float, rng: random.Random) -> int:
    """Uniform in [max(1, ratio x length), length]."""
    return rng.randint(max(1, int(length * ratio)), length)


class _Numbers(random.Random):
    """The next numbers of `rng`, whose state it takes until `give_back`: numpy has the same generator and computes many
    of them in a tenth of the time."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        (_, words, _), self._rng, self._twister = rng.getstate(), rng, np.random.MT19937()
        key = np.array(words[:-1], np.uint32)
        self._twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": words[-1]}}
        self._many = np.random.RandomState(self._twister).random_sample

    def give_back(self) -> None:
        state = self._twister.state["state"]
        self._rng.setstate((3, (*state["key"].tolist(), state["pos"]), None))

    def getrandbits(self, k: int) -> int:
        """Of at most 32 bits."""
        return self._twister.random_raw() >> (32 - k)

    def randint(self, a: int, b: int) -> int:
        """As of `Random`, without its four calls."""
        if (count := b - a + 1) <= 0:
            raise ValueError(f"no number is between {a} and {b}")
        bits = count.bit_length()
        while (number := self.getrandbits(bits)) >= count:
            pass
        return a + number

    def chosen(self, values: NDArray[np.object_], count: int, head: int) -> list[int]:
        """The first `head` of `count` `choices`."""
        found: list[int] = values.take((self._many(count)[:head] * len(values)).astype(np.int64)).tolist()
        return found


def random_requests(
    count: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    vocabulary: Vocabulary,
    rng: random.Random,
    *,
    text_source: str = "",
    skip: int = 0,
    head: int | None = None,
) -> Iterator[BenchRequest]:
    """Token ids of random lengths: from the text of a ShareGPT file if given, random ones otherwise. The first `skip`
    requests have no random ones, the others the first `head` of them, or all. `rng` is not to be used before the end of
    the iterator."""
    if not 0 <= range_ratio <= 1:
        raise ValueError(f"--random-range-ratio is {range_ratio}; it must be in [0, 1]")
    texts = [question for question, _ in _conversations(text_source)] if text_source else []
    rng.shuffle(texts)
    plain, numbers = np.array(vocabulary.plain_ids, dtype=object), _Numbers(rng)
    try:
        for index in range(count):
            want = sample_length(input_len, range_ratio, numbers)
            if texts:
                ids = vocabulary.encode(texts[index % len(texts)]) or vocabulary.plain_ids[:1]
                ids = (ids * -(-want // len(ids)))[:want]
            else:
                drawn = 0 if index < skip else want if head is None else min(want, head)
                ids = numbers.chosen(plain, want, drawn)
            yield BenchRequest(ids, want, sample_length(output_len, range_ratio, numbers))
    finally:
        numbers.give_back()


def generated_shared_prefix(
    num_groups: int,
    prompts_per_group: int,
    system_prompt_len: int,
    question_len: int,
    output_len: int,
    vocabulary: Vocabulary,
    rng: random.Random,
) -> list[BenchRequest]:
    """`num_groups` system prompts with `prompts_per_group` questions each, in random order."""
    requests = []
    for _ in range(num_groups):
        system = rng.choices(vocabulary.plain_ids, k=system_prompt_len)
        for _ in range(prompts_per_group):
            ids = system + rng.choices(vocabulary.plain_ids, k=question_len)
            requests.append(BenchRequest(ids, len(ids), output_len))
    rng.shuffle(requests)
    return requests


def sharegpt(
    path: str,
    count: int,
    vocabulary: Vocabulary,
    rng: random.Random,
    output_len: int | None = None,
    context_len: int | None = None,
    *,
    chat: Callable[[str], str] | None = None,
) -> list[BenchRequest]:
    """First question of each conversation; the output length is the first answer's, unless given."""
    if not path:
        raise ValueError(
            "--dataset-name sharegpt needs --dataset-path FILE (nothing is downloaded); or use --dataset-name random"
        )
    conversations = _conversations(path)
    rng.shuffle(conversations)
    requests: list[BenchRequest] = []
    for question, answer in conversations:
        if len(requests) == count:
            break
        question = chat(question) if chat else question
        prompt_len = len(vocabulary.encode(question))
        wanted = output_len or len(vocabulary.encode(answer))
        if prompt_len < 2 or wanted < 2:
            continue
        if context_len and prompt_len + wanted > context_len:
            continue
        requests.append(BenchRequest(question, prompt_len, wanted))
    return requests


@lru_cache(maxsize=1)
def _chat_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _chat_text(folder: Path, text: str) -> str:
    """The text as a user's message, ready for the assistant's answer."""
    message = [{"role": "user", "content": text}]
    return str(_chat_tokenizer(folder).apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def _conversations(path: str) -> list[tuple[str, str]]:
    """(first question, first answer) of every conversation of a ShareGPT file with both."""
    try:
        entries: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--dataset-path {path}: cannot be read ({error.strerror}); give a ShareGPT file") from None
    except ValueError as error:
        raise ValueError(f"--dataset-path {path}: not JSON ({error}); give a ShareGPT file") from None
    found = []
    try:
        for entry in entries:
            turns = entry.get("conversations") or entry.get("conversation") or []
            if len(turns) >= 2:
                found.append((str(turns[0]["value"]), str(turns[1]["value"])))
    except (AttributeError, KeyError, TypeError):
        raise ValueError(
            f'--dataset-path {path}: not a ShareGPT file; give a list of objects with "conversations", whose turns '
            'have a "value"'
        ) from None
    return found

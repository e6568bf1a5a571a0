"""Flags of the server, its tokenizer and its metrics: values out of range and flags that contradict each other."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.config.buckets import token_buckets
from moe_engine.config.field import option_of
from moe_engine.custom_logit_processor import NO_DILL
from moe_engine.errors import InputError
from moe_engine.sampling_checks import parse_sampling
from moe_engine.tokenizer.chat_messages import BUILT_IN_TEMPLATES, refuse_reserved

METRIC_LABELS = frozenset({
    "model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank", "le", "quantile",
    "window", "position", "endpoint", "method", "status_code", "path", "layer",
})  # fmt: skip
"""Labels that metrics have already."""

BUCKETS = (
    "bucket_time_to_first_token", "bucket_inter_token_latency", "bucket_e2e_request_latency",
    "prefill_delayer_forward_passes_buckets", "prefill_delayer_wait_seconds_buckets",
)  # fmt: skip

HIDDEN = "***"
"""Placeholder of keys in /server_info."""


def server_problems(args: EngineArgs) -> Iterator[str]:
    """Values of flags of the server, its tokenizer and its metrics that are wrong or contradict each other."""
    model, server = args.model, args.server
    yield from _keys_and_address(args)
    yield from _buckets(args)
    yield from _tracing(args)
    yield from _metric_labels(args)
    if server.enable_custom_logit_processor and find_spec("dill") is None:
        yield f"--enable-custom-logit-processor: {NO_DILL}"
    if server.grammar_backend == "xgrammar":
        if find_spec("xgrammar") is None:
            yield "--grammar-backend xgrammar: is not installed; pip install -e '.[xgrammar]', or use llguidance"
        if server.constrained_json_whitespace_pattern is not None:
            yield "--constrained-json-whitespace-pattern needs --grammar-backend llguidance: xgrammar has none"
    name = model.served_model_name
    if name is not None and (not name.strip() or ":" in name):
        yield f"--served-model-name {name!r}: must be a name without a colon"
    yield from _tokenizer(args)
    try:
        parse_sampling(json.loads(server.preferred_sampling_params), "--preferred-sampling-params")
    except InputError as error:
        yield error.message


def _buckets(args: EngineArgs) -> Iterator[str]:
    values = args.flat()
    for name in BUCKETS:
        given = values[name]
        if given is None:
            continue
        option = option_of(name)
        try:
            bounds = [float(word) for word in given.split()]
        except ValueError:
            yield f"{option} {given}: must be numbers, for instance {option} 0.1 0.5 1"
            continue
        if not bounds or bounds[0] <= 0 or any(a >= b for a, b in pairwise(bounds)) or not math.isfinite(bounds[-1]):
            yield f"{option} {given}: must be rising numbers above 0, for instance {option} 0.1 0.5 1"

    for name in ("prompt_tokens_buckets", "generation_tokens_buckets"):
        rule = getattr(args.logging, name)
        try:
            token_buckets(rule or "default")
        except ValueError as error:
            yield f"{option_of(name)} {rule}: {error}"


def _metric_labels(args: EngineArgs) -> Iterator[str]:
    labels: dict[str, Any] = json.loads(args.logging.extra_metric_labels)
    for name, value in labels.items():
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__") or name in METRIC_LABELS:
            yield f"--extra-metric-labels: {name!r} is not the name of a label, or is one of the engine's own"
        elif not isinstance(value, str):
            yield f"--extra-metric-labels: the value of {name!r} must be a text, found {value!r}"


def _tracing(args: EngineArgs) -> Iterator[str]:
    flags = args.logging
    if not flags.enable_trace:
        return
    if not all(installed(name) for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")):
        yield "--enable-trace: OpenTelemetry is not installed; pip install -e '.[trace]'"
    address = flags.otlp_traces_endpoint
    scheme, separator, rest = address.rpartition("://")
    if (separator and scheme not in ("http", "https")) or not rest.partition("/")[0]:
        yield f"--otlp-traces-endpoint {address}: must be HOST:PORT or an http(s) URL, for instance localhost:4318"
    elif rest.partition("/")[0].endswith(":4317"):
        yield (
            f"--otlp-traces-endpoint {address}: traces are sent by OTLP over HTTP, and 4317 is the port of OTLP over "
            "gRPC; give the collector's HTTP port, usually 4318"
        )


def _keys_and_address(args: EngineArgs) -> Iterator[str]:
    server = args.server
    for option, key in (
        ("--api-key", server.api_key), ("--admin-api-key", server.admin_api_key),
        ("--ssl-keyfile-password", server.ssl_keyfile_password),
    ):  # fmt: skip
        if key is not None and not key.strip():
            yield f"{option} is empty: leave it out for no key, or give one"
        elif key is not None and key != key.strip() and option != "--ssl-keyfile-password":
            yield f"{option}: begins or ends with a blank or line break, which HTTP headers cannot carry; remove it"
        if key == HIDDEN:
            yield f"{option} {HIDDEN}: /server_info hides a key this way; give the key itself"
    if not server.host.strip():
        yield "--host is empty: give an address of this machine, 127.0.0.1 for local clients only or 0.0.0.0 for all"
    if (server.ssl_certfile is None) != (server.ssl_keyfile is None):
        yield "--ssl-certfile and --ssl-keyfile belong together: give both for HTTPS, or none"
    if server.ssl_keyfile_password is not None and server.ssl_keyfile is None:
        yield "--ssl-keyfile-password needs --ssl-keyfile, the file that it decrypts"
    root = server.fastapi_root_path
    if root and (not root.startswith("/") or root.endswith("/")):
        yield f"--fastapi-root-path {root}: must begin with / and not end with it, for instance /engine"


def _tokenizer(args: EngineArgs) -> Iterator[str]:
    """The tokenizer and its chat template."""
    model, server = args.model, args.server
    if model.skip_tokenizer_init:
        for option, value in (
            ("--tokenizer-path", None if model.tokenizer_path == model.model_path else model.tokenizer_path),
            ("--chat-template", model.chat_template),
            ("--reasoning-parser", server.reasoning_parser),
            ("--tool-call-parser", server.tool_call_parser),
        ):
            if value is not None:
                yield f"{option} {value} needs a tokenizer, and --skip-tokenizer-init loads none; drop one"
    folder = model.tokenizer_path
    if folder is not None and folder.startswith(("/", "./", "../", "~")) and not os.path.exists(folder):
        yield f"--tokenizer-path {folder}: no such folder"
    try:
        refuse_reserved(json.loads(server.default_chat_template_kwargs))
    except InputError as error:
        yield f"--default-chat-template-kwargs: {error.message.removeprefix('chat_template_kwargs.')}"
    template = model.chat_template
    built_in = template in BUILT_IN_TEMPLATES
    if template is not None and not built_in and "{" not in template and not os.path.isfile(template):
        yield (
            f"--chat-template {template:.200}: no such file; give a .jinja file, or a built-in name: "
            f"{', '.join(BUILT_IN_TEMPLATES)}"
        )


def loadable(library: str) -> bool:
    """Whether the system has a shared library, by its file name."""
    try:
        return bool(ctypes.CDLL(library))
    except OSError:
        return False


def installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False

"""Server state shared by all endpoints, and health checks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moe_engine.config.server import ServerArgs
from moe_engine.errors import InputError
from moe_engine.frontend.client_api import EngineClient, Health
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.watchdog import stall
from moe_engine.server.bodies import Bodies
from moe_engine.server.errors import ModelNotFoundError
from moe_engine.server.logprob_json import TokenIdJson, TokenJson
from moe_engine.server.openai.types import CommonRequest
from moe_engine.server.responses.store import ResponseStore
from moe_engine.server.settings import ServerSettings
from moe_engine.tokenizer.chat_messages import ChatEncoder
from moe_engine.tokenizer.tokenizer import Tokenizer


@dataclass
class ServerState:
    frontend: Frontend
    client: EngineClient
    settings: ServerSettings
    chat_template: ChatEncoder | None
    responses: ResponseStore | None = None
    """None in the processes of large bodies."""
    started_at: float = field(default_factory=time.time)
    bodies: Bodies = field(init=False)
    """Set once, before the first request."""

    @property
    def flags(self) -> ServerArgs:
        """The flags of the HTTP server."""
        return self.settings.args.server

    @property
    def model_name(self) -> str:
        return self.client.info.served_model_name

    def response_model(self, model: str | None) -> str:
        """The model name of the response: the client's own, as in SGLang."""
        return model or self.model_name

    def base_model(self, model: str | None) -> str:
        """`response_model` of an endpoint without adapters.

        Raises:
            InputError: the name selects a LoRA adapter (`base:adapter`).
        """
        if model is not None and ":" in model and model not in self._names:
            base, _, adapter = model.partition(":")
            raise InputError.at(
                "model",
                f"{adapter!r:.80} in {model!r:.80} names a LoRA adapter, and vectors and scores have none; send "
                f"{base!r:.80}",
            )
        return self.response_model(model)

    async def close(self) -> None:
        """Call after the last request. The engine still runs."""
        if self.responses is not None:
            await self.responses.close()
        self.bodies.close()
        self.frontend.close()

    def find_model(self, model: str) -> None:
        """Raises ModelNotFoundError unless it is the served name, the model's path, or "default"."""
        if model not in self._names:
            raise ModelNotFoundError(model, self.model_name)

    @property
    def _names(self) -> tuple[str, ...]:
        return "default", self.model_name, self.client.info.model_path

    def template_arguments(self, asked: Mapping[str, Any] | None) -> dict[str, Any]:
        """Arguments of the chat template: those of the launch, then the request's."""
        return {**self._default_arguments, **(asked or {})}

    @cached_property
    def _default_arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.flags.default_chat_template_kwargs)
        return found

    @cached_property
    def token_json(self) -> TokenJson:
        """JSON fragments of tokens, for responses with log-probabilities."""
        return TokenJson(self.frontend.tokenizer)

    @cached_property
    def _token_id_json(self) -> TokenJson:
        return TokenIdJson(self.frontend.tokenizer)

    def token_json_of(self, req: CommonRequest) -> TokenJson:
        return self._token_id_json if req.return_tokens_as_token_ids else self.token_json

    def tokenizer(self) -> Tokenizer:
        if self.frontend.tokenizer is None:
            raise InputError("this server runs with --skip-tokenizer-init; only /generate with input_ids works")
        return self.frontend.tokenizer


def health_problem(health: Health, watchdog_timeout: float) -> str | None:
    """Reason the engine is unhealthy, or None. Reads shared memory only; never blocks."""
    if health.dead or not health.alive:
        return health.dead or "a process of the engine is dead"
    if not health.ready:
        return "the engine is still starting"
    return stall(health, watchdog_timeout)
